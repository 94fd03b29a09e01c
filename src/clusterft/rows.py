"""Rows that may be too many for memory: read in chunks, checked once, summed without rounding.

In goes an (n, d) array, memory map or torch tensor of float16, bfloat16, float32 or float64; out come float32 blocks for matrix
products, single rows, norms, content keys, and sums of rows as integers. Integer sums are the same in any order, on any number of
threads, and stay exact when rows are added and taken away; that is what makes K-means independent of the order of its rows.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from clusterft.jit import compiled

CHUNK_BYTES = 8 * 2**20
LARGEST = 1e15
SUM_BITS = 62
NEGATIVE_ZERO = np.uint64(2**63)
"""The bits of -0.0, which is equal to 0.0; told apart as bits, because fast arithmetic knows no signed zero."""


class RowTable:
    """n rows of d numbers.

    chunk_rows  rows read at a time (default: about 8 MiB of float32)
    After `survey`: norms (n,) float32, rounded up, of the rows less `shift`; keys (n,) uint64 of the contents; draws (n,)
    uint64 lots for sampling; largest (d,) float64; variance: mean over the columns, of at most 1,024 rows.
    """

    def __init__(self, points: Any, *, chunk_rows: int | None = None) -> None:
        self.tensor = points if is_tensor(points) else None
        self.points = points if self.tensor is not None else np.asanyarray(points)
        if self.points.ndim != 2 or 0 in self.points.shape:
            raise ValueError(
                f"points must be a table (n, d) with at least one row and one column, got shape {tuple(self.points.shape)}"
            )
        if self.tensor is None and self.points.dtype.kind not in "fiub":
            raise ValueError(f"points must be numbers, got dtype {self.points.dtype}")
        self.n, self.d = map(int, self.points.shape)
        if chunk_rows is not None and chunk_rows < 1:
            raise ValueError(f"chunk_rows must be at least 1, got {chunk_rows}")
        self.chunk_rows = chunk_rows or max(256, CHUNK_BYTES // (4 * self.d))
        self.shift: np.ndarray | None = None
        self.norms: np.ndarray | None = None
        self.keys: np.ndarray | None = None
        self.draws: np.ndarray | None = None

    def spans(self, total: int | None = None) -> Iterator[slice]:
        total = self.n if total is None else total
        for start in range(0, total, self.chunk_rows):
            yield slice(start, min(start + self.chunk_rows, total))

    def block(self, where: slice | np.ndarray) -> np.ndarray:
        """Rows as a C-ordered float32 or float64 array, values unchanged."""
        if self.tensor is not None:
            import torch

            index = torch.as_tensor(where, device=self.tensor.device) if isinstance(where, np.ndarray) else where
            found = self.tensor.detach()[index]
            return (found if found.dtype == torch.float64 else found.float()).cpu().contiguous().numpy()
        found = self.points[where]
        return np.ascontiguousarray(found, np.float32 if found.dtype in (np.float16, np.float32) else np.float64)

    def shifted(self, where: slice | np.ndarray) -> np.ndarray:
        """Rows less `shift` as float32: what the matrix products are taken of."""
        block = self.block(where)
        if self.shift is not None:
            block = block - self.shift.astype(block.dtype)
        return block.astype(np.float32, copy=False)

    def survey(self, *, keys: bool = True) -> RowTable:
        """Reads all rows once. Raises ValueError if a value is NaN, infinite or beyond 1e15 (its square would not fit)."""
        if self.norms is not None and (self.keys is not None or not keys):
            return self
        self.norms, self.keys = np.empty(self.n, np.float32), np.empty(self.n if keys else 0, np.uint64)
        self.largest = np.zeros(self.d)
        multipliers = key_multipliers(self.d)
        for span in self.spans():
            block = self.block(span)
            _survey(block, span.start, multipliers, self.norms, self.keys, self.largest)
        self._refuse_bad_rows()
        self.keys, self.draws = (self.keys, _draws(self.keys)) if keys else (None, None)
        sample = self.block(self._sample(1024)).astype(np.float64)
        mean = sample.mean(0).astype(np.float32).astype(np.float64)
        self.variance = float(sample.var(0).mean())
        if (mean**2).sum() > 100 * ((sample - mean) ** 2).sum(1).mean():
            self._use_shift(mean)
        return self

    def _sample(self, size: int) -> np.ndarray:
        """Some rows: by content where keys are known, so that what is derived from them does not depend on the order."""
        if self.keys is None or size >= self.n:
            rows = np.unique(np.linspace(0, self.n - 1, min(self.n, size)).astype(np.int64))
        else:
            rows = np.argpartition(self.draws, size)[:size]
        return rows if self.keys is None else rows[np.argsort(self.draws[rows], kind="stable")]

    def _use_shift(self, mean: np.ndarray) -> None:
        """Far from the origin float32 products lose their digits: they are taken of the rows less a common shift."""
        self.shift = mean
        multipliers, none, unused = np.zeros(self.d, np.uint64), np.empty(0, np.uint64), np.zeros(self.d)
        for span in self.spans():
            _survey(self.block(span) - mean, span.start, multipliers, self.norms, none, unused)

    def _refuse_bad_rows(self) -> None:
        bad = np.flatnonzero(~np.isfinite(self.norms))
        if bad.size:
            raise ValueError(
                f"{bad.size} of {self.n} rows hold NaN or infinity values (or numbers beyond 1e15), the first is row {bad[0]}; "
                "remove or repair them before clustering"
            )

    def key_of(self, rows: np.ndarray) -> np.ndarray:
        """(m,) uint64 content keys of some rows: equal rows have equal keys in any order and any float type."""
        if self.keys is not None:
            return self.keys[rows]
        keys = np.empty(rows.size, np.uint64)
        multipliers, norms, unused = key_multipliers(self.d), np.empty(rows.size, np.float32), np.zeros(self.d)
        for span in self.spans(rows.size):
            _survey(self.block(rows[span]), span.start, multipliers, norms, keys, unused)
        return keys


class ExactSums:
    """Sums of rows by cluster as integers, each column on its own power-of-two scale.

    A value is rounded once, to 2^-62 of n times the column's largest magnitude (for a million rows about 2^-42 of it);
    every sum and difference after that is exact.
    """

    def __init__(self, table: RowTable, k: int) -> None:
        self.table = table
        bound = np.maximum(table.largest, np.finfo(np.float64).tiny) * 2.0 * max(table.n, 1)
        self.scales = np.exp2(np.clip(SUM_BITS - np.ceil(np.log2(bound)), -1000, 1000))
        self.totals = np.zeros((k, table.d), np.int64)
        self.counts = np.zeros(k, np.int64)

    def update(self, before: np.ndarray | None, labels: np.ndarray) -> int:
        """Takes rows from their cluster in `before` (None: they come anew) to that in `labels`. Returns how many moved."""
        rows = np.arange(labels.size) if before is None else np.flatnonzero(before != labels)
        everything = rows.size == self.table.n
        for span in self.table.spans(rows.size):
            some = rows[span]
            old = np.full(some.size, -1, np.int32) if before is None else before[some]
            _move(self.table.block(span if everything else some), self.scales, old, labels[some], self.totals, self.counts)
        return rows.size

    @property
    def rounding(self) -> np.ndarray:
        """(d,) by how much a mean may be off: half a step of its column's scale, and a division."""
        return 0.5 / self.scales + np.finfo(np.float64).eps * self.table.largest

    def means(self) -> np.ndarray:
        """(k, d) float64 centres; raises ZeroDivisionError if a cluster is empty (callers ask for at least one row each)."""
        if (self.counts == 0).any():
            raise ZeroDivisionError(f"cluster {int(np.argmin(self.counts))} is empty and has no mean")
        return self.totals / self.counts[:, None] / self.scales


