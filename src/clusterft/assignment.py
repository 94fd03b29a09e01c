"""Exact capacity-constrained assignment: few clusters, very many rows.

In go squared distances (or points with centres, read in chunks) and size limits; out come the labels with the smallest possible
sum of squared distances. Every step is certain, none is a heuristic that the answer depends on:

    prices    one a cluster, so that each row may simply take its cheapest cluster; guessed on a sample (`prices.py`)
    scan      one pass over all rows: cheapest cluster and margin to the runner-up, less the possible rounding error
    finish    rows of small margin in float64, successive shortest paths on the k clusters and a sink (`assignment_kernels.py`)
    check     rows whose margin the moved prices have used up join the finish, until none is left
    ties      among several best answers one is chosen from the rows' contents (`ties.py`), never from their order

The growth is O(n k) a scan plus O(k^2) for every row that must be moved after it, memory O(n) beside the rows of the finish.
References: Bradley, Bennett and Demiriz (2000) for constrained K-means as a flow; Ahuja, Magnanti and Orlin (1993), chapter 9,
for successive shortest paths.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from clusterft.assignment_kernels import balance, lower_margins, margins, relabel
from clusterft.cost_sources import NO_ROWS, CostSource, DenseCosts, PointCosts, Scan, largest_magnitude
from clusterft.limits import Limit, size_limits
from clusterft.prices import FINISH_BYTES, flows_for, improve_prices, needed_margin, scaled_limits, small_prices
from clusterft.rows import RowTable
from clusterft.ties import TIE, settle_ties

HEAVY_FINISH = 2
"""A finish of more than this many times n k steps is put off for another scan with better prices."""

MOST_SCANS = 5
"""After so many scans the finish begins, however many rows it takes."""

RESCAN_SHARE = 0.7
"""Share of doubtful rows from which a whole scan, which reads in order, is the quicker one."""


@dataclass(frozen=True)
class Assignment:
    """labels (n,) int32; seconds (n,) int32 likely runners-up; prices (k,) float64, positive only for full clusters, negative
    only for clusters at their minimum; gaps (n,) float32 how much the prices may move apart before a row's label can change;
    scans and paths count the work."""

    labels: np.ndarray
    seconds: np.ndarray
    prices: np.ndarray
    gaps: np.ndarray
    scans: int
    paths: int


def assign(sq_distances: np.ndarray, capacity: Limit, min_size: Limit = 0) -> np.ndarray:
    """Labels (n,) int32 that minimise the sum of sq_distances[i, labels[i]] under size limits, exactly.

    sq_distances (n, k) finite numbers (any costs will do); a torch tensor is taken to the CPU.
    capacity     largest size of a cluster: int, (k,) integers, or None for no limit
    min_size     smallest size, int or (k,) integers

    Equal rows are interchangeable: the earlier ones get the lower labels. Otherwise the labels do not depend on the rows' order.
    Raises ValueError if a value is not finite or the limits cannot be met (the message shows the arithmetic).
    """
    return solve(DenseCosts(sq_distances), capacity, min_size).labels


def assign_points(points, centers, capacity: Limit, min_size: Limit = 0, *, chunk_rows: int | None = None) -> np.ndarray:
    """As `assign`, with squared Euclidean distances between points and centres that are never held as a whole.

    points  (n, d) float16, float32 or float64 array or memory map, read in chunks of chunk_rows; or a torch tensor on any device,
            whose matrix product is then taken there
    centers (k, d) finite
    The minimum is exact in float64 distances; float32 products only sort out the rows whose label is beyond doubt.
    Raises ValueError as `assign`, and if the shapes do not fit.
    """
    return solve(PointCosts(RowTable(points, chunk_rows=chunk_rows), centers), capacity, min_size).labels


def solve(
    source: CostSource,
    capacity: Limit,
    min_size: Limit = 0,
    *,
    prices: np.ndarray | None = None,
    known: Scan | None = None,
    reach: float = 0.0,
) -> Assignment:
    """The assignment with its dual prices.

    Two warm starts change the speed only: `prices` (k,), and `known`, a scan under these prices whose margins are true or too
    small. Rows whose margin is above `reach`, how far the prices may move, are then not scanned again.

    Raises ValueError as `assign`.
    """
    n, k = source.n, source.k
    low, high = size_limits(n, k, min_size, capacity)
    if n == 0:
        return Assignment(np.zeros(0, np.int32), np.zeros(0, np.int32), np.zeros(k), np.zeros(0, np.float32), 0, 0)
    if k == 1:
        return Assignment(np.zeros(n, np.int32), np.zeros(n, np.int32), np.zeros(1), np.full(n, np.inf, np.float32), 0, 0)
    cold = prices is None
    if cold:
        prices = _cold_prices(source, low, high)
    return _Solver(source, low, high, reach, cold).run(np.asarray(prices, np.float64), known)


def _cold_prices(source: CostSource, low: np.ndarray, high: np.ndarray) -> np.ndarray:
    """Prices (k,) of the exact solution on evenly spaced rows; a large sample starts from the prices of a smaller one."""
    n, k = source.n, source.k
    few = max(1024, 32 * k)
    size = min(n, max(few, min(n // 8, FINISH_BYTES // (8 * k))))
    rows = np.unique(np.linspace(0, n - 1, size).astype(np.int64))
    costs, limits = source.rows(rows), scaled_limits(low, high, rows.size / n)
    if rows.size <= few:
        return small_prices(costs, *limits)
    return solve(DenseCosts(costs), limits[1], limits[0]).prices


class _Solver:
    """The loop of scan, finish and check; see the module's tour."""

    def __init__(self, source: CostSource, low: np.ndarray, high: np.ndarray, reach: float, sampled: bool) -> None:
        self.source, self.low, self.high, self.reach = source, low, high, reach
        self.sampled = sampled
        self.scans = self.paths = 0

    def run(self, prices: np.ndarray, known: Scan | None = None) -> Assignment:
        while True:
            scan, fresh = self._scan(prices, known)
            known = None
            self.scans += 1
            found = self._finish(prices, scan, fresh)
            if isinstance(found, Assignment):
                return found
            prices = found

    def _scan(self, prices: np.ndarray, known: Scan | None) -> tuple[Scan, np.ndarray | None]:
        """A scan and which of its margins are true, not only bounds (None: all)."""
        if known is not None:
            doubtful = known[2] <= self.reach
            if (some := np.flatnonzero(doubtful)).size <= RESCAN_SHARE * self.source.n:
                return self.source.scan(prices, some, known) if some.size else known, doubtful
        return self.source.scan(prices), None

    def _expected_changes(self, scanned, scan, fresh):
        """Counts, better prices, and the margin up to which rows may change; all margins up to it are made true first."""
        for _ in range(2):
            counts = np.bincount(scan[0], minlength=self.source.k).astype(np.int64)
            guess, width = needed_margin(*scan, counts, scanned, self.low, self.high)
            stale = np.flatnonzero(~fresh & (scan[2] <= width)) if fresh is not None else NO_ROWS
            if not stale.size:
                break
            self.source.scan(scanned, stale, scan)
            fresh[stale] = True
        return counts, guess, width

    def _sampled_once(self) -> np.ndarray | None:
        """Prices from a sample, once: far from the goal they lead closer than Newton steps do."""
        if self.sampled:
            return None
        self.sampled = True
        return _cold_prices(self.source, self.low, self.high)

    def _finish(self, scanned: np.ndarray, scan: Scan, fresh: np.ndarray | None) -> Assignment | np.ndarray:
        """The assignment, or better prices to scan with when the finish would grow beyond its memory."""
        counts, guess, width = self._expected_changes(scanned, scan, fresh)
        if np.ptp(guess - scanned) > width and (sampled := self._sampled_once()) is not None:
            return sampled
        labels, seconds, gaps = scan
        rows = np.flatnonzero(gaps <= width)
        costs = self.source.rows(rows)
        own = labels[rows].astype(np.int64)
        relabel(costs, scanned, own, counts)
        prices, misplaced = improve_prices(costs, own, counts, guess, scanned, width, self.low, self.high)
        if misplaced * rows.size > HEAVY_FINISH * self.source.n * self.source.k**2 and self.scans < MOST_SCANS:
            sampled = self._sampled_once()
            if sampled is not None or (prices != scanned).any():
                return prices if sampled is None else sampled
        attempts = 0
        while True:
            tie = TIE * max(1e-300, largest_magnitude(costs), largest_magnitude(prices))
            state = own.copy(), counts.copy(), prices
            prices, balanced = self._balance(costs, own, counts, prices)
            moved = prices - scanned
            reach = np.nextafter(np.float32(np.ptp(moved) + 2 * tie), np.float32(np.inf))
            if balanced:
                doubtful = np.setdiff1d(np.flatnonzero(gaps <= reach), rows, assume_unique=True)
                if (rows.size + doubtful.size) * self.source.k * 8 > FINISH_BYTES:
                    doubtful = self._movers(doubtful, scan, prices, tie)
            else:
                own, counts, prices = state
                attempts += 1
                doubtful = self._next_rows(labels, gaps, rows, counts, prices, 2**attempts)
            if balanced and not doubtful.size:
                break
            if not doubtful.size:
                raise RuntimeError("the balancing step found no path although the limits are feasible")
            extra = self.source.rows(doubtful)
            extra_own = labels[doubtful].astype(np.int64)
            relabel(extra, prices, extra_own, counts)
            rows, costs, own = np.concatenate([rows, doubtful]), np.concatenate([costs, extra]), np.concatenate([own, extra_own])
        settle_ties(self.source, rows, costs, own, counts, prices, self.low, self.high)
        labels[rows] = own
        return self._result(labels, seconds, gaps, rows, costs, own, prices, moved)

    def _movers(self, doubtful, scan, prices, tie) -> np.ndarray:
        """Those of the doubtful rows whose label does change, or may, under the new prices: all that must join the finish."""
        labels, _, gaps = self.source.scan(prices, doubtful, tuple(part.copy() for part in scan))
        return doubtful[(labels[doubtful] != scan[0][doubtful]) | (gaps[doubtful] <= 2 * tie)]

    def _next_rows(self, labels, gaps, rows, counts, prices, factor) -> np.ndarray:
        """For clusters that have no more rows to give away: of each those with the next smallest margins."""
        outside = np.ones(self.source.n, bool)
        outside[rows] = False
        wanted = np.maximum(counts - flows_for(prices, counts, self.low, self.high), 32) * factor
        found = []
        for c in range(self.source.k):
            members = np.flatnonzero((labels == c) & outside)
            if members.size > wanted[c]:
                members = members[np.argpartition(gaps[members], wanted[c])[: wanted[c]]]
            found.append(members)
        return np.sort(np.concatenate(found))

    def _balance(self, costs, own, counts, prices) -> tuple[np.ndarray, bool]:
        """Prices after balancing, and whether that came to its end: it needs more rows where a cluster has none to give away."""
        nodes = np.append(prices, 0.0)
        flow = flows_for(prices, counts, self.low, self.high)
        paths = balance(costs, own, counts, nodes, flow, self.low, self.high)
        self.paths += max(paths, 0)
        return nodes[:-1] - nodes[-1], paths >= 0

    def _result(self, labels, seconds, gaps, rows, costs, own, prices, moved) -> Assignment:
        """Margins under the final prices: exact for the rows of the finish, lowered by the moved prices for the others."""
        lower_margins(gaps, labels, moved - moved.min())
        exact, after = np.empty(rows.size), np.empty(rows.size, np.int64)
        margins(costs, prices, own, after, exact)
        gaps[rows], seconds[rows] = np.nextafter(exact.astype(np.float32), np.float32(-np.inf)), after
        return Assignment(labels, seconds, prices, gaps, self.scans, self.paths)
