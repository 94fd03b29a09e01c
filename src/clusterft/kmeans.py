"""K-means with limits on the cluster sizes, as a scikit-learn estimator.

In go rows (array, memory map or torch tensor) and the number of clusters; out come labels, centres and the sum of squares. Three
solvers:

    exact          every Lloyd iteration assigns exactly (`assignment.py`), centres are always the means of their rows
    released       the released code's plain K-means and greedy pass (`released.py`)
    min_cost_flow  k-means-constrained, the slow twin

Whether a request is possible at all is answered by `check_feasible`, which needs neither data nor a model.
"""

from __future__ import annotations

import logging
import warnings
from typing import Any

import numpy as np
from sklearn.base import BaseEstimator, ClusterMixin
from sklearn.exceptions import ConvergenceWarning
from sklearn.utils import check_random_state
from sklearn.utils.validation import check_is_fitted, validate_data

from clusterft.cost_sources import PointCosts
from clusterft.kmeans_seeding import starting_centers
from clusterft.limits import Limit, check_feasible, default_capacity, effective_clusters
from clusterft.lloyd import LloydResult, inertia, lloyd
from clusterft.released import released_clustering
from clusterft.rows import ExactSums, RowTable, is_tensor

__all__ = ["SOLVERS", "CapacityKMeans", "check_feasible", "effective_clusters"]

logger = logging.getLogger(__name__)

SOLVERS = ("exact", "released", "min_cost_flow")


class CapacityKMeans(ClusterMixin, BaseEstimator):
    """K-means in which no cluster holds more than ceil(capacity_factor n / n_clusters) rows (PAPER, section 1).

    n_clusters       k
    capacity_factor  alpha, at least 1; None for no cap
    n_init           restarts; for `exact` they run on a sample of the rows, and the best is refined on all rows
    max_iter         most iterations of the refinement
    random_state     int, RandomState or None, as in scikit-learn
    solver           exact | released | min_cost_flow
    size_min, size_max  explicit limits, int or (k,) integers; size_max takes the place of the cap. Every cluster holds at
                     least one row in any case
    tol              the refinement ends when the centres hardly move or gain by it, relative to the rows' variance (`lloyd.lloyd`);
                     0: when no row moves
    chunk_rows       rows read at a time; default about 8 MiB

    After `fit`: labels_ (n,) int32, cluster_centers_ (k, d) float64, the means of their rows (`released`: plain K-means'
    centres), inertia_ the sum of squared distances to them, n_iter_, size_max_ and size_min_ (k,) the limits in force. Clusters
    are numbered by falling size, then by their centres; the released and min_cost_flow solvers keep the numbers that their
    library gives.

    `exact` gives the same labels for the same seed on any number of threads and in any order of the rows. Equal rows are
    interchangeable: the earlier ones get the lower labels, or those that come first in `row_ids` where `fit` is given them.
    """

    def __init__(
        self,
        n_clusters: int = 8,
        *,
        capacity_factor: float | None = 1.5,
        n_init: int = 10,
        max_iter: int = 300,
        random_state: Any = None,
        solver: str = "exact",
        size_min: Limit = None,
        size_max: Limit = None,
        tol: float = 1e-4,
        chunk_rows: int | None = None,
    ) -> None:
        self.n_clusters = n_clusters
        self.capacity_factor = capacity_factor
        self.n_init = n_init
        self.max_iter = max_iter
        self.random_state = random_state
        self.solver = solver
        self.size_min = size_min
        self.size_max = size_max
        self.tol = tol
        self.chunk_rows = chunk_rows

    def fit(self, X: Any, y: None = None, *, row_ids: Any = None) -> CapacityKMeans:
        """Clusters the rows X (n, d). row_ids (n,): distinct, sortable names that order equal rows.

        Raises ValueError for an unknown option, rows that are not finite, or limits that cannot be met (before any work starts).
        """
        self._check_options()
        X = self._checked(X, reset=True)
        n, k = X.shape[0], self.n_clusters
        cap = default_capacity(n, k, self.capacity_factor) if self.size_max is None else self.size_max
        check_feasible(n, k, self.size_min, cap)
        low = np.maximum(np.broadcast_to(np.asarray(0 if self.size_min is None else self.size_min, np.int64), (k,)), 1)
        high = np.minimum(np.broadcast_to(np.asarray(cap, np.int64), (k,)), n)
        check_feasible(n, k, low, high)
        self.size_min_, self.size_max_ = low, high
        found = getattr(self, f"_fit_{self.solver}")(X, low, high, row_ids)
        self.labels_, self.cluster_centers_ = found.labels, found.centers
        self.inertia_, self.n_iter_ = found.inertia, found.n_iter
        return self

    def predict(self, X: Any) -> np.ndarray:
        """Labels (n,) int32 of the nearest centres, without limits: sizes are a property of the rows that were fitted.

        For limits, call `assign_points(X, model.cluster_centers_, capacity)`.
        """
        check_is_fitted(self)
        table = RowTable(self._checked(X, reset=False), chunk_rows=self.chunk_rows)
        return nearest_centers(table, self.cluster_centers_)

    def __sklearn_tags__(self):
        tags = super().__sklearn_tags__()
        tags.input_tags.allow_nan = False
        return tags

    def _check_options(self) -> None:
        if self.solver not in SOLVERS:
            raise ValueError(f"solver {self.solver!r} is unknown; known are {', '.join(SOLVERS)}")
        for name in ("n_clusters", "n_init", "max_iter"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | np.integer) or value < 1:
                raise ValueError(f"{name} must be a whole number of at least 1, got {value!r}")
        if not self.tol >= 0:
            raise ValueError(f"tol must not be negative, got {self.tol!r}")

    def _checked(self, X: Any, *, reset: bool) -> Any:
        """Arrays pass scikit-learn's checks except for finiteness, which is checked in chunks with the row named."""
        if is_tensor(X):
            if X.ndim != 2:
                raise ValueError(f"X must have two dimensions, got shape {tuple(X.shape)}")
            if reset:
                self.n_features_in_ = int(X.shape[1])
            elif X.shape[1] != self.n_features_in_:
                raise ValueError(
                    f"X has {X.shape[1]} features, but {type(self).__name__} is expecting {self.n_features_in_} features as input"
                )
            return X
        dtypes = (np.float64, np.float32, np.float16)
        return validate_data(self, X, dtype=dtypes, ensure_all_finite=False, reset=reset)

    def _seed(self) -> int:
        if isinstance(self.random_state, int | np.integer):
            return int(self.random_state)
        return int(check_random_state(self.random_state).randint(2**31 - 1))

    def _fit_exact(self, X: Any, low: np.ndarray, high: np.ndarray, row_ids: Any) -> LloydResult:
        table = RowTable(X, chunk_rows=self.chunk_rows).survey()
        k, seed = self.n_clusters, self._seed()
        distinct = np.unique(table.keys[: 4 * k + 1024]).size
        if distinct < k and (distinct := np.unique(table.keys).size) < k:
            warnings.warn(
                f"the rows have {distinct} distinct values, fewer than the {k} clusters: some clusters will share a centre",
                ConvergenceWarning,
                stacklevel=3,
            )
        centers = starting_centers(table, k, low, high, n_init=self.n_init, max_iter=self.max_iter, seed=seed)
        found = lloyd(table, centers, low, high, max_iter=self.max_iter, tolerance=self.tol)
        if not found.converged:
            warnings.warn(
                f"K-means did not converge in {self.max_iter} iterations; raise max_iter", ConvergenceWarning, stacklevel=3
            )
        return canonical(table, found, row_ids, fixed_numbers=np.ptp(low) > 0 or np.ptp(high) > 0)

    def _fit_released(self, X: Any, low: np.ndarray, high: np.ndarray, row_ids: Any) -> LloydResult:
        if self.size_min is not None or self.size_max is not None or self.capacity_factor is None:
            raise ValueError("the released solver knows only capacity_factor; for size_min and size_max use solver='exact'")
        table = RowTable(X, chunk_rows=self.chunk_rows).survey(keys=False)
        found = released_clustering(
            table.block(slice(0, table.n)),
            self.n_clusters,
            capacity_factor=self.capacity_factor,
            n_init=self.n_init,
            max_iter=self.max_iter,
            random_state=self.random_state,
        )
        total = inertia(table, found.centers.astype(np.float64), found.labels)
        return LloydResult(found.labels, found.centers, total, found.n_iter, True)

    def _fit_min_cost_flow(self, X: Any, low: np.ndarray, high: np.ndarray, row_ids: Any) -> LloydResult:
        from k_means_constrained import KMeansConstrained

        if np.ptp(low) > 0 or np.ptp(high) > 0:
            raise ValueError("the min_cost_flow solver takes the same limits for every cluster; for others use solver='exact'")
        table = RowTable(X, chunk_rows=self.chunk_rows).survey(keys=False)
        model = KMeansConstrained(
            self.n_clusters,
            size_min=int(low[0]),
            size_max=int(high[0]),
            n_init=self.n_init,
            max_iter=self.max_iter,
            tol=self.tol,
            random_state=self.random_state,
        ).fit(table.block(slice(0, table.n)).astype(np.float64))
        labels = np.asarray(model.labels_, np.int32)
        sums = ExactSums(table, self.n_clusters)
        sums.update(None, labels)
        centers = sums.means()
        return LloydResult(labels, centers, inertia(table, centers, labels), int(model.n_iter_), True)


