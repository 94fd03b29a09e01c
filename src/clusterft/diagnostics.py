"""What a selection does to gradients: diversity, centroids, similarity between workers and inside clusters.

In come gradients (n, d), proxies or true ones (`true_gradients`), with labels; out come the numbers of table 8 (diversity), table
10 (centroids before and after pruning) and figure 6 (between workers; intra- against inter-cluster, with a permutation test).
Pure numpy, float64 inside, rows read in blocks where the rows may be a memory map.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

BLOCK_ROWS = 4096
PERMUTATION_BYTES = 64 * 1024 * 1024
"""Bytes of one-hot labels held at once in a permutation test."""


def _blocks(rows: np.ndarray) -> Iterator[np.ndarray]:
    for start in range(0, len(rows), BLOCK_ROWS):
        yield np.asarray(rows[start : start + BLOCK_ROWS], np.float64)


def _checked(gradients: np.ndarray, labels: np.ndarray | None = None) -> None:
    if gradients.ndim != 2 or len(gradients) == 0:
        raise ValueError(f"gradients must be (n, d) with n at least 1, got shape {gradients.shape}")
    if labels is not None and np.shape(labels) != (len(gradients),):
        raise ValueError(f"{len(gradients)} gradients, but labels of shape {np.shape(labels)}")


def _unit_rows(rows: np.ndarray, what: str = "gradients") -> np.ndarray:
    rows = np.asarray(rows, np.float64)
    norms = np.linalg.norm(rows, axis=1, keepdims=True)
    bad = np.flatnonzero(~(norms[:, 0] > 0) | ~np.isfinite(norms[:, 0]))
    if len(bad):
        raise ValueError(f"{len(bad)} of {len(rows)} {what} are zero or not finite (first: {bad[0]}): no cosine")
    return rows / norms


def gradient_diversity(gradients: np.ndarray) -> float:
    """Σ ‖g_i‖² / ‖Σ g_i‖² over rows (n, d) (paper, appendix B): 1/n for equal rows, 1 for orthogonal, infinite if they cancel.

    Raises ValueError if every gradient is zero or one is not finite.
    """
    _checked(gradients)
    squares, total = 0.0, np.zeros(gradients.shape[1])
    for block in _blocks(gradients):
        squares += float(np.square(block).sum())
        total += block.sum(axis=0)
    if not math.isfinite(squares) or squares == 0:
        raise ValueError(f"the squared norms of {len(gradients)} gradients sum to {squares}; diversity is not defined")
    return squares / float(total @ total) if total.any() else math.inf


def centroids(gradients: np.ndarray, labels: np.ndarray) -> dict[int, np.ndarray]:
    """Mean gradient (d,) float64 of each label."""
    labels = np.asarray(labels)
    _checked(gradients, labels)
    sums: dict[int, np.ndarray] = {int(c): np.zeros(gradients.shape[1]) for c in np.unique(labels)}
    for start, block in zip(range(0, len(gradients), BLOCK_ROWS), _blocks(gradients), strict=True):
        part = labels[start : start + len(block)]
        for c in np.unique(part):
            sums[int(c)] += block[part == c].sum(axis=0)
    return {c: total / int((labels == c).sum()) for c, total in sums.items()}


def centroid_preservation(before: np.ndarray, after: np.ndarray, labels: np.ndarray) -> dict[int, float]:
    """Cosine of each cluster's mean gradient over all rows with that over the kept rows (table 10).

    before  (n, d) gradients of all rows
    after   (m,) positions of the kept rows, or (n,) bool
    labels  (n,) cluster of every row

    Raises ValueError if a cluster keeps no row, or a mean is zero.
    """
    labels = np.asarray(labels)
    _checked(before, labels)
    kept = np.flatnonzero(after) if np.asarray(after).dtype == bool else np.asarray(after)
    whole, rest = centroids(before, labels), centroids(before[kept], labels[kept])
    lost = sorted(set(whole) - set(rest))
    if lost:
        raise ValueError(f"clusters {lost} keep no row, so they have no centroid after pruning")
    names = sorted(whole)
    a = _unit_rows(np.stack([whole[c] for c in names]), "centroids before pruning")
    b = _unit_rows(np.stack([rest[c] for c in names]), "centroids after pruning")
    return dict(zip(names, np.sum(a * b, axis=1).tolist(), strict=True))


def inter_worker_similarity(worker_gradients: np.ndarray) -> float:
    """Mean cosine over pairs of workers, from their mean gradients (w, d) of one step (figure 6). Raises ValueError for w < 2."""
    _checked(worker_gradients)
    w = len(worker_gradients)
    if w < 2:
        raise ValueError("similarity between workers needs at least two workers")
    total = _unit_rows(worker_gradients, "worker gradients").sum(axis=0)
    return (float(total @ total) - w) / (w * (w - 1))


def worker_gradients(gradients: np.ndarray, workers: np.ndarray) -> np.ndarray:
    """Mean gradient (w, d) of each worker's rows in one step, workers ascending."""
    return np.stack([mean for _, mean in sorted(centroids(gradients, workers).items())])


@dataclass(frozen=True)
class ClusterSimilarity:
    """intra, inter: mean cosine over pairs of rows of one cluster and of different clusters."""

    intra: float
    inter: float

    @property
    def gap(self) -> float:
        return self.intra - self.inter


