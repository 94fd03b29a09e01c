"""S2L, small to large (Yang et al. 2024): rows whose loss moves alike in a small model's training also move alike in a large
one's.

In come loss trajectories (see `clusterft.trajectories`); out come rows drawn evenly from groups of alike ones.

    trajectories ► K-means, K = 100 ► clusters by rising size: R_k = (B - |S|) / (clusters left), all of a cluster that is
    smaller ► draw

rule: paper     Algorithm 1 as above
      released  clusters of at most two rows are set apart and only drawn from when the others leave budget over
The released code also shares the budget among the values of a `source` column first; the pools here have one source each.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from clusterft.budget import require_rows
from clusterft.interfaces import Feature, FeatureSpec
from clusterft.kmeans import CapacityKMeans
from clusterft.ranking import UNSEEDED, count_reasons, require_ranked
from clusterft.records import Pool, Selection

RULES = ("paper", "released")
TINY = 2
"""Clusters of at most so many rows are set apart by the released rule."""


def share_evenly(sizes: Sequence[int], budget: int) -> list[int]:
    """Rows to take of each cluster, clusters given by rising size: R_k = what is left // clusters left. Sum: min(budget, all
    rows)."""
    taken: list[int] = []
    for position, size in enumerate(sizes):
        taken.append(min(size, (budget - sum(taken)) // (len(sizes) - position)))
    return taken


def draw_paper(clusters: Sequence[np.ndarray], budget: int, rng: np.random.Generator) -> list[int]:
    """Algorithm 1. clusters: members of each, by rising size."""
    shares = share_evenly([len(c) for c in clusters], budget)
    return [int(i) for members, share in zip(clusters, shares, strict=True) for i in rng.permutation(members)[:share]]


def draw_released(clusters: Sequence[np.ndarray], budget: int, rng: np.random.Generator) -> list[int]:
    """The released code's rule: Algorithm 1 over clusters of more than TINY rows, the rest of the budget from the tiny ones
    pooled."""
    chosen = draw_paper([c for c in clusters if len(c) > TINY], budget, rng)
    tiny = np.concatenate([np.zeros(0, np.int64), *[c for c in clusters if len(c) <= TINY]])
    return chosen + [int(i) for i in rng.permutation(tiny)[: budget - len(chosen)]]


def fill_gaps(trajectories: np.ndarray) -> np.ndarray:
    """(n, t) with NaN filled in along each row: linearly between its finite neighbours, at the ends with the nearest one.

    Every row must have a finite value.
    """
    at = np.arange(trajectories.shape[1])
    filled = trajectories.copy()
    for row in np.flatnonzero(~np.isfinite(trajectories).all(axis=1)):
        good = np.isfinite(trajectories[row])
        filled[row] = np.interp(at, at[good], trajectories[row, good])
    return filled


class S2LSelector:
    """Balanced choice over clusters of loss trajectories.

    clusters  K; where the trajectories have fewer distinct rows, as many clusters as those
    rule      paper | released
    n_init    restarts of K-means
    proxy     parameters of the trajectories (`clusterft.trajectories.TrajectoryParams`)

    Raises ValueError for an unknown rule.
    """

    name = "s2l"

    def __init__(self, *, clusters: int, rule: str, n_init: int, proxy: Mapping[str, Any]) -> None:
        if rule not in RULES:
            raise ValueError(f"rule {rule!r} is unknown; known are {', '.join(RULES)}")
        self.clusters, self.rule, self.n_init, self.proxy = clusters, rule, n_init, dict(proxy)

    def feature_specs(self) -> list[FeatureSpec]:
        return [FeatureSpec("loss_trajectories", "clusterft.trajectories:extract_trajectories", self.proxy)]

    def choose(self, pool: Pool, features: Mapping[str, Feature], budget: int, rng: np.random.Generator) -> Selection:
        """The score of a row is minus the size of its cluster: small clusters are served first. Rows without any loss are
        rejected."""
        require_rows(self.name, budget, len(pool))
        ids = np.array(pool.ids)
        order = np.argsort(ids)
        ids, stored = ids[order], np.asarray(features["loss_trajectories"].rows)[order].astype(np.float64)
        losses, finite = np.split(stored, 2, axis=1)
        usable = np.flatnonzero(finite.any(axis=1))
        rejected = dict.fromkeys(ids[~finite.any(axis=1)].tolist(), "no_finite_loss")
        require_ranked(self.name, budget, len(usable), rejected)
        labels = self.cluster(fill_gaps(np.where(finite > 0, losses, np.nan)[usable]), ids[usable], rng)
        members = [usable[labels == c] for c in range(labels.max() + 1)]
        members.sort(key=lambda m: (len(m), ids[m[0]]))
        chosen = (draw_paper if self.rule == "paper" else draw_released)(members, budget, rng)
        sizes = {int(i): len(m) for m in members for i in m}
        return Selection(
            method=self.name,
            pool_fingerprint=pool.fingerprint,
            ids=tuple(ids[chosen].tolist()),
            budget=int(budget),
            seed=UNSEEDED,
            scores={str(ids[i]): -float(size) for i, size in sizes.items()},
            rejected=rejected,
            info=self.describe(members, chosen, finite[usable], rejected),
        )

    def cluster(self, trajectories: np.ndarray, ids: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        """(n,) labels by K-means without a cap; every cluster has a row. Euclidean, not standardised, all rows used."""
        seed = int(rng.integers(2**31 - 1))
        k = min(self.clusters, len(np.unique(trajectories, axis=0)))
        return (
            CapacityKMeans(k, capacity_factor=None, n_init=self.n_init, random_state=seed).fit(trajectories, row_ids=ids).labels_
        )

    def describe(
        self, members: Sequence[np.ndarray], chosen: Sequence[int], finite: np.ndarray, rejected: Mapping[str, str]
    ) -> dict[str, Any]:
        """What a report shows of the clusters, by rising size."""
        return {
            "rule": self.rule,
            "clusters_asked": self.clusters,
            "trajectory_cluster_sizes": [len(m) for m in members],
            "trajectory_cluster_taken": [int(np.isin(m, chosen).sum()) for m in members],
            "rows_with_gaps": int((finite == 0).any(axis=1).sum()),
            "rejected": count_reasons(rejected),
        }
