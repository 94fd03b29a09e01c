"""Numbers about numbers: what may be said after a few seeds, or after one run on a few hundred problems.

    scores over seeds        ► summarise, paired_by_seed       mean, sample deviation (ddof 1), Student t interval
    outcomes over problems   ► paired_bootstrap, mcnemar_exact difference of two models on the same problems
    several tasks            ► iqm, iqm_interval, iqm_difference   interquartile mean, bootstrap stratified by task

In go plain floats and arrays, out come small frozen records. No torch, no disk, no configuration; randomness is an argument
(`clusterft.seeding.generator`). Values that are not finite are refused: whoever calls has to flag them first. Built on this are
`eval.power` (how much more would decide it) and `eval.verdict`. Axis letters: s seeds, n problems, j tasks.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from scipy import stats

MIN_SEEDS = 3
"""Fewer seeds than this give no interval and no verdict."""


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
class Stratum:
    """What one task contributes to the variance: its weight, its n problems, their squared deviations, and the imaginary ones."""

    weight: float
    n: int
    squares: float
    pseudo: float = 0.0
    pseudo_squares: float = 0.0

    def variance(self, factor: float = 1.0) -> float:
        """Variance of weight times the mean, if there were `factor` times as many problems of the same kind."""
        n = factor * self.n
        return self.weight**2 * (factor * self.squares + self.pseudo_squares) / (n + 2 * self.pseudo) / n


@dataclass(frozen=True)
class Difference:
    """Candidate minus reference over n shared problems, with a bootstrap interval and the strata behind its standard error."""

    n: int
    mean: float
    low: float
    high: float
    strata: tuple[Stratum, ...]
    confidence: float = 0.95
    scale: float = 1.0

    @property
    def stderr(self) -> float:
        return self.stderr_at(1.0)

    def stderr_at(self, factor: float) -> float:
        """Standard error if there were `factor` times as many problems of the same kind."""
        return self.scale * math.sqrt(sum(s.variance(factor) for s in self.strata))

    def scaled(self, by: float) -> Difference:
        """The same in another unit, for example points instead of fractions."""
        return replace(self, mean=self.mean * by, low=self.low * by, high=self.high * by, scale=self.scale * by)


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


def _stratum(weight: float, part: np.ndarray, pseudo: float) -> Stratum:
    centre = float(part.mean())
    squares = float(((part - centre) ** 2).sum())
    return Stratum(weight, len(part), squares, pseudo, pseudo * ((1 - centre) ** 2 + (1 + centre) ** 2))


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
    expand: bool = False,
) -> Difference:
    """Percentile bootstrap over problems of the mean difference between two models on the same n problems.

    candidate, reference  (n,) outcomes in [0, 1], aligned: 0/1 for one run, the mean over seeds for several
    strata                (n,) task of each problem; resampled within a task only
    average               macro: mean of the tasks' means; micro: mean over problems
    pseudo                imaginary wins and losses added to every task before drawing. With 0 this is the textbook bootstrap,
                          blind where two models hardly ever differ (no discordant problem: an interval of width 0, so a
                          false "no worse"); the default keeps that error below 5 % (benchmarks/verdict_simulation.py).
                          Use 0 for values that are not outcomes in [0, 1], such as losses.
    expand                widens the percentiles as a t interval would be (Hesterberg 2015): for a few problems without pseudo

    Raises ValueError if lengths differ or values are not finite.
    """
    a, b = _finite(candidate, "paired_bootstrap"), _finite(reference, "paired_bootstrap")
    if a.shape != b.shape or a.ndim != 1:
        raise ValueError(f"paired_bootstrap: shapes {a.shape} and {b.shape} are not one outcome a problem")
    if pseudo and (min(a.min(), b.min()) < 0 or max(a.max(), b.max()) > 1):
        raise ValueError("paired_bootstrap: outcomes outside [0, 1]; pass pseudo=0 for losses")
    parts = _by_stratum(a - b, strata, average)
    draws = np.sum([w * _resampled_means(p, pseudo, resamples, rng) for w, p in parts], axis=0)
    low, high = np.quantile(draws, _levels(len(a), confidence, expand))
    mean = float(sum(w * p.mean() for w, p in parts))
    strata = tuple(_stratum(w, p, pseudo) for w, p in parts)
    return Difference(len(a), mean, float(low), float(high), strata, confidence)


def _levels(n: int, confidence: float, expand: bool) -> tuple[float, float]:
    """Lower and upper percentile; expanded ones let the bootstrap of n values cover as a t interval does."""
    if not expand:
        return (1 - confidence) / 2, (1 + confidence) / 2
    if n < MIN_SEEDS:
        raise ValueError(f"paired_bootstrap: {n} problems give no interval; at least {MIN_SEEDS} are needed")
    low = float(stats.norm.cdf(-math.sqrt(n / (n - 1)) * stats.t.ppf((1 + confidence) / 2, n - 1)))
    return low, 1 - low


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
