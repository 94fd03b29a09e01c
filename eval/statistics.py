"""Numbers about numbers: what may be said after a few seeds, or after one run on a few hundred problems.

    scores over seeds        ► summarise, paired_by_seed       mean, sample deviation (ddof 1), Student t interval
    outcomes over problems   ► paired_bootstrap, mcnemar_exact difference of two models on the same problems
    several tasks            ► iqm, iqm_interval, iqm_difference   interquartile mean, bootstrap stratified by task
    an open question         ► seeds_to_settle, problems_to_settle how much more would decide it

In go plain floats and arrays, out come small frozen records. No torch, no disk, no configuration; randomness is an argument
(`clusterft.seeding.generator`). Values that are not finite are refused: whoever calls has to flag them first. The verdict that is
built on these numbers lives in `eval.verdict`. Axis letters: s seeds, n problems, j tasks.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from scipy import stats

MIN_SEEDS = 3
"""Fewer seeds than this give no interval and no verdict."""

SETTLE_LIMIT = 10_000
"""`seeds_to_settle` and `problems_to_settle` give None beyond this many seeds, or this many times the problems at hand."""


@dataclass(frozen=True)
class Summary:
    """Some values over seeds. sd has ddof 1 (None for one value); low and high are None where `reason` says why."""

    n: int
    mean: float
    sd: float | None
    low: float | None
    high: float | None
    confidence: float = 0.95
    reason: str = ""


@dataclass(frozen=True)
class Difference:
    """Candidate minus reference over n shared problems, with a bootstrap interval and the standard error behind it."""

    n: int
    mean: float
    low: float
    high: float
    stderr: float
    confidence: float = 0.95


@dataclass(frozen=True)
class McNemar:
    """Problems that only the candidate solved (gained), only the reference solved (lost), and the exact two-sided p-value."""

    gained: int
    lost: int
    p_value: float


def _finite(values: Sequence[float] | np.ndarray, what: str) -> np.ndarray:
    array = np.asarray(values, dtype=np.float64)
    if array.size == 0:
        raise ValueError(f"{what}: no values")
    if not np.isfinite(array).all():
        raise ValueError(
            f"{what}: {int((~np.isfinite(array)).sum())} of {array.size} values are not finite; flag them, don't average"
        )
    return array


def summarise(values: Sequence[float] | np.ndarray, confidence: float = 0.95) -> Summary:
    """Mean, sample deviation and t interval of `values` (s,).

    Below MIN_SEEDS values there is no interval. Nor is there one when all values are equal: the t interval is undefined at zero
    spread, and seeds that change nothing are one observation, not several.

    Raises ValueError on an empty input or on values that are not finite.
    """
    array = _finite(values, "summarise")
    n, mean = len(array), float(array.mean())
    sd = float(array.std(ddof=1)) if n > 1 else None
    if n < MIN_SEEDS:
        return Summary(n, mean, sd, None, None, confidence, f"n < {MIN_SEEDS}")
    assert sd is not None
    if sd <= 1e-12 * max(1.0, abs(mean)):
        return Summary(n, mean, 0.0, None, None, confidence, "no spread over seeds")
    half = float(stats.t.ppf((1 + confidence) / 2, n - 1)) * sd / math.sqrt(n)
    return Summary(n, mean, sd, mean - half, mean + half, confidence)


def paired_by_seed(candidate: Mapping[int, float], reference: Mapping[int, float], confidence: float = 0.95) -> Summary | None:
    """Summary of candidate minus reference over the seeds that both have, or None if they share none."""
    seeds = sorted(set(candidate) & set(reference))
    if not seeds:
        return None
    return summarise([candidate[s] - reference[s] for s in seeds], confidence)


def binomial_stderr(value: float, n: int) -> float:
    """Standard error of one run's accuracy `value` in [0, 1] over n problems: sqrt(p (1 - p) / n). Not a spread over seeds."""
    if not 0 <= value <= 1 or n < 1:
        raise ValueError(f"binomial_stderr: value {value!r} over n = {n} is not an accuracy")
    return math.sqrt(value * (1 - value) / n)


