"""One answer among equally good ones, chosen from what the rows contain and never from where they stand.

In goes an optimal assignment with its prices; out comes, in place, the optimal assignment that also minimises a second cost drawn
from the hash of (content of the row, cluster). Rows are only touched where a different optimal answer exists at all: where a
cycle of moves that cost nothing leads through them. Equal rows stay interchangeable: of those the earlier ones get the lower
labels.
"""

from __future__ import annotations

import numpy as np

from clusterft.assignment_kernels import balance

TIE = 1e-12
"""Reduced costs closer than this count as equal, relative to the largest of the costs and prices that are compared: a far row or
centre must not make near ones equal."""

BLOCK_ROWS = 4096
HASH_BITS = 36
"""Second costs are whole numbers below 2^36: sums along a path of 256 clusters stay exact in float64."""


def settle_ties(source, rows, costs, labels, counts, prices, low, high) -> None:
    """Replaces labels and counts of an optimal assignment by the canonical optimal one.

    rows (m,) which rows of the source they are; costs (m, k) float64; labels (m,) int64 at minimum cost under prices (k,)
    """
    tight = _tight(costs, labels, prices)
    several = np.flatnonzero(tight.sum(1) > 1)
    if not several.size:
        return
    tight, own = tight[several], labels[several]
    # prices are sums of cost differences: their rounding follows what rows usually cost, not what the farthest one does
    tie = TIE * float(np.abs(prices).max() + np.median(np.abs(costs[np.arange(len(costs)), labels])))
    reach = _reachable(tight, own, counts, prices, low, high, tie)
    together = reach[own] & reach[:, own].T
    tight &= together
    tight[np.arange(several.size), own] = True
    loose = tight.sum(1) > 1
    if not loose.any():
        return
    several, tight, own = several[loose], tight[loose], own[loose]
    keys = source.keys(rows[several])
    order = np.lexsort((rows[several], keys))
    several, tight, own, keys = several[order], tight[order], own[order], keys[order]
    chosen = _second_best_costs(keys, tight, own, counts, prices, low, high, tie)
    groups = np.unique(keys, return_inverse=True)[1]
    chosen = chosen[np.lexsort((chosen, groups))]
    counts += np.bincount(chosen, minlength=counts.size) - np.bincount(own, minlength=counts.size)
    labels[several] = chosen


def _tight(costs, labels, prices) -> np.ndarray:
    """(m, k) bool: clusters that cost a row no more than its own. A block at a time: m k float64 are a good share of the memory."""
    tight = np.empty(costs.shape, bool)
    for start in range(0, len(costs), BLOCK_ROWS):
        own = labels[start : start + BLOCK_ROWS]
        block, each = costs[start : start + BLOCK_ROWS], np.arange(own.size)
        reduced = block + prices
        reduced -= reduced[each, own][:, None]
        scale = np.maximum(np.abs(block), np.abs(prices))
        scale = np.maximum(scale, scale[each, own][:, None])
        tight[start : start + BLOCK_ROWS] = reduced <= TIE * scale
    tight[np.arange(len(costs)), labels] = True
    return tight


def _reachable(tight, own, counts, prices, low, high, tie) -> np.ndarray:
    """(k, k) bool: which clusters can pass a row on to which at no cost, directly or through others or the sink."""
    k = counts.size
    step = np.eye(k + 1, dtype=bool)
    row, column = np.nonzero(tight)
    step[own[row], column] = True
    step[:k, k] = (counts < high) & (prices >= -tie)
    step[k, :k] = (counts > low) & (prices <= tie)
    for _ in range(int(np.ceil(np.log2(k + 1))) + 1):
        step = (step.astype(np.float32) @ step.astype(np.float32)) > 0
    return step[:k, :k]


def _second_best_costs(keys, tight, own, counts, prices, low, high, tie) -> np.ndarray:
    """Labels (m,) of least second cost under the same optimal sizes."""
    k = counts.size
    second = np.where(tight, _hashes(keys, k), np.inf)
    fixed = counts - np.bincount(own, minlength=k)
    open_size = np.abs(prices) <= tie
    least = np.where(open_size, np.maximum(low - fixed, 0), counts - fixed)
    most = np.where(open_size, high - fixed, counts - fixed)
    labels = second.argmin(1)
    sizes = np.bincount(labels, minlength=k).astype(np.int64)
    paths = balance(second, labels, sizes, np.zeros(k + 1), np.clip(sizes, least, most), least, most)
    if paths < 0:
        raise RuntimeError("the balancing step found no way through ties although one is known")
    return labels


def _hashes(keys: np.ndarray, k: int) -> np.ndarray:
    """(m, k) whole numbers below 2^36 as float64, from SplitMix64 of row key and cluster."""
    mixed = keys[:, None] + (np.arange(1, k + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15))[None, :]
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return ((mixed ^ (mixed >> np.uint64(31))) >> np.uint64(64 - HASH_BITS)).astype(np.float64)
