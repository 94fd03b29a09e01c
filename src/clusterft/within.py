"""Which rows of one cluster are kept: the paper's peripheral rule, its two ablations, and two of our own.

Every rule takes the members of a cluster in the order of their ids and returns q of them; ties go to the smaller id.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from clusterft.cluster import Clustering

WITHIN = ("peripheral", "core", "random", "kcenter", "medoid_stratified")


def pick_within(
    rule: str, members: np.ndarray, q: int, clustering: Clustering, proxies: np.ndarray, rng: np.random.Generator
) -> np.ndarray:
    """q of `members` (positions in id order), by `rule`.

    peripheral         the q farthest from the centroid (paper's default; the released code calls it pruning `close`)
    core               the q nearest (released: pruning `far`)
    random             q at random; a smaller q is a prefix of a larger one
    kcenter            farthest-first traversal from the row nearest the centroid (Gonzalez 1985)
    medoid_stratified  rows sorted by distance, cut into q runs, the middle row of each: the cluster's own profile of distances
    """
    if q >= len(members):
        return members
    if q == 0:
        return members[:0]
    distances = clustering.sq_distances[members]
    if rule == "peripheral":
        return members[np.argsort(-distances, kind="stable")[:q]]
    if rule == "core":
        return members[np.argsort(distances, kind="stable")[:q]]
    if rule == "random":
        return members[rng.permutation(len(members))[:q]]
    if rule == "kcenter":
        return members[_farthest_first(proxies[members], int(np.argmin(distances)), q)]
    if rule == "medoid_stratified":
        ranked = members[np.argsort(distances, kind="stable")]
        return np.array([run[len(run) // 2] for run in np.array_split(ranked, q)])
    raise ValueError(f"within {rule!r} is unknown; known are {', '.join(WITHIN)}")


def _farthest_first(points: np.ndarray, first: int, q: int) -> np.ndarray:
    """Positions of q rows, each the farthest from those before it; O(q n h)."""
    points = points.astype(np.float64)
    chosen = [first]
    gap = np.full(len(points), np.inf)
    while len(chosen) < q:
        difference = points - points[chosen[-1]]
        gap = np.minimum(gap, np.einsum("nh,nh->n", difference, difference))
        gap[chosen] = -1.0
        chosen.append(int(np.argmax(gap)))
    return np.array(chosen)
