"""Small statistics over seeds: mean, deviation, Student intervals, verdicts. Numbers in, numbers out.

Everything is per seed: at most a handful of values. Fewer than three give no interval and no verdict.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from fractions import Fraction

from scipy.special import ndtri, stdtrit

MIN_SEEDS = 3
CONFIDENCE = 0.95
ROUNDING = 1e-12
"""Share of a value that sums of floats may be off by; far below one problem of any benchmark."""


def mean_sd(values: Sequence[float]) -> tuple[float, float | None]:
    """Mean and sample deviation (ddof 1; None for a single value). Raises ValueError for no values.

    Computed in fractions and rounded once: a rounded mean would give equal values a deviation of about 1e-20 instead of 0.
    """
    if not values:
        raise ValueError("no values to average")
    exact = [Fraction(v) for v in values]
    mean = statistics.mean(exact)
    return float(mean), None if len(values) == 1 else statistics.stdev(exact, mean)


def t_interval(values: Sequence[float], confidence: float = CONFIDENCE) -> tuple[float, float] | None:
    """Student interval of the mean; None for fewer than three values."""
    if len(values) < MIN_SEEDS:
        return None
    mean, sd = mean_sd(values)
    assert sd is not None
    half = float(stdtrit(len(values) - 1, 0.5 + confidence / 2)) * sd / math.sqrt(len(values))
    return mean - half, mean + half


def paired(a: Mapping[int, float], b: Mapping[int, float]) -> list[float]:
    """a - b for the seeds that both have, in order of seed. Differences that are equal but for the values' rounding are made equal.

    A difference is as exact as the values that it is taken of: 52.5 and 52.5 out of two sums differ by 7e-15, which is no spread.
    """
    seeds = sorted(a.keys() & b.keys())
    differences = [a[s] - b[s] for s in seeds]
    rounding = ROUNDING * max((max(abs(a[s]), abs(b[s])) for s in seeds), default=0.0)
    if differences and max(differences) - min(differences) <= rounding:
        same = statistics.median_low(differences)
        return [same if abs(same) > rounding else 0.0] * len(differences)
    return differences


def has_no_width(interval: tuple[float, float], scale: float = 0.0) -> bool:
    """Whether all values were the same, but for rounding: nothing can be said from their spread. scale: of the values, if known."""
    return interval[1] - interval[0] <= 1e-9 * max(abs(interval[0]), abs(interval[1]), scale)


def verdict(interval: tuple[float, float] | None, margin: float) -> str:
    """What an interval of (ours - reference, higher is better) allows to say at a margin of non-inferiority.

    "better": all of it above zero; "no worse": all of it above -margin; "worse": all of it below -margin; else "cannot tell".
    An interval without width says nothing: a score of a few problems moves in steps, and seeds that happen to agree are no certainty.
    """
    if interval is None:
        return "too few seeds"
    low, high = interval
    if has_no_width(interval, margin):
        return "cannot tell"
    if low > 0:
        return "better"
    if low > -margin:
        return "no worse"
    return "worse" if high < -margin else "cannot tell"


def wilson_interval(successes: int, n: int, confidence: float = CONFIDENCE) -> tuple[float, float]:
    """Wilson score interval of a share. Raises ValueError unless 0 <= successes <= n and n >= 1."""
    if n < 1 or not 0 <= successes <= n:
        raise ValueError(f"{successes} of {n} is not a share")
    z = float(ndtri(0.5 + confidence / 2))
    p = successes / n
    centre = (p + z * z / (2 * n)) / (1 + z * z / n)
    half = z * math.sqrt(p * (1 - p) / n + z * z / (4 * n * n)) / (1 + z * z / n)
    return max(0.0, centre - half), min(1.0, centre + half)
