"""The CluSTER selector: cluster the gradient proxies, keep the same number of rows of every cluster, weigh them back.

In come proxies (n, h) and a budget; out comes a Selection with clusters, distances and weights. Reads like section 4 of the paper:

    clustering   capacity-constrained K-means on the proxies, K = number of workers
    balance      every cluster keeps q rows, q = floor(r n_min): the farthest from its centroid (peripheral)
    weights      w_c = K pi_c, so that the balanced batches estimate the pool's own gradient

`choose` is given a number of rows. While it is at most K n_min, every cluster gives the same number (one more for the largest ones
where K does not divide it); above that the small clusters are exhausted first and the rest is filled evenly (max-min fair), up to
the whole pool. The weights (n_c / n) / (m_c / m) are K pi_c in the paper's case and stay unbiased in the others.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from clusterft.exact import floor_product
from clusterft.interfaces import Feature, FeatureSpec
from clusterft.kmeans import CapacityKMeans, check_feasible
from clusterft.records import Pool, Selection
from clusterft.within import WITHIN, pick_within

ALLOCATIONS = ("equal", "proportional", "neyman")
WEIGHTS = ("balanced", "none", "sqrt")


@dataclass(frozen=True)
class Clustering:
    """labels (n,) int32, centers (k, h), sq_distances (n,) float64 to the own centre, all in the order of the proxies given."""

    labels: np.ndarray
    centers: np.ndarray
    sq_distances: np.ndarray

    @property
    def sizes(self) -> np.ndarray:
        """(k,) rows of each cluster."""
        return np.bincount(self.labels, minlength=len(self.centers))


def balanced_rows(sizes: Sequence[int] | np.ndarray, ratio: str | float) -> int:
    """q = floor(r n_min), the rows that every cluster keeps (paper, section 4.2).

    Raises ValueError when q would be 0: the released code then keeps the whole cluster, a slice from -0.
    """
    smallest = int(np.min(sizes))
    kept = floor_product(ratio, smallest)
    if kept < 1:
        raise ValueError(
            f"ratio {ratio} keeps floor({ratio} x {smallest}) = 0 rows of each cluster (the smallest of {len(sizes)} has {smallest}); "
            f"use a ratio of at least 1/{smallest} or fewer clusters"
        )
    return kept


def _check_share(k: int, budget: int) -> None:
    if budget < k:
        raise ValueError(
            f"a budget of {budget} rows cannot give each of {k} clusters at least one; use fewer clusters or more rows"
        )


def fill_evenly(sizes: np.ndarray, budget: int) -> np.ndarray:
    """(k,) rows to keep of each cluster: max-min fair, at most `sizes`, exactly `budget` in all.

    The remainder goes one each to the largest clusters (ties: lower number), whose rows are thinned most. Raises ValueError if
    budget < k: a cluster without a row cannot be weighted for.
    """
    _check_share(len(sizes), budget)
    kept = np.zeros(len(sizes), dtype=np.int64)
    left = budget
    while left:
        open_ = np.flatnonzero(kept < sizes)
        level = left // len(open_)
        if level == 0:
            order = sorted(open_, key=lambda c: (-sizes[c], c))
            kept[order[:left]] += 1
            break
        give = np.minimum(level, sizes[open_] - kept[open_])
        kept[open_] += give
        left -= int(give.sum())
    return kept


def fill_in_proportion(shares: np.ndarray, sizes: np.ndarray, budget: int) -> np.ndarray:
    """(k,) rows to keep, proportional to `shares` (k,), between 1 and `sizes`, exactly `budget` in all.

    Largest remainders, after the clusters that would overflow are taken whole. Raises ValueError if budget < k.
    """
    k = len(sizes)
    _check_share(k, budget)
    kept = np.minimum(np.ones(k, dtype=np.int64), sizes)
    shares = np.where(shares > 0, shares, 0.0)
    while (left := budget - int(kept.sum())) > 0:
        open_ = np.flatnonzero(kept < sizes)
        weight = shares[open_] if shares[open_].sum() > 0 else np.ones(len(open_))
        want = np.maximum(budget * weight / weight.sum() - kept[open_], 0.0)
        want = want * (left / want.sum()) if want.sum() > 0 else np.full(len(open_), left / len(open_))
        give = np.minimum(np.floor(want).astype(np.int64), (sizes - kept)[open_])
        if give.sum() == 0:
            first = open_[np.lexsort((open_, -(want - np.floor(want))))][: min(left, len(open_))]
            kept[first] += 1
        else:
            kept[open_] += give
    return kept


def unbiased_weights(sizes: np.ndarray, kept: np.ndarray) -> np.ndarray:
    """(k,) w_c = (n_c / n) / (m_c / m): K pi_c when every cluster keeps the same number (paper, section 4.3)."""
    return (sizes / sizes.sum()) / (kept / kept.sum())


class ClusterSelector:
    """CluSTER (paper, section 4).

    n_clusters       K; the paper sets it to the number of workers
    capacity_factor  alpha; a cluster holds at most ceil(alpha n / K) rows
    solver           exact | released | min_cost_flow, see `CapacityKMeans`
    within           peripheral (paper) | core | random | kcenter | medoid_stratified
    allocation       equal (paper) | proportional | neyman (m_c proportional to pi_c sigma_c, sigma_c from the proxies)
    weights          balanced (w = K pi_c) | none | sqrt
    proxy            parameters of the gradient-proxy pass: proxy, normalise, centre, precision

    Raises ValueError for an unknown option, with the known ones.
    """

    name = "cluster"
    follows_model = True  # proxies of the model in training are other proxies: sampler.reselect_every_* has a meaning

    def __init__(
        self,
        *,
        n_clusters: int,
        capacity_factor: float,
        solver: str,
        n_init: int,
        within: str,
        allocation: str,
        weights: str,
        proxy: Mapping[str, Any],
    ) -> None:
        for label, value, known in (
            ("within", within, WITHIN),
            ("allocation", allocation, ALLOCATIONS),
            ("weights", weights, WEIGHTS),
        ):
            if value not in known:
                raise ValueError(f"{label} {value!r} is unknown; known are {', '.join(known)}")
        self.n_clusters, self.capacity_factor, self.solver, self.n_init = n_clusters, capacity_factor, solver, n_init
        self.within, self.allocation, self.weights, self.proxy = within, allocation, weights, dict(proxy)

    def feature_specs(self) -> list[FeatureSpec]:
        return [FeatureSpec("gradient_proxy", "clusterft.proxy:extract_gradient_proxies", self.proxy)]

    def check(self, n: int, budget: int | None) -> None:
        """Whether n rows can be clustered and `budget` of them (None: not known yet) chosen, before any model work.

        Raises ValueError with the arithmetic.
        """
        check_feasible(n, self.n_clusters)
        if budget is not None:
            _check_share(self.n_clusters, budget)

    def cluster(self, proxies: np.ndarray, rng: np.random.Generator) -> Clustering:
        """K-means under the cap. The first draw of `rng` seeds it, so the budget rule and `choose` see the same clusters."""
        seed = int(rng.integers(2**31 - 1))
        kmeans = CapacityKMeans(
            self.n_clusters, capacity_factor=self.capacity_factor, n_init=self.n_init, random_state=seed, solver=self.solver
        ).fit(proxies)
        labels = kmeans.labels_.astype(np.int32)
        return Clustering(labels, kmeans.cluster_centers_, own_sq_distances(proxies, kmeans.cluster_centers_, labels))

    def budget(self, pool: Pool, features: Mapping[str, Feature], ratio: str | float, rng: np.random.Generator) -> int:
        """K q rows: what the paper keeps at ratio r. The number that every rival is given, too."""
        _, proxies, _ = usable_rows(pool, features["gradient_proxy"].rows)
        clustering = self.cluster(proxies, rng)
        return len(clustering.sizes) * balanced_rows(clustering.sizes, ratio)

    def choose(self, pool: Pool, features: Mapping[str, Feature], budget: int, rng: np.random.Generator) -> Selection:
        """Chooses exactly `budget` rows. Rows are handled in the order of their ids: a permuted pool gives the same ids."""
        ids, proxies, rejected = usable_rows(pool, features["gradient_proxy"].rows)
        if isinstance(budget, bool) or not isinstance(budget, int | np.integer) or not 1 <= budget <= len(ids):
            raise ValueError(
                f"cluster: a budget of {budget!r} rows is not an integer in 1 ... {len(ids)}, the usable rows of {pool.name!r}"
            )
        clustering = self.cluster(proxies, rng)
        kept = self.rows_per_cluster(clustering, budget)
        rows = np.concatenate(
            [
                pick_within(self.within, members, int(q), clustering, proxies, rng)
                for members, q in zip(_members(clustering), kept, strict=True)
            ]
        )
        clusters = clustering.labels[rows]
        distances = np.sqrt(clustering.sq_distances)
        return Selection(
            method=self.name,
            pool_fingerprint=pool.fingerprint,
            ids=tuple(ids[rows].tolist()),
            budget=int(budget),
            seed=-1,
            clusters=clusters,
            weights=self.row_weights(clustering.sizes, kept, clusters),
            distances=distances[rows],
            scores=dict(zip(ids.tolist(), distances.tolist(), strict=True)),
            rejected=rejected,
            info=self.describe(clustering, kept),
        )

    def rows_per_cluster(self, clustering: Clustering, budget: int) -> np.ndarray:
        """(k,) how many rows each cluster keeps."""
        sizes = clustering.sizes
        if self.allocation == "equal":
            return fill_evenly(sizes, budget)
        shares = sizes.astype(np.float64)
        if self.allocation == "neyman":
            shares = shares * np.sqrt(np.bincount(clustering.labels, clustering.sq_distances, minlength=len(sizes)) / sizes)
        return fill_in_proportion(shares, sizes, budget)

    def row_weights(self, sizes: np.ndarray, kept: np.ndarray, clusters: np.ndarray) -> np.ndarray | None:
        """(m,) loss weights with mean 1, or None for weight 1 everywhere. `sqrt` takes the root and rescales."""
        if self.weights == "none":
            return None
        by_cluster = np.zeros(len(sizes))
        present = kept > 0
        by_cluster[present] = unbiased_weights(sizes[present], kept[present])
        rows = by_cluster[clusters]
        rows = np.sqrt(rows) if self.weights == "sqrt" else rows
        return rows / rows.mean()

    def describe(self, clustering: Clustering, kept: np.ndarray) -> dict[str, Any]:
        """What a report shows of the clustering."""
        sizes = clustering.sizes
        return {
            "n_clusters": len(sizes),
            "cluster_sizes": sizes.tolist(),
            "cluster_kept": kept.tolist(),
            "pi": (sizes / sizes.sum()).tolist(),
            "objective": float(clustering.sq_distances.sum()),
            "within": self.within,
            "allocation": self.allocation,
            "weights": self.weights,
            "solver": self.solver,
        }


def usable_rows(pool: Pool, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray, dict[str, str]]:
    """Ids and proxies in id order, without rows whose proxy is zero or not finite; those come back as id -> reason.

    A zero proxy means that the row has no response token (or none with any error): it has no direction, and must not be drawn
    into a cluster silently.
    """
    ids = np.array(pool.ids)
    order = np.argsort(ids)
    ids, proxies = ids[order], np.asarray(rows)[order]
    finite, zero = np.isfinite(proxies).all(axis=1), ~proxies.any(axis=1)
    rejected = {i: "nonfinite" for i in ids[~finite].tolist()} | {i: "zero_proxy" for i in ids[zero].tolist()}
    usable = finite & ~zero
    return (ids, proxies, rejected) if usable.all() else (ids[usable], proxies[usable], rejected)


def own_sq_distances(points: np.ndarray, centers: np.ndarray, labels: np.ndarray, chunk_rows: int = 16384) -> np.ndarray:
    """(n,) float64 squared distance of each row to its own centre, in chunks, so that memory-mapped points stay on disk."""
    out = np.empty(len(labels))
    for start in range(0, len(labels), chunk_rows):
        part = slice(start, start + chunk_rows)
        difference = points[part].astype(np.float64) - centers[labels[part]].astype(np.float64)
        out[part] = np.einsum("nh,nh->n", difference, difference)
    return out


def _members(clustering: Clustering) -> list[np.ndarray]:
    return [np.flatnonzero(clustering.labels == c) for c in range(len(clustering.centers))]