def mcnemar_exact(candidate: Sequence[float] | np.ndarray, reference: Sequence[float] | np.ndarray) -> McNemar:
    """Exact McNemar test (binomial on the discordant problems) of two 0/1 vectors (n,) over the same problems.

    Raises ValueError if the lengths differ or a value is neither 0 nor 1.
    """
    a, b = _finite(candidate, "mcnemar_exact"), _finite(reference, "mcnemar_exact")
    if a.shape != b.shape:
        raise ValueError(f"mcnemar_exact: {len(a)} outcomes against {len(b)}")
    if not (np.isin(a, (0, 1)).all() and np.isin(b, (0, 1)).all()):
        raise ValueError("mcnemar_exact: outcomes must be 0 or 1")
    gained, lost = int(((a == 1) & (b == 0)).sum()), int(((a == 0) & (b == 1)).sum())
    p = 1.0 if gained + lost == 0 else float(stats.binomtest(gained, gained + lost, 0.5).pvalue)
    return McNemar(gained, lost, p)


def _by_stratum(difference: np.ndarray, strata: Sequence[str] | None, average: str) -> list[tuple[float, np.ndarray]]:
    """(weight, differences) of every stratum; weights sum to 1. Strata in sorted order, so that row order does not matter."""
    if average not in ("macro", "micro"):
        raise ValueError(f"average {average!r} is not one of macro (every task counts the same), micro (every problem does)")
    if strata is None:
        return [(1.0, difference)]
    if len(strata) != len(difference):
        raise ValueError(f"{len(strata)} strata for {len(difference)} problems")
    labels = np.asarray([str(s) for s in strata])
    names = sorted(set(labels.tolist()))
    parts = [difference[labels == name] for name in names]
    return [(1 / len(parts) if average == "macro" else len(p) / len(difference), p) for p in parts]


def _stratum_variance(part: np.ndarray, pseudo: float) -> float:
    """Variance of one problem's difference when `pseudo` imaginary wins and as many losses are added."""
    centre = part.mean()
    return float((((part - centre) ** 2).sum() + pseudo * ((1 - centre) ** 2 + (1 + centre) ** 2)) / (len(part) + 2 * pseudo))