def nearest_centers(table: RowTable, centers: np.ndarray) -> np.ndarray:
    """(n,) int32 nearest centre of every row in float64 distances, ties to the lower number."""
    source = PointCosts(table, centers)
    labels, _, gaps = source.scan(np.zeros(source.k))
    doubtful = np.flatnonzero(gaps <= 0)
    labels[doubtful] = source.rows(doubtful).argmin(1)
    return labels


def canonical(table: RowTable, found: LloydResult, row_ids: Any, *, fixed_numbers: bool) -> LloydResult:
    """Numbers clusters by falling size, then by their centres (limits of their own fix the numbers), and gives equal rows their
    labels in the order of row_ids, else of the rows."""
    k = len(found.centers)
    sizes = np.bincount(found.labels, minlength=k)
    order = np.arange(k) if fixed_numbers else np.lexsort((*found.centers.T[::-1], -sizes))
    rank = np.empty(k, np.int32)
    rank[order] = np.arange(k, dtype=np.int32)
    labels = rank[found.labels]
    place = np.arange(table.n) if row_ids is None else np.argsort(np.argsort(np.asarray(row_ids), kind="stable"), kind="stable")
    if place.shape != (table.n,):
        raise ValueError(f"row_ids must name the {table.n} rows, got shape {place.shape}")
    by_content = np.lexsort((place, table.keys))
    keys = table.keys[by_content]
    starts = np.concatenate([[True], keys[1:] != keys[:-1]])
    group = np.cumsum(starts) - 1
    own = labels[by_content]
    labels[by_content] = own[np.lexsort((own, group))]
    return LloydResult(labels, found.centers[order], found.inertia, found.n_iter, found.converged)
