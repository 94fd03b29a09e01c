"""Lloyd's iterations under size limits: exact assignment, exact means, until nothing moves.

In go a surveyed `RowTable`, starting centres and limits; out come labels and the centres that are their means. Prices are carried
over from one assignment to the next, and only rows that changed cluster touch the sums.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from clusterft.assignment import solve
from clusterft.assignment_kernels import own_squared_distances
from clusterft.cost_sources import PointCosts
from clusterft.rows import ExactSums, RowTable

CARRY_FROM = 5e7
"""From so many multiplications on, margins are carried from one iteration to the next instead of scanning all rows again."""


@dataclass(frozen=True)
class LloydResult:
    """labels (n,) int32; centers (k, d) float64, the means of the labels; inertia: sum of squared distances to them."""

    labels: np.ndarray
    centers: np.ndarray
    inertia: float
    n_iter: int
    converged: bool


def lloyd(
    table: RowTable, centers: np.ndarray, low: np.ndarray, high: np.ndarray, *, max_iter: int, tolerance: float
) -> LloydResult:
    """Iterates until no row changes its cluster or the centres' squared movement, summed, falls below `tolerance` times the
    variance of the rows (mean over columns, as in scikit-learn), at most max_iter times.

    low must be at least 1 for every cluster, so that none can become empty.
    """
    sums = ExactSums(table, len(centers))
    labels = prices = None
    converged = False
    n_iter = 0
    reach = 0.0
    small = table.n * table.d * len(centers) < CARRY_FROM
    while n_iter < max_iter and not converged:
        n_iter += 1
        source = PointCosts(table, centers)
        known = None if labels is None or small else (labels.copy(), found.seconds, source.carried(old, labels, found.gaps))
        found = solve(source, high, low, prices=prices, known=known, reach=reach)
        reach = 0.0 if prices is None else float(np.ptp(found.prices - prices))
        moved = sums.update(labels, found.labels)
        labels, prices, old = found.labels, found.prices, centers
        centers = sums.means()
        shift = float(((centers - old) ** 2).sum())
        converged = moved == 0 or shift <= tolerance * table.variance
    return LloydResult(labels, centers, inertia(table, centers, labels), n_iter, converged)


def inertia(table: RowTable, centers: np.ndarray, labels: np.ndarray) -> float:
    """Sum of squared distances (n rows) to the own centres in float64, correctly rounded and so the same in any order."""
    return math.fsum(own_sq_distances(table, centers, labels))


def own_sq_distances(table: RowTable, centers: np.ndarray, labels: np.ndarray) -> np.ndarray:
    """(n,) float64 squared distance of every row to the centre of its cluster."""
    out = np.empty(table.n)
    for span in table.spans():
        own_squared_distances(table.block(span), centers, labels[span], out[span])
    return out