def _draws(keys: np.ndarray) -> np.ndarray:
    """(n,) uint64 lots to sample rows by, from content and count: the second of two equal rows has a lot of its own, so that
    a frequent row is sampled as often as its share asks for."""
    order = np.argsort(keys, kind="stable")
    ordered = keys[order]
    first = np.concatenate([[True], ordered[1:] != ordered[:-1]])
    place = np.arange(keys.size)
    again = (place - np.maximum.accumulate(np.where(first, place, 0))).astype(np.uint64)
    lots = np.empty_like(keys)
    lots[order] = ordered + again * np.uint64(0x9E3779B97F4A7C15)
    lots = (lots ^ (lots >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    lots = (lots ^ (lots >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return lots ^ (lots >> np.uint64(31))


def key_multipliers(d: int) -> np.ndarray:
    """(d,) odd uint64 multipliers of the content keys, the same in every process."""
    return np.random.default_rng(d).integers(0, 2**63, d, dtype=np.uint64) * np.uint64(2) + np.uint64(1)


def is_tensor(points: Any) -> bool:
    """Whether it comes from torch, without importing torch."""
    return type(points).__module__.split(".")[0] == "torch"


@compiled(fast=True)
def _survey(block, start, multipliers, norms, keys, largest):
    """Norms, rounded up; keys by multilinear hashing of the float64 bit patterns; largest magnitude of every column."""
    d = block.shape[1]
    wide = np.empty(d)
    words = wide.view(np.uint64)
    for i in range(block.shape[0]):
        total = 0.0
        for j in range(d):
            value = np.float64(block[i, j])
            wide[j] = value
            total += value * value
            largest[j] = max(largest[j], abs(value))
        fits = total <= LARGEST * LARGEST
        norms[start + i] = np.float32(np.sqrt(total) * (1 + 1e-6)) if fits else np.float32(np.inf)
        if keys.size:
            key = np.uint64(0)
            for j in range(d):
                word = words[j] if words[j] != NEGATIVE_ZERO else np.uint64(0)
                key += (word ^ (word >> np.uint64(32))) * multipliers[j]
            key = (key ^ (key >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
            key = (key ^ (key >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
            keys[start + i] = key ^ (key >> np.uint64(31))


@compiled
def _move(block, scales, before, labels, totals, counts):
    for i in range(block.shape[0]):
        a, b = before[i], labels[i]
        if a >= 0:
            counts[a] -= 1
            for j in range(block.shape[1]):
                totals[a, j] -= np.int64(np.rint(block[i, j] * scales[j]))
        counts[b] += 1
        for j in range(block.shape[1]):
            totals[b, j] += np.int64(np.rint(block[i, j] * scales[j]))
