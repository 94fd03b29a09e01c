"""The paper's variance propositions (section 3, appendix A): closed forms, exact enumeration, simulation.

A population is n gradients (n, d) with a cluster each; an estimate of the mean gradient is made from a batch of b rows drawn
without replacement. Five schemes:

    random        b rows of all; their mean
    uniform       b/k rows of each cluster; their plain mean (biased unless the clusters are equally large)
    weighted      b/k rows of each cluster; cluster means weighted by pi_c: the paper's allocation with w_c = K pi_c
    proportional  rows in proportion to cluster size (largest remainder, at least one); cluster means weighted by pi_c
    neyman        the integer allocation with the smallest variance (Neyman 1934; exact by Wright, 2012), weighted by pi_c

"Error" below is the expected squared distance of the estimate to the population mean, summed over the d dimensions: variance plus
squared bias. All numpy, float64. Three independent ways lead to it and must agree: `closed_form`, `enumerated`, `simulated`.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

SCHEMES = ("random", "uniform", "weighted", "proportional", "neyman")


@dataclass(frozen=True)
class Population:
    """What the closed forms need. sizes (k,) int; s_sq (k,) with divisor n_c - 1 (0 for a single row); means (k, d).

    total_sq: variance of all rows around their mean, divisor n - 1. All are sums over the d dimensions.
    """

    sizes: np.ndarray
    s_sq: np.ndarray
    means: np.ndarray
    total_sq: float

    @property
    def n(self) -> int:
        return int(self.sizes.sum())

    @property
    def k(self) -> int:
        return len(self.sizes)

    @property
    def pi(self) -> np.ndarray:
        """(k,) share of each cluster."""
        return self.sizes / self.n

    @property
    def mean(self) -> np.ndarray:
        """(d,) mean of all rows."""
        return self.pi @ self.means

    @property
    def intra(self) -> float:
        """sigma^2_intra = sum pi_c sigma_c^2, divisor n_c in sigma_c^2 as in the paper."""
        return float(self.pi @ (self.s_sq * (self.sizes - 1) / self.sizes))

    @property
    def inter(self) -> float:
        """sigma^2_inter = sum pi_c |mean_c - mean|^2."""
        return float(self.pi @ ((self.means - self.mean) ** 2).sum(axis=1))


def population(values: np.ndarray, labels: np.ndarray) -> Population:
    """The population of `values` (n,) or (n, d) with `labels` (n,) in 0 ... k-1. Raises ValueError for an empty cluster."""
    rows = np.asarray(values, dtype=np.float64).reshape(len(values), -1)
    sizes = np.bincount(labels)
    if (sizes == 0).any():
        raise ValueError(f"cluster {int(np.argmin(sizes))} is empty; number the clusters 0 ... k-1 without gaps")
    means = np.stack([rows[labels == c].mean(axis=0) for c in range(len(sizes))])
    within = np.array([((rows[labels == c] - means[c]) ** 2).sum() for c in range(len(sizes))])
    total = float(((rows - rows.mean(axis=0)) ** 2).sum()) / (len(rows) - 1)
    return Population(sizes, within / np.maximum(sizes - 1, 1), means, total)


def allocate(scheme: str, pop: Population, batch: int) -> np.ndarray:
    """(k,) rows to draw from each cluster. Raises ValueError when the scheme cannot draw such a batch."""
    if scheme in ("uniform", "weighted"):
        if batch % pop.k:
            raise ValueError(f"{scheme}: a batch of {batch} does not divide among {pop.k} clusters")
        counts = np.full(pop.k, batch // pop.k)
    elif not pop.k <= batch <= pop.n:
        raise ValueError(f"{scheme}: a batch of {batch} is outside {pop.k} ... {pop.n} (one row a cluster ... all rows)")
    elif scheme == "proportional":
        counts = _largest_remainder(pop.pi * batch, pop.sizes, batch)
    elif scheme == "neyman":
        counts = _best_integers(pop.sizes * np.sqrt(pop.s_sq), pop.sizes, batch)
    else:
        raise ValueError(f"scheme {scheme!r} has no allocation; known are {', '.join(SCHEMES[1:])}")
    if (counts > pop.sizes).any():
        c = int(np.argmax(counts - pop.sizes))
        raise ValueError(f"{scheme}: {counts[c]} rows asked of cluster {c}, which has {pop.sizes[c]}; use a smaller batch")
    return counts


def _largest_remainder(shares: np.ndarray, sizes: np.ndarray, batch: int) -> np.ndarray:
    counts = np.clip(np.floor(shares).astype(int), 1, sizes)
    while counts.sum() != batch:
        step = 1 if counts.sum() < batch else -1
        room = counts < sizes if step == 1 else counts > 1
        counts[np.argmax(np.where(room, step * (shares - counts), -np.inf))] += step
    return counts


def _best_integers(spread: np.ndarray, sizes: np.ndarray, batch: int) -> np.ndarray:
    """Adds one row at a time where sum spread_c^2 / m_c falls most: optimal, as the sum is separable and convex."""
    counts = np.ones(len(sizes), dtype=int)
    for _ in range(batch - len(sizes)):
        gain = spread**2 / (counts * (counts + 1.0))
        counts[np.argmax(np.where(counts < sizes, gain, -np.inf))] += 1
    return counts


def closed_form(scheme: str, pop: Population, batch: int) -> float:
    """Expected squared error of a batch mean, exactly (finite population)."""
    if scheme == "random":
        return (1 - batch / pop.n) * pop.total_sq / batch
    counts = allocate(scheme, pop, batch)
    weights = np.full(pop.k, 1 / pop.k) if scheme == "uniform" else pop.pi
    variance = float((weights**2 * (1 - counts / pop.sizes) * pop.s_sq / counts).sum())
    bias = weights @ pop.means - pop.mean
    return variance + float(bias @ bias)


def bias_sq(scheme: str, pop: Population) -> float:
    """Squared bias: nothing but for `uniform` over unequal clusters."""
    gap = (pop.means.mean(axis=0) - pop.mean) if scheme == "uniform" else np.zeros(1)
    return float(gap @ gap)


def equal_allocation_excess(pi: np.ndarray, sigma_sq: np.ndarray, inter: float) -> float:
    """b times (variance of the paper's weighted allocation - variance of random sampling) for a large population.

        sum_c pi_c (K pi_c - 1) sigma_c^2 - sigma^2_inter

    Positive exactly where equal allocation *raises* the variance. With one sigma for all it is sigma^2 (K sum pi_c^2 - 1) -
    sigma^2_inter, and K sum pi_c^2 - 1 is the squared coefficient of variation of the cluster sizes: equal allocation loses as
    soon as that times the spread within exceeds the spread between. It is worst when the large clusters are also the wide ones;
    where the small clusters are wide enough it is negative even for sigma_inter = 0.

    Raises ValueError unless pi sums to 1.
    """
    pi, sigma_sq = np.asarray(pi, dtype=np.float64), np.asarray(sigma_sq, dtype=np.float64)
    if not np.isclose(pi.sum(), 1.0):
        raise ValueError(f"pi sums to {pi.sum()}, expected 1")
    return float((pi * (len(pi) * pi - 1) * sigma_sq).sum() - inter)


def finite_excess(pop: Population, batch: int) -> float:
    """The same for a finite population and a real batch: closed_form("weighted") - closed_form("random")."""
    return closed_form("weighted", pop, batch) - closed_form("random", pop, batch)


def _all_batches(scheme: str, pop: Population, labels: np.ndarray, batch: int) -> Iterator[tuple[int, ...]]:
    if scheme == "random":
        yield from itertools.combinations(range(pop.n), batch)
        return
    counts = allocate(scheme, pop, batch)
    parts = [itertools.combinations(np.flatnonzero(labels == c).tolist(), int(m)) for c, m in enumerate(counts)]
    for chosen in itertools.product(*parts):
        yield tuple(itertools.chain.from_iterable(chosen))


def row_weights(scheme: str, pop: Population, labels: np.ndarray, batch: int) -> np.ndarray:
    """(n,) weight that a row has in the estimate when it is drawn."""
    if scheme == "random":
        return np.full(pop.n, 1 / batch)
    counts = allocate(scheme, pop, batch)
    per_cluster = np.full(pop.k, 1 / pop.k) if scheme == "uniform" else pop.pi
    return (per_cluster / counts)[labels]


def enumerated(scheme: str, values: np.ndarray, labels: np.ndarray, batch: int) -> tuple[np.ndarray, float]:
    """(mean of the estimate (d,), expected squared error) over every batch that the scheme can draw. For small populations."""
    rows = np.asarray(values, dtype=np.float64).reshape(len(values), -1)
    pop = population(rows, labels)
    weights = row_weights(scheme, pop, labels, batch)
    estimates = np.array([weights[list(b)] @ rows[list(b)] for b in _all_batches(scheme, pop, labels, batch)])
    return estimates.mean(axis=0), float(((estimates - rows.mean(axis=0)) ** 2).sum(axis=1).mean())


def simulated(
    scheme: str, values: np.ndarray, labels: np.ndarray, batch: int, draws: int, rng: np.random.Generator
) -> tuple[float, float]:
    """(mean squared error, its standard error) over `draws` random batches."""
    rows = np.asarray(values, dtype=np.float64).reshape(len(values), -1)
    rows = rows - rows.mean(axis=0)
    pop = population(rows, labels)
    weights = row_weights(scheme, pop, labels, batch)
    errors = np.empty(draws)
    for start in range(0, draws, 256):
        take = draw_mask(scheme, pop, labels, batch, min(256, draws - start), rng)
        estimate = (take * weights) @ rows
        errors[start : start + len(take)] = (estimate**2).sum(axis=1)
    return float(errors.mean()), float(errors.std(ddof=1) / np.sqrt(draws))


def draw_mask(scheme: str, pop: Population, labels: np.ndarray, batch: int, draws: int, rng: np.random.Generator) -> np.ndarray:
    """(draws, n) of 0 and 1: which rows each batch holds, uniform among the batches of the scheme."""
    keys = rng.random((draws, pop.n))
    mask = np.zeros((draws, pop.n))
    if scheme == "random":
        np.put_along_axis(mask, np.argpartition(keys, batch - 1, axis=1)[:, :batch], 1.0, axis=1)
        return mask
    for c, m in enumerate(allocate(scheme, pop, batch)):
        members = np.flatnonzero(labels == c)
        first = np.argpartition(keys[:, members], m - 1, axis=1)[:, :m]
        np.put_along_axis(mask, members[first], 1.0, axis=1)
    return mask


def possible_batches(pop: Population, batches: list[int]) -> list[int]:
    """The batch sizes that every scheme can draw from this population."""
    return [b for b in batches if b % pop.k == 0 and b // pop.k <= pop.sizes.min() and pop.k <= b <= pop.n]


def measure(
    values: np.ndarray, labels: np.ndarray, batches: list[int], draws: int, rng: np.random.Generator
) -> dict[str, object]:
    """Closed forms and simulation on given gradients (n, d): the values of the artifact `variance` but for `gradient`.

    Raises ValueError when no batch size can be drawn by every scheme.
    """
    pop = population(values, labels)
    sizes = possible_batches(pop, batches)
    if not sizes:
        raise ValueError(f"none of the batch sizes {batches} divides among {pop.k} clusters whose smallest has {pop.sizes.min()}")
    drawn = {s: [simulated(s, values, labels, b, draws, rng) for b in sizes] for s in SCHEMES}
    return {
        "n": pop.n,
        "pi": pop.pi.tolist(),
        "sigma_sq": pop.s_sq.tolist(),
        "inter": pop.inter,
        "batch_sizes": sizes,
        "closed": {s: [closed_form(s, pop, b) for b in sizes] for s in SCHEMES},
        "measured": {s: [value for value, _ in drawn[s]] for s in SCHEMES},
        "stderr": {s: [error for _, error in drawn[s]] for s in SCHEMES},
    }
