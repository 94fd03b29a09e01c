"""Counts of kept and dropped rows over one axis.

In: a value for each row (n,), NaN where there is none. Out: a `Histogram` with common edges, so that both can be laid over each other.
"""

from __future__ import annotations

import numpy as np

from clusterft.report.facts import Histogram

MOST_BINS, LEAST_BINS = 24, 8


def histogram(key: str, title: str, unit: str, values: np.ndarray, kept: np.ndarray, *, log_scale: bool = False) -> Histogram:
    """Bins from the least to the largest value. values (n,) with at least one finite, kept (n,) bool.

    log_scale: bins of equal ratio, for positive whole numbers such as lengths; zero is counted in the first bin.
    """
    finite = np.isfinite(values)
    values, kept = values[finite].astype(np.float64), kept[finite]
    bins = int(np.clip(np.sqrt(len(values)), LEAST_BINS, MOST_BINS))
    edges = log_edges(values, bins) if log_scale else linear_edges(values, bins)
    values_in = np.clip(values, edges[0], edges[-1])
    return Histogram(
        key=key,
        title=title,
        unit=unit,
        edges=edges,
        kept=np.histogram(values_in[kept], edges)[0],
        dropped=np.histogram(values_in[~kept], edges)[0],
        kept_median=float(np.median(values[kept])) if kept.any() else None,
        dropped_median=float(np.median(values[~kept])) if (~kept).any() else None,
        log_scale=log_scale,
    )


def log_edges(values: np.ndarray, bins: int) -> np.ndarray:
    """Edges at half-integers, so that every whole number lies inside a bin. Low bins that hold no whole number are merged."""
    low, high = max(values.min(), 1.0), max(values.max(), 1.0)
    return np.unique(np.floor(np.geomspace(low, high + 1, bins + 1) + 1e-9)) - 0.5


def linear_edges(values: np.ndarray, bins: int) -> np.ndarray:
    low, high = float(values.min()), float(values.max())
    return np.linspace(low, high if high > low else low + 1.0, bins + 1)
