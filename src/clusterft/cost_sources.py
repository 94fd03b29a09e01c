"""Where the exact assignment gets its costs: a matrix, or points and centres whose cost matrix is never held as a whole.

A source has n rows and k clusters and answers three questions. `scan(prices)`: cheapest cluster, runner-up and certain margin of
every row, from quick arithmetic with a proven error bound. `rows(index)`: the true float64 costs of some rows. `keys(index)`:
hashes of the rows' contents, to break ties. For points the true cost is the float64 sum of squared differences.
"""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np

from clusterft.assignment_kernels import best_two, carry_margins, squared_distances
from clusterft.rows import RowTable

UNIT_FLOAT32 = 2.0**-24
NO_ROWS = np.empty(0, np.int64)
NORM_STEPS = 1024  # lengths that carried margins tell apart

Scan = tuple[np.ndarray, np.ndarray, np.ndarray]


class CostSource(Protocol):
    """See the module's tour."""

    n: int
    k: int

    def scan(self, prices: np.ndarray, rows: np.ndarray = NO_ROWS, into: Scan | None = None) -> Scan:
        """labels (n,) int32, runners-up (n,) int32 and margins (n,) float32 under prices (k,).

        With `rows` only these are scanned, and their places of `into` written.
        """

    def rows(self, index: np.ndarray) -> np.ndarray:
        """(m, k) float64 costs."""

    def keys(self, index: np.ndarray) -> np.ndarray:
        """(m,) uint64 content keys."""


class DenseCosts:
    """A matrix of costs (n, k). Raises ValueError if it is no matrix or not finite."""

    def __init__(self, costs: Any) -> None:
        if type(costs).__module__.split(".")[0] == "torch":
            costs = costs.detach().cpu().numpy()
        costs = np.asarray(costs)
        if costs.ndim != 2 or costs.shape[1] == 0:
            raise ValueError(f"costs must be a matrix (rows, clusters) with at least one cluster, got shape {costs.shape}")
        self.costs = np.ascontiguousarray(costs, np.float32 if costs.dtype in (np.float16, np.float32) else np.float64)
        self.n, self.k = self.costs.shape
        bad = np.flatnonzero(~np.isfinite(self.costs.sum(1)))
        bad = bad[~np.isfinite(self.costs[bad]).all(1)]
        if bad.size:
            raise ValueError(f"{bad.size} of {self.n} rows of the costs hold NaN or infinity values, the first is row {bad[0]}")

    def scan(self, prices: np.ndarray, rows: np.ndarray = NO_ROWS, into: Scan | None = None) -> Scan:
        labels, seconds, gaps = into or _empty_scan(self.n)
        # float64 differences are themselves rounded, at most by this much
        slack = 4 * np.finfo(np.float64).eps * (largest_magnitude(self.costs) + largest_magnitude(prices))
        best_two(
            self.costs[rows] if rows.size else self.costs,
            prices,
            0,
            rows,
            labels,
            seconds,
            gaps,
            slack,
            np.ones(self.n, np.float32),
        )
        return labels, seconds, gaps

    def rows(self, index: np.ndarray) -> np.ndarray:
        return self.costs[index].astype(np.float64)

    def keys(self, index: np.ndarray) -> np.ndarray:
        return RowTable(self.costs).key_of(index)


