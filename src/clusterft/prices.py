"""Good starting prices for the exact assignment; a poor guess costs time, never exactness.

In go cost rows and size limits, out come prices (k,) float64. Three sources: the exact solution on a sample with limits scaled
down; one Newton step on the dual from the margins of a whole scan; further Newton steps on the rows of small margin.
"""

from __future__ import annotations

import numpy as np

from clusterft.assignment_kernels import balance, margins, relabel

FINISH_BYTES = 32 * 2**20
"""Size of the float64 cost rows of the finish above which a new scan is preferred to a larger finish."""

NEWTON_STEPS = 4
TRUST = 8
"""A step goes at most this many times as far as the margins that its density was measured on."""


def flows_for(prices: np.ndarray, counts: np.ndarray, low: np.ndarray, high: np.ndarray) -> np.ndarray:
    """(k,) the sizes that belong to the prices: full where positive, smallest where negative, free between where zero."""
    return np.where(prices > 0, high, np.where(prices < 0, low, np.clip(counts, low, high)))


def small_prices(costs: np.ndarray, low: np.ndarray, high: np.ndarray) -> np.ndarray:
    """Prices (k,) of the exact solution for few rows (n, k), from scratch."""
    labels, counts = np.zeros(len(costs), np.int64), np.zeros(low.size, np.int64)
    counts[0] = len(costs)
    nodes = np.zeros(low.size + 1)
    relabel(costs, nodes[:-1], labels, counts)
    balance(costs, labels, counts, nodes, np.clip(counts, low, high), low, high)
    return nodes[:-1]


def scaled_limits(low: np.ndarray, high: np.ndarray, share: float) -> tuple[np.ndarray, np.ndarray]:
    """Limits for that share of the rows, always feasible."""
    return np.floor(low * share).astype(np.int64), np.ceil(high * share).astype(np.int64)


def needed_margin(labels, seconds, gaps, counts, prices, low, high) -> tuple[np.ndarray, float]:
    """New prices (k,) by one Newton step from a scan, and the margin below which rows are likely to change.

    The margin takes in the movement of the prices twice, or at least a few rows for each cluster.
    """
    n, k = labels.size, counts.size
    few = min(n - 1, max(16 * k, n // 512))
    smallest = _rank_value(gaps, few)
    wanted = flows_for(prices, counts, low, high)
    missing = np.abs(counts - wanted).sum()
    if missing == 0:
        return prices, max(smallest, 0.0)
    near = min(n - 1, int(4 * missing) + few)
    reach = max(_rank_value(gaps, near), 1e-30)
    guess = _newton(labels, seconds, gaps, reach, counts, prices, low, high)
    width = float(np.ptp(guess - prices)) * 1.5 + smallest
    most = min(n - 1, max(near, n // 8), max(few, FINISH_BYTES // (8 * k)))
    return guess, max(0.0, min(width, _rank_value(gaps, most)))


def improve_prices(costs, labels, counts, guess, scanned, width, low, high) -> tuple[np.ndarray, int]:
    """Newton steps on the rows at hand: prices (k,) and how many rows they leave misplaced. labels and counts come in for
    `scanned` and leave for the prices that are returned.

    Steps that move the prices further apart than `width` or leave more rows misplaced are halved, then given up.
    """
    prices, best = scanned, _misplaced(scanned, counts, low, high)
    seconds, gaps = np.empty(labels.size, np.int64), np.empty(labels.size)
    for _ in range(NEWTON_STEPS):
        if best <= counts.size or not labels.size:
            break
        longest = min(1.0, 0.9 * width / max(float(np.ptp(guess - prices)), 1e-300))
        for shrink in (longest, longest / 2, longest / 4):
            trial = prices + shrink * (guess - prices)
            trial[(np.sign(trial) != np.sign(guess)) & (guess == 0)] = 0.0
            new_labels, new_counts = labels.copy(), counts.copy()
            relabel(costs, trial, new_labels, new_counts)
            left = _misplaced(trial, new_counts, low, high)
            if np.ptp(trial - scanned) <= width and left < best:
                break
        else:
            break
        prices, best = trial, left
        labels[:], counts[:] = new_labels, new_counts
        margins(costs, prices, labels, seconds, gaps)
        near = min(labels.size - 1, max(4 * int(best), 4 * counts.size))
        guess = _newton(labels, seconds, gaps, max(_rank_value(gaps, near), 1e-30), counts, prices, low, high)
    return prices, best


def _rank_value(values: np.ndarray, rank: int) -> float:
    """About the value of this rank, from at most 16,384 of the values: good enough for a guess, at a tenth of the time."""
    step = max(1, values.size // 16384)
    some = values[::step]
    rank = min(rank // step, some.size - 1)
    return float(np.partition(some, rank)[rank])


def _misplaced(prices, counts, low, high) -> int:
    return int(np.abs(counts - flows_for(prices, counts, low, high)).sum())


def _newton(labels, seconds, gaps, reach, counts, prices, low, high) -> np.ndarray:
    """One Newton step on the dual: the Hessian is the Laplacian of the rows' density along the boundaries of the clusters.

    Prices that are zero and need not move stay; one that would pass through zero stops there.
    """
    k = counts.size
    close = np.flatnonzero(gaps <= reach)
    density = np.bincount(labels[close].astype(np.int64) * k + seconds[close], minlength=k * k).reshape(k, k) / reach
    density = (density + density.T) / 2
    laplacian = np.diag(density.sum(1)) - density
    excess = (counts - flows_for(prices, counts, low, high)).astype(np.float64)
    free = (prices != 0) | (excess != 0)
    if not free.any():
        return prices
    system = laplacian[np.ix_(free, free)]
    step = np.zeros(k)
    step[free] = np.linalg.solve(system + 1e-9 * max(system.diagonal().max(), 1e-30) * np.eye(len(system)), excess[free])
    if free.all():  # a common shift changes nothing, and the Laplacian alone does not fix it
        step -= step.mean()
    step = np.clip(step, -TRUST * reach, TRUST * reach)
    return np.where(prices * (prices + step) < 0, 0.0, prices + step)
