"""The clustering of the released code, step by step, so that its published numbers can be reproduced.

In go points and a capacity factor; out come labels and centres of plain K-means, followed, only if a cluster is too large, by one
greedy pass over all (row, centre) pairs by distance. The centres stay where they were: a known fault (PAPER, section 4) that is
kept here on purpose. Everything is held in memory, as in the original; use the exact solver for large data.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from sklearn.cluster import KMeans

from clusterft.jit import compiled
from clusterft.limits import default_capacity, size_limits


@dataclass(frozen=True)
class ReleasedClustering:
    """labels (n,) int32, centers (k, d) in the points' float type, and whether the greedy pass was needed."""

    labels: np.ndarray
    centers: np.ndarray
    capped: bool
    n_iter: int


def plain_kmeans(points: np.ndarray, n_clusters: int, *, n_init: int = 10, max_iter: int = 300, random_state=None) -> KMeans:
    """Step 1: scikit-learn's K-means, fitted."""
    return KMeans(n_clusters, n_init=n_init, max_iter=max_iter, random_state=random_state).fit(points)


def greedy_assign(points: np.ndarray, centers: np.ndarray, capacity: int) -> np.ndarray:
    """Step 2: labels (n,) int32; pairs in order of squared distance, each row to the first of its centres with room.

    Raises ValueError if the clusters cannot hold all rows.
    """
    return greedy_assign_distances(pairwise_sq_distances(points, centers), capacity)


def greedy_assign_distances(sq_distances: np.ndarray, capacity: int) -> np.ndarray:
    """As `greedy_assign`, from the matrix (n, k); equal distances go by row, then by cluster."""
    n, k = sq_distances.shape
    size_limits(n, k, 0, capacity)
    return _greedy(np.argsort(sq_distances, axis=None, kind="stable"), n, k, capacity)


def pairwise_sq_distances(points: np.ndarray, centers: np.ndarray) -> np.ndarray:
    """(n, k) squared distances in float64."""
    points, centers = np.asarray(points, np.float64), np.asarray(centers, np.float64)
    out = np.empty((len(points), len(centers)))
    for c, center in enumerate(centers):
        out[:, c] = ((points - center) ** 2).sum(1)
    return out


def released_clustering(
    points: np.ndarray, n_clusters: int, *, capacity_factor: float = 1.5, n_init: int = 10, max_iter: int = 300, random_state=None
) -> ReleasedClustering:
    """Both steps: the greedy pass runs only if the largest cluster has more than capacity_factor n / k rows."""
    points = np.asarray(points)
    found = plain_kmeans(points, n_clusters, n_init=n_init, max_iter=max_iter, random_state=random_state)
    labels, n = found.labels_.astype(np.int32), len(points)
    capped = bool(np.bincount(labels).max() > capacity_factor * n / n_clusters)
    if capped:
        labels = greedy_assign(points, found.cluster_centers_, default_capacity(n, n_clusters, capacity_factor))
    return ReleasedClustering(labels, found.cluster_centers_, capped, int(found.n_iter_))


@compiled
def _greedy(order, n, k, capacity):
    labels, room, left = np.full(n, -1, np.int32), np.full(k, capacity, np.int64), n
    for pair in order:
        row, cluster = pair // k, pair % k
        if labels[row] < 0 and room[cluster] > 0:
            labels[row] = cluster
            room[cluster] -= 1
            left -= 1
            if left == 0:
                break
    return labels
