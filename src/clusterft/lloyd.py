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

GAIN_SHARE = 0.1
"""Of the tolerance: the share of the rows' whole variance below which what moving the centres gains is no longer worth a pass."""

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
    """Iterates until no row changes its cluster, at most max_iter times; with a tolerance above 0 also until the centres' squared
    movement, summed, falls below `tolerance` times the variance of the rows (mean over columns, as in scikit-learn), or until
    moving the centres lowers the sum of squares by less than GAIN_SHARE x tolerance of the rows' own. On wide rows the second is
    the one that counts: the first asks for 1/d of it, and halves of one round cluster then drift for tens of passes. In any case it
    ends when the centres stay where they were up to the rounding of their means.

    low must be at least 1 for every cluster, so that none can become empty.
    """
    sums = ExactSums(table, len(centers))
    small = table.n * table.d * len(centers) < CARRY_FROM
    found = before = known = None
    reach, n_iter, converged = 0.0, 0, False
    while n_iter < max_iter and not converged:
        n_iter += 1
        source = PointCosts(table, centers)
        if found is not None and not small:
            known = (found.labels.copy(), found.seconds, source.carried(before, found.labels, found.gaps))
        last, found = found, solve(source, high, low, prices=None if found is None else found.prices, known=known, reach=reach)
        reach = np.inf if last is None else float(np.ptp(found.prices - last.prices))
        moved = sums.update(None if last is None else last.labels, found.labels)
        before, centers = centers, sums.means()
        steps = ((centers - before) ** 2).sum(1)
        gain = float(steps @ np.bincount(found.labels, minlength=len(centers))) / table.n
        converged = moved == 0 or float(steps.sum()) <= tolerance * table.variance
        converged |= gain <= GAIN_SHARE * tolerance * table.variance * table.d
        converged |= bool((np.abs(centers - before) <= 4 * sums.rounding).all())
    return LloydResult(found.labels, centers, inertia(table, centers, found.labels), n_iter, converged)


def inertia(table: RowTable, centers: np.ndarray, labels: np.ndarray) -> float:
    """Sum of squared distances (n rows) to the own centres in float64, correctly rounded and so the same in any order."""
    return math.fsum(own_sq_distances(table, centers, labels))


def own_sq_distances(table: RowTable, centers: np.ndarray, labels: np.ndarray) -> np.ndarray:
    """(n,) float64 squared distance of every row to the centre of its cluster."""
    out = np.empty(table.n)
    for span in table.spans():
        own_squared_distances(table.block(span), centers, labels[span], out[span])
    return out