def _pair_counts(labels: np.ndarray) -> tuple[int, int]:
    sizes = np.unique(labels, return_counts=True)[1]
    intra = int((sizes * (sizes - 1)).sum()) // 2
    inter = len(labels) * (len(labels) - 1) // 2 - intra
    if not intra or not inter:
        raise ValueError(f"{len(sizes)} clusters of {len(labels)} rows: {intra} pairs inside, {inter} across; both are needed")
    return intra, inter


def _similarity(within: float, total: float, pairs: tuple[int, int]) -> ClusterSimilarity:
    return ClusterSimilarity(within / pairs[0], (total - within) / pairs[1])


def intra_inter_similarity(gradients: np.ndarray, labels: np.ndarray) -> ClusterSimilarity:
    """Mean cosine inside and across clusters, of rows (n, d), without the (n, n) matrix: Σ_{i<j} u_i·u_j = (‖Σu‖² - n) / 2.

    Raises ValueError for a zero row, or if there is no pair inside or none across.
    """
    labels = np.asarray(labels)
    _checked(gradients, labels)
    pairs, unit = _pair_counts(labels), _unit_rows(gradients)
    squares = [float(np.square(unit[labels == c].sum(axis=0)).sum()) for c in np.unique(labels)]
    n = len(unit)
    return _similarity((sum(squares) - n) / 2, (float(np.square(unit.sum(axis=0)).sum()) - n) / 2, pairs)


@dataclass(frozen=True)
class PermutationTest:
    """gaps: intra - inter of each permutation. p = (1 + permutations at least as extreme) / (1 + permutations)."""

    observed: ClusterSimilarity
    gaps: np.ndarray
    p_value: float


def permutation_test(
    gradients: np.ndarray, labels: np.ndarray, rng: np.random.Generator, *, permutations: int = 10_000
) -> PermutationTest:
    """Is intra - inter larger than for random clusters of the same sizes? One-sided (figure 6).

    The +1 counts the observed labelling itself: the p-value is valid for any number of permutations and never 0.
    """
    labels = np.unique(np.asarray(labels), return_inverse=True)[1]
    observed = intra_inter_similarity(gradients, labels)
    unit, pairs, n, k = _compressed(_unit_rows(gradients)), _pair_counts(labels), len(labels), int(labels.max()) + 1
    total = (float(np.square(unit.sum(axis=0)).sum()) - n) / 2
    gaps = np.empty(permutations)
    step = max(1, PERMUTATION_BYTES // (8 * n * k))
    for start in range(0, permutations, step):
        stop = min(permutations, start + step)
        shuffled = rng.permuted(np.tile(labels, (stop - start, 1)), axis=1)
        onehot = (shuffled[:, None, :] == np.arange(k)[None, :, None]).astype(np.float64)
        sums = onehot.reshape(-1, n) @ unit
        within = (np.square(sums).sum(axis=1).reshape(-1, k).sum(axis=1) - n) / 2
        gaps[start:stop] = within / pairs[0] - (total - within) / pairs[1]
    extreme = int((gaps >= observed.gap - 1e-12).sum())
    return PermutationTest(observed, gaps, (1 + extreme) / (1 + permutations))


def _compressed(rows: np.ndarray) -> np.ndarray:
    """Rows (n, r) with the same inner products, r at most n: long gradients need be multiplied only once."""
    if rows.shape[1] <= len(rows):
        return rows
    values, vectors = np.linalg.eigh(rows @ rows.T)
    return vectors * np.sqrt(np.maximum(values, 0))


def cosines(gradients: np.ndarray) -> np.ndarray:
    """(n (n-1) / 2,) cosines of all pairs i < j of rows (n, d), row by row of the upper triangle."""
    unit = _compressed(_unit_rows(gradients))
    return (unit @ unit.T)[np.triu_indices(len(unit), 1)]


@dataclass(frozen=True)
class RankCorrelation:
    """Spearman correlation with a bootstrap interval over samples (not pairs: pairs that share a sample are not independent)."""

    value: float
    low: float
    high: float
    n: int


def cosine_fidelity(
    signal: np.ndarray, truth: np.ndarray, rng: np.random.Generator, *, resamples: int = 1000, level: float = 0.95
) -> RankCorrelation:
    """Spearman correlation of pairwise cosines of `signal` (n, d) with those of `truth` (n, p), rows aligned.

    The interval resamples the n samples with replacement; pairs of a sample with its own copy are left out.
    """
    from scipy.stats import spearmanr

    n = len(signal)
    if len(truth) != n or n < 4:
        raise ValueError(f"fidelity needs at least 4 aligned rows, got {n} and {len(truth)}")
    upper = np.triu_indices(n, 1)
    tables = []
    for rows in (signal, truth):
        table = np.eye(n)
        table[upper] = cosines(rows)
        tables.append(table + np.triu(table, 1).T)
    value = float(spearmanr(tables[0][upper], tables[1][upper]).statistic)
    draws = []
    for _ in range(resamples):
        pick = rng.integers(0, n, n)
        while np.unique(pick).size < 3:  # one pair of rows, or none: a rank correlation needs more
            pick = rng.integers(0, n, n)
        i, j = pick[upper[0]], pick[upper[1]]
        i, j = i[i != j], j[i != j]
        draws.append(float(spearmanr(tables[0][i, j], tables[1][i, j]).statistic))
    low, high = np.quantile(draws, [(1 - level) / 2, (1 + level) / 2])
    return RankCorrelation(value, float(low), float(high), n)
