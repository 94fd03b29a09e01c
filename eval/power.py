"""How much more would decide it: power of the verdict, and the number of seeds or problems that would settle an open one.

    mean and deviation so far + margin ► seeds_to_settle        bootstrap difference + margin ► problems_to_settle

The answers assume that mean and spread stay as they were seen: an aid for planning, not a promise. No torch, no disk.
"""

from __future__ import annotations

import math

from scipy import stats

from eval.statistics import MIN_SEEDS, Difference

SETTLE_LIMIT = 10_000
"""`seeds_to_settle` and `problems_to_settle` give None beyond this many seeds, or this many times the problems at hand."""


def t_power(distance: float, sd: float, n: int, confidence: float = 0.95) -> float:
    """Chance that a two-sided t interval of n paired differences lies wholly on its own side of a point `distance` away.

    Noncentral t, one tail, level (1 - confidence) / 2: the power of the non-inferiority test.
    """
    shift = distance / sd * math.sqrt(n)
    if shift > 40:  # scipy's noncentral t loses its tail there; the power is 1 to machine precision
        return 1.0
    return float(stats.nct.sf(stats.t.ppf((1 + confidence) / 2, n - 1), n - 1, shift))


def seeds_to_settle(mean: float, sd: float | None, margin: float, power: float = 0.8, confidence: float = 0.95) -> int | None:
    """Smallest number of paired seeds at which the verdict falls with chance `power`, if mean and sd are as seen so far.

    mean, sd and margin in the same unit, mean = candidate minus reference. None: no sd known, a mean exactly at the margin, or
    more than SETTLE_LIMIT.
    """
    distance = abs(mean + margin)
    if not sd or distance == 0:
        return None
    low, high = MIN_SEEDS - 1, MIN_SEEDS
    while t_power(distance, sd, high, confidence) < power:
        low, high = high, high * 2
        if low >= SETTLE_LIMIT:
            return None
    while high - low > 1:
        middle = (low + high) // 2
        if t_power(distance, sd, middle, confidence) < power:
            low = middle
        else:
            high = middle
    return high if high <= SETTLE_LIMIT else None


def problems_to_settle(difference: Difference, margin: float, power: float = 0.8) -> int | None:
    """Number of problems (same mix of tasks) at which the verdict falls with chance `power`; normal approximation.

    The imaginary outcomes of the bootstrap stay as few as they are while the problems grow. None as for `seeds_to_settle`.
    """
    distance = abs(difference.mean + margin)
    if distance == 0 or difference.stderr == 0:
        return None
    z = float(stats.norm.ppf((1 + difference.confidence) / 2) + stats.norm.ppf(power))
    if z * difference.stderr_at(SETTLE_LIMIT) > distance:
        return None
    low, high = 0, SETTLE_LIMIT * difference.n  # the answer lies in (low, high]
    while high - low > 1:
        middle = (low + high) // 2
        if z * difference.stderr_at(middle / difference.n) <= distance:
            high = middle
        else:
            low = middle
    return high