def _resampled_means(part: np.ndarray, pseudo: float, resamples: int, rng: np.random.Generator) -> np.ndarray:
    """Means (resamples,) of bootstrap samples of `part`, centred on its own mean.

    Drawing n values with replacement is drawing multinomial counts over the distinct values, which costs three numbers
    instead of n where outcomes are 0 or 1. The shift takes back what the pseudo-outcomes do to the centre.
    """
    values, counts = np.unique(part, return_counts=True)
    values, mass = np.concatenate([values, [-1.0, 1.0]]), np.concatenate([counts, [pseudo, pseudo]]).astype(np.float64)
    share = mass / mass.sum()
    rows = max(1, 4_000_000 // len(values))
    means = np.concatenate(
        [rng.multinomial(len(part), share, size=min(rows, resamples - i)) @ values for i in range(0, resamples, rows)]
    )
    return means / len(part) + (part.mean() - share @ values)


def paired_bootstrap(
    candidate: Sequence[float] | np.ndarray,
    reference: Sequence[float] | np.ndarray,
    rng: np.random.Generator,
    strata: Sequence[str] | None = None,
    average: str = "macro",
    resamples: int = 10_000,
    confidence: float = 0.95,
    pseudo: float = 1.5,
) -> Difference:
    """Percentile bootstrap over problems of the mean difference between two models on the same n problems.

    candidate, reference  (n,) outcomes in [0, 1], aligned: 0/1 for one run, the mean over seeds for several
    strata                (n,) task of each problem; resampled within a task only
    average               macro: mean of the tasks' means; micro: mean over problems
    pseudo                imaginary wins and losses added to every task before drawing. With 0 this is the textbook bootstrap,
                          blind where two models hardly ever differ (no discordant problem: an interval of width 0, so a
                          false "no worse"); the default keeps that error below 5 % (benchmarks/verdict_simulation.py).
                          Use 0 for values that are not outcomes in [0, 1], such as losses.

    Raises ValueError if lengths differ or values are not finite.
    """
    a, b = _finite(candidate, "paired_bootstrap"), _finite(reference, "paired_bootstrap")
    if a.shape != b.shape or a.ndim != 1:
        raise ValueError(f"paired_bootstrap: shapes {a.shape} and {b.shape} are not one outcome a problem")
    if pseudo and (min(a.min(), b.min()) < 0 or max(a.max(), b.max()) > 1):
        raise ValueError("paired_bootstrap: outcomes outside [0, 1]; pass pseudo=0 for losses")
    parts = _by_stratum(a - b, strata, average)
    draws = np.sum([w * _resampled_means(p, pseudo, resamples, rng) for w, p in parts], axis=0)
    low, high = np.quantile(draws, [(1 - confidence) / 2, (1 + confidence) / 2])
    variance = sum(w * w * _stratum_variance(p, pseudo) / len(p) for w, p in parts)
    mean = float(sum(w * p.mean() for w, p in parts))
    return Difference(len(a), mean, float(low), float(high), math.sqrt(variance), confidence)


def iqm(scores: Sequence[float] | np.ndarray) -> float:
    """Interquartile mean: the mean of the middle half of all values (a quarter cut off at either end, counts rounded down).

    Source: Agarwal et al. 2021, "Deep RL at the edge of the statistical precipice" (rliable).
    """
    return float(stats.trim_mean(_finite(scores, "iqm").ravel(), 0.25))


def _trimmed(draws: np.ndarray) -> np.ndarray:
    return stats.trim_mean(draws.reshape(len(draws), -1), 0.25, axis=1)


def iqm_interval(
    scores: np.ndarray, rng: np.random.Generator, resamples: int = 10_000, confidence: float = 0.95
) -> tuple[float, float, float]:
    """(iqm, low, high) of `scores` (s, j): runs are resampled within each task on its own (stratified by task).

    Raises ValueError below MIN_SEEDS runs.
    """
    array = _finite(scores, "iqm_interval")
    if array.ndim != 2 or len(array) < MIN_SEEDS:
        raise ValueError(f"iqm_interval: scores of shape {array.shape}, expected (seeds >= {MIN_SEEDS}, tasks)")
    seeds, tasks = array.shape
    draws = array[rng.integers(seeds, size=(resamples, seeds, tasks)), np.arange(tasks)]
    low, high = np.quantile(_trimmed(draws), [(1 - confidence) / 2, (1 + confidence) / 2])
    return iqm(array), float(low), float(high)


def iqm_difference(
    candidate: np.ndarray, reference: np.ndarray, rng: np.random.Generator, resamples: int = 10_000, confidence: float = 0.95
) -> tuple[float, float, float]:
    """(difference of iqm, low, high) of two (s, j) arrays whose rows are the same seeds: both draw the same runs."""
    a, b = _finite(candidate, "iqm_difference"), _finite(reference, "iqm_difference")
    if a.shape != b.shape or a.ndim != 2 or len(a) < MIN_SEEDS:
        raise ValueError(f"iqm_difference: shapes {a.shape} and {b.shape}, expected equal (seeds >= {MIN_SEEDS}, tasks)")
    pick = rng.integers(len(a), size=(resamples, *a.shape))
    columns = np.arange(a.shape[1])
    draws = _trimmed(a[pick, columns]) - _trimmed(b[pick, columns])
    low, high = np.quantile(draws, [(1 - confidence) / 2, (1 + confidence) / 2])
    return iqm(a) - iqm(b), float(low), float(high)


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
    """Number of problems (same mix of tasks) at which the verdict falls with chance `power`; normal approximation."""
    distance = abs(difference.mean + margin)
    if distance == 0 or difference.stderr == 0:
        return None
    z = stats.norm.ppf((1 + difference.confidence) / 2) + stats.norm.ppf(power)
    factor = (z * difference.stderr / distance) ** 2
    return math.ceil(factor * difference.n) if factor <= SETTLE_LIMIT else None
