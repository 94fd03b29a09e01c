"""Slow twins and made-up data for the clustering tests: a brute force, a min-cost flow, a K-means step written the long way."""

from __future__ import annotations

import itertools

import numpy as np
from ortools.graph.python import min_cost_flow


def brute_force(costs: np.ndarray, low: np.ndarray, high: np.ndarray) -> float:
    """Least sum over every labelling whatsoever that keeps the limits."""
    n, k = costs.shape
    best = np.inf
    for labels in itertools.product(range(k), repeat=n):
        sizes = np.bincount(labels, minlength=k)
        if (sizes >= low).all() and (sizes <= high).all():
            best = min(best, costs[np.arange(n), list(labels)].sum())
    return float(best)


def flow_optimum(costs: np.ndarray, low: np.ndarray, high: np.ndarray) -> int:
    """Least sum of whole-number costs (n, k), by OR-Tools' min-cost flow."""
    n, k = costs.shape
    solver = min_cost_flow.SimpleMinCostFlow()
    rows, clusters = np.repeat(np.arange(n), k), np.tile(np.arange(k), n) + n
    solver.add_arcs_with_capacity_and_unit_cost(rows, clusters, np.ones(n * k, int), costs.ravel())
    bonus = 2 * (int(np.abs(costs).sum()) + 1)  # makes the lower limits worth filling first
    for c in range(k):
        solver.add_arc_with_capacity_and_unit_cost(n + c, n + k, int(low[c]), -bonus)
        solver.add_arc_with_capacity_and_unit_cost(n + c, n + k, int(min(high[c], n) - low[c]), 0)
    for row in range(n):
        solver.set_node_supply(row, 1)
    solver.set_node_supply(n + k, -n)
    assert solver.solve() == solver.OPTIMAL
    return solver.optimal_cost() + bonus * int(low.sum())


def dual_value(costs: np.ndarray, prices: np.ndarray, low: np.ndarray, high: np.ndarray) -> float:
    """A lower bound of every feasible sum, whatever the prices: equality proves the optimum."""
    bound = np.minimum(high, len(costs))
    return float((costs + prices).min(1).sum() - np.where(prices > 0, prices * bound, prices * low).sum())


def squared_distances(points: np.ndarray, centers: np.ndarray) -> np.ndarray:
    return ((np.asarray(points, np.float64)[:, None] - np.asarray(centers, np.float64)[None]) ** 2).sum(2)


def unit_mixture(n: int, d: int, k: int, seed: int = 0, noise: float = 2.0) -> np.ndarray:
    """(n, d) float32 rows of unit length around k directions, the first ones far more frequent."""
    rng = np.random.default_rng(seed)
    weights = 1 / np.arange(1, k + 1)
    centers = rng.normal(size=(k, d))
    points = centers[rng.choice(k, n, p=weights / weights.sum())] + noise * rng.normal(size=(n, d))
    return (points / np.linalg.norm(points, axis=1, keepdims=True)).astype(np.float32)


def random_instance(rng: np.random.Generator, most_rows: int = 40):
    """Whole-number costs with ties and equal rows, limits that often bind everywhere: (costs, low, high)."""
    n = int(rng.integers(1, most_rows))
    k = int(rng.choice([1, n, rng.integers(1, min(n, 8) + 1)])) if rng.random() < 0.3 else int(rng.integers(1, min(n, 8) + 1))
    costs = rng.integers(0, int(rng.choice([1, 3, 20, 10_000])) + 1, (n, k))
    if rng.random() < 0.3:
        costs = costs[rng.integers(0, max(1, n // 4), n)]
    kind = rng.integers(4)
    share = -(-n // k)
    if kind == 0:
        return costs, np.zeros(k, np.int64), np.full(k, share)
    if kind == 1:
        return costs, np.full(k, n // k), np.full(k, share)
    if kind == 2:
        return costs, np.full(k, int(rng.integers(0, n // k + 1))), np.full(k, int(rng.integers(share, n + 3)))
    sizes = rng.multinomial(n, np.ones(k) / k)
    return costs, np.maximum(sizes - rng.integers(0, 3, k), 0), sizes + rng.integers(0, 3, k)