class PointCosts:
    """Squared distances between the rows of a table and centres (k, d). With a torch tensor the products run on its device.

    Costs are taken relative to the mean centre m: with d_k = c_k - m, cost = -2 x.d_k + |d_k|^2 + 2 m.d_k + what all clusters
    share, so that nothing large cancels. A float32 product of length d is off by at most (d + 8) 2^-24 |x| |2 d_k|.
    Raises ValueError if a point or centre is not finite or the shapes do not fit.
    """

    def __init__(self, table: RowTable, centers: Any) -> None:
        self.table = table.survey(keys=False)
        if type(centers).__module__.split(".")[0] == "torch":
            centers = centers.detach().cpu().double().numpy()
        self.centers = np.ascontiguousarray(centers, np.float64)
        if self.centers.ndim != 2 or self.centers.shape[0] == 0 or self.centers.shape[1] != table.d:
            raise ValueError(f"centers must be (k, {table.d}) for points with {table.d} columns, got shape {self.centers.shape}")
        if not np.isfinite(self.centers).all():
            raise ValueError(f"{int((~np.isfinite(self.centers)).any(1).sum())} centers hold NaN or infinity values")
        self.n, self.k = table.n, len(self.centers)
        moved = self.centers if table.shift is None else self.centers - table.shift
        mean = moved.mean(0)
        apart = moved - mean
        self.factors = np.ascontiguousarray((-2.0 * apart).T.astype(np.float32))
        self.offsets = (apart**2).sum(1) + 2.0 * apart @ mean
        # the table's norms stand in for the rows' own lengths; 1.05 covers the second-order terms
        self.error = 1.05 * (table.d + 8) * UNIT_FLOAT32 * 2.0 * float(np.sqrt((apart**2).sum(1).max()))

    def scan(self, prices: np.ndarray, rows: np.ndarray = NO_ROWS, into: Scan | None = None) -> Scan:
        labels, seconds, gaps = into or _empty_scan(self.n)
        offsets = self.offsets + prices
        if self.table.tensor is not None:
            self._scan_on_device(offsets, rows, labels, seconds, gaps)
            return labels, seconds, gaps
        space = np.empty((self.table.chunk_rows, self.k), np.float32)
        for span in self.table.spans(rows.size or self.n):
            where = rows[span] if rows.size else span
            products = np.matmul(self.table.shifted(where), self.factors, out=space[: span.stop - span.start])
            best_two(
                products,
                offsets,
                span.start,
                where if rows.size else NO_ROWS,
                labels,
                seconds,
                gaps,
                self.error,
                self.table.norms,
            )
        return labels, seconds, gaps

    def _scan_on_device(self, offsets, rows, labels, seconds, gaps) -> None:
        """The same scan with torch: product and two smallest on the tensor's device, 12 bytes a row come back."""
        import torch

        points = self.table.tensor.detach()
        factors = torch.as_tensor(self.factors, device=points.device)
        offsets = torch.as_tensor(offsets, device=points.device)
        shift = None if self.table.shift is None else torch.as_tensor(self.table.shift, device=points.device)
        step = max(1, min(self.n, 2**26 // max(self.k, self.table.d)))
        total = rows.size or self.n
        for start in range(0, total, step):
            where = rows[start : start + step] if rows.size else slice(start, min(start + step, total))
            block = points[torch.as_tensor(where, device=points.device) if rows.size else where]
            block = (block.double() - shift).float() if shift is not None else block.float()
            values, order = torch.topk((_product(block, factors)).double() + offsets, min(2, self.k), dim=1, largest=False)
            values, order = values.cpu().numpy(), order.cpu().numpy()
            margin = values[:, -1] - values[:, 0] if self.k > 1 else np.full(len(values), np.inf)
            labels[where], seconds[where] = order[:, 0], order[:, -1]
            gaps[where] = (margin - 2.0 * self.error * self.table.norms[where]) * (1.0 - 1e-6)

    def carried(self, before: np.ndarray, labels: np.ndarray, gaps: np.ndarray) -> np.ndarray:
        """Margins (n,) that still hold after the centres moved from `before` (k, d) to this source's, at the same prices."""
        old, new = (c if self.table.shift is None else c - self.table.shift for c in (before, self.centers))
        gaps, longest = gaps.copy(), float(self.table.norms.max())
        shifts = np.sqrt(((new - old) ** 2).sum(1))
        steps = NORM_STEPS / longest if longest > 0 else 0.0
        lengths = np.arange(NORM_STEPS + 2) * (longest / NORM_STEPS) * (1 + 1e-12)
        changes = largest_falls((new**2).sum(1) - (old**2).sum(1), shifts, lengths)
        carry_margins(gaps, labels, self.table.norms, changes, steps)
        return gaps

    def rows(self, index: np.ndarray) -> np.ndarray:
        out = np.empty((index.size, self.k))
        for span in self.table.spans(index.size):
            squared_distances(self.table.block(index[span]), self.centers, out[span])
        return out

    def keys(self, index: np.ndarray) -> np.ndarray:
        return self.table.key_of(index)


def largest_falls(lifts: np.ndarray, shifts: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """(k, b) the least by which a margin changes, for rows of cluster a no longer than lengths (b,).

    The cost of cluster c changed by lifts[c] - 2 x.s_c with |s_c| = shifts[c], so by at least lifts[c] - 2 |x| shifts[c] for a
    rival and at most lifts[a] + 2 |x| shifts[a] for the own cluster.
    """
    rivals = lifts[:, None] - 2.0 * lengths * shifts[:, None]
    order = np.argsort(rivals, axis=0)[: min(2, len(lifts))]
    least = np.take_along_axis(rivals, order, 0)
    own = np.arange(len(lifts))[:, None] == order[0]
    worst = np.where(own, least[-1] if len(lifts) > 1 else np.inf, least[0])
    return worst - lifts[:, None] - 2.0 * lengths * shifts[:, None]


def largest_magnitude(values: np.ndarray) -> float:
    """max |value|, 0 for none, without a second array of the size of the first."""
    return float(max(values.max(initial=0), -values.min(initial=0)))


def _product(block, factors):
    """A float32 product in full precision: TF32 and a surrounding autocast would break the error bound, so both are off here."""
    import torch

    with torch.autocast(block.device.type, enabled=False):
        return _without_tf32(block, factors) if block.device.type == "cuda" else block @ factors


def _without_tf32(block, factors):
    import torch

    allowed = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = False
    try:
        return block @ factors
    finally:
        torch.backends.cuda.matmul.allow_tf32 = allowed


def _empty_scan(n: int) -> Scan:
    return np.empty(n, np.int32), np.empty(n, np.int32), np.empty(n, np.float32)
