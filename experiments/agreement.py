"""Do clusters follow task categories? (table 17) Majority agreement with an interval, and Cohen's kappa. Pure counting.

In come clusters and categories of rows; out come counts. A row agrees when its category is its cluster's most frequent one.
`stratified_sample` draws the rows to inspect, `experiments.labels` makes the sheet that a person fills in.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from experiments.statistics import wilson_interval

SAMPLES = 400
"""Rows that the paper inspected."""


@dataclass(frozen=True)
class ClusterAgreement:
    """One cluster: its most frequent category (ties: the first by name) and how many rows have it."""

    cluster: int
    category: str
    n: int
    agree: int


@dataclass(frozen=True)
class Agreement:
    """All clusters together. kappa: agreement beyond chance between a row's category and its cluster's; None if chance is 1."""

    clusters: tuple[ClusterAgreement, ...]
    n: int
    agree: int
    interval: tuple[float, float]
    kappa: float | None

    @property
    def share(self) -> float:
        return self.agree / self.n


def stratified_sample(clusters: Sequence[int], n: int, rng: np.random.Generator) -> list[int]:
    """Positions of `n` rows, as equally many of each cluster as there are (100 each of 4), in order of position.

    A cluster with too few rows gives all; the rest is spread over the others. Raises ValueError for n above the number of rows.
    """
    labels = np.asarray(clusters)
    if n > len(labels):
        raise ValueError(f"{n} rows to inspect, but there are only {len(labels)}")
    names, sizes = np.unique(labels, return_counts=True)
    take = np.zeros(len(names), dtype=int)
    while take.sum() < n:
        open_ = np.flatnonzero(take < sizes)
        take[open_[np.argmin(take[open_])]] += 1
    chosen = [rng.permutation(np.flatnonzero(labels == name))[:count] for name, count in zip(names, take, strict=True)]
    return sorted(int(i) for i in np.concatenate(chosen))


def agreement(clusters: Sequence[int], categories: Sequence[str]) -> Agreement:
    """Majority agreement. Raises ValueError for no rows or lists of different length."""
    if not clusters or len(clusters) != len(categories):
        raise ValueError(f"{len(clusters)} clusters and {len(categories)} categories: nothing to compare, or not the same rows")
    parts = []
    for cluster in sorted(set(clusters)):
        counts = Counter(cat for c, cat in zip(clusters, categories, strict=True) if c == cluster)
        category, agree = min(counts.items(), key=lambda item: (-item[1], item[0]))
        parts.append(ClusterAgreement(int(cluster), category, sum(counts.values()), agree))
    n, agree = len(clusters), sum(p.agree for p in parts)
    return Agreement(tuple(parts), n, agree, wilson_interval(agree, n), _kappa(parts, Counter(categories), n))


def _kappa(parts: Sequence[ClusterAgreement], categories: Counter[str], n: int) -> float | None:
    given: Counter[str] = Counter()
    for part in parts:
        given[part.category] += part.n
    chance = sum(given[c] * categories[c] for c in given) / n**2
    observed = sum(p.agree for p in parts) / n
    return None if chance == 1 else (observed - chance) / (1 - chance)
