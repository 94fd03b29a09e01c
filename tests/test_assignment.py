"""The exact assignment against hand-made cases, brute force, min-cost flow and its own dual certificate."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from clustering_kit import (
    brute_force,
    dual_value,
    flow_optimum,
    random_instance,
    squared_distances,
    unit_mixture,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from threadpoolctl import threadpool_limits

from clusterft.assignment import assign, assign_points, solve
from clusterft.cost_sources import DenseCosts, PointCosts, largest_falls
from clusterft.rows import RowTable


def total(costs: np.ndarray, labels: np.ndarray) -> float:
    return costs[np.arange(len(costs)), labels].sum()


def check_optimal(costs: np.ndarray, low: np.ndarray, high: np.ndarray) -> np.ndarray:
    """Sizes within the limits, sum equal to min-cost flow's, dual certificate closed."""
    found = solve(DenseCosts(costs), high, low)
    sizes = np.bincount(found.labels, minlength=costs.shape[1])
    assert (sizes >= low).all() and (sizes <= high).all()
    assert total(costs, found.labels) == flow_optimum(costs, low, high)
    assert dual_value(costs, found.prices, low, high) == pytest.approx(total(costs, found.labels), rel=1e-9, abs=1e-9)
    return found.labels


def test_three_rows_by_hand():
    # all prefer cluster 0; the one that loses least by leaving it (1.5 - 1 = 0.5) must go
    costs = np.array([[0.0, 5.0], [1.0, 1.5], [2.0, 4.0]])
    assert assign(costs, 2).tolist() == [0, 1, 0]
    assert assign(costs, 3).tolist() == [0, 0, 0]
    assert assign(costs, 3, min_size=1).tolist() == [0, 1, 0]
    assert assign(costs, np.array([1, 2])).tolist() == [0, 1, 1]
    assert assign(costs, None, min_size=np.array([0, 2])).tolist() == [0, 1, 1]


def test_a_chain_of_moves_by_hand():
    # row 0 can only be placed by pushing row 1 from cluster 1 to 2: 0 + 1 + 0 + 0
    costs = np.array([[9.0, 0.0, 9.0], [9.0, 0.0, 1.0], [0.0, 9.0, 9.0]])
    assert assign(costs, 1).tolist() == [1, 2, 0]


def test_line_of_case_09_in_thirds():
    points = np.arange(10.0)[:, None]
    labels = assign_points(points, np.array([[1.0], [4.0], [7.9]]), 4, 3)
    assert labels.tolist() == [0, 0, 0, 1, 1, 1, 2, 2, 2, 2]


def test_against_min_cost_flow_in_a_plain_loop():
    rng = np.random.default_rng(7)
    for _ in range(1500):
        check_optimal(*random_instance(rng))


@pytest.mark.slow
def test_against_min_cost_flow_on_thousands_more():
    rng = np.random.default_rng(8)
    for _ in range(5000):
        check_optimal(*random_instance(rng, most_rows=90))


@given(st.integers(0, 2**32 - 1))
@settings(max_examples=300, deadline=None)
def test_against_min_cost_flow_by_seed(seed):
    check_optimal(*random_instance(np.random.default_rng(seed)))


@st.composite
def small_problems(draw):
    n, k = draw(st.integers(1, 6)), draw(st.integers(1, 3))
    costs = np.array(draw(st.lists(st.lists(st.integers(-3, 6), min_size=k, max_size=k), min_size=n, max_size=n)))
    sizes = np.bincount(draw(st.lists(st.integers(0, k - 1), min_size=n, max_size=n)), minlength=k)
    slack = [np.array(draw(st.lists(st.integers(0, 2), min_size=k, max_size=k))) for _ in range(2)]
    return costs, np.maximum(sizes - slack[0], 0), sizes + slack[1]


@given(small_problems())
@settings(max_examples=300, deadline=None)
def test_against_brute_force(problem):
    costs, low, high = problem
    assert total(costs, check_optimal(costs, low, high)) == brute_force(costs, low, high)


@given(st.integers(0, 2**32 - 1))
@settings(max_examples=200, deadline=None)
def test_row_order_does_not_matter_even_with_ties(seed):
    rng = np.random.default_rng(seed)
    costs, low, high = random_instance(rng)
    order = rng.permutation(len(costs))
    before, after = assign(costs, high, low), assign(costs[order], high, low)
    content = [tuple(row) for row in costs.tolist()]
    if len(set(content)) == len(content):
        assert (before[order] == after).all()
    # equal rows are interchangeable, so what is fixed is how many of each content go where
    assert sorted(zip(content, before, strict=True)) == sorted(zip([content[i] for i in order], after, strict=True))


def test_ties_are_broken_by_content_not_by_warm_start():
    rng = np.random.default_rng(3)
    costs = rng.integers(0, 3, (60, 4)).astype(np.float64)
    expected = solve(DenseCosts(costs), 15).labels
    for _ in range(30):
        assert (solve(DenseCosts(costs), 15, prices=rng.normal(size=4) * rng.choice([0.0, 0.1, 10.0])).labels == expected).all()


def test_equal_rows_get_their_labels_in_order():
    assert assign(np.zeros((6, 3)), 2).tolist() == [0, 0, 1, 1, 2, 2]


@pytest.mark.parametrize("values", [1, 2, 30])
def test_masses_of_equal_rows_stay_quick_and_exact(values):
    rng = np.random.default_rng(values)
    costs = rng.integers(0, 50, (values, 8))[rng.integers(0, values, 20_000)]
    found = solve(DenseCosts(costs), 2500)
    assert np.bincount(found.labels).tolist() == [2500] * 8
    assert dual_value(costs, found.prices, np.zeros(8), np.full(8, 2500)) == pytest.approx(total(costs, found.labels), rel=1e-9)
    assert found.paths < 5000


@pytest.mark.parametrize(
    ("n", "d", "k", "alpha"), [(3000, 16, 4, 1.0), (5000, 40, 16, 1.5), (9000, 8, 32, 1.1), (2000, 200, 8, 1.0)]
)
def test_points_are_certified_by_the_dual(n, d, k, alpha):
    points = unit_mixture(n, d, k)
    centers = points[np.random.default_rng(1).choice(n, k, replace=False)]
    capacity = int(np.ceil(alpha * n / k))
    found = solve(PointCosts(RowTable(points), centers), capacity, n // (3 * k))
    costs = squared_distances(points, centers)
    primal = total(costs, found.labels)
    assert dual_value(costs, found.prices, np.full(k, n // (3 * k)), np.full(k, capacity)) == pytest.approx(primal, rel=1e-11)
    assert (assign(costs, capacity, n // (3 * k)) == found.labels).all()


def test_far_from_the_origin_float32_products_do_not_decide():
    points = (unit_mixture(4000, 12, 6) + 1000).astype(np.float32)
    centers = points[:6].astype(np.float64)
    costs = squared_distances(points, centers)
    labels = assign_points(points, centers, 800)
    assert total(costs, labels) == pytest.approx(total(costs, assign(costs, 800)), rel=1e-12)
    assert (assign_points(points, centers, None) == costs.argmin(1)).all()


def test_chunks_dtypes_memory_maps_and_tensors_agree(tmp_path):
    half = unit_mixture(3000, 24, 5).astype(np.float16)
    path = tmp_path / "half.npy"
    np.save(path, half)
    centers = half[:5].astype(np.float64)
    expected = assign(squared_distances(half, centers), 700, 100)
    forms = [half, half.astype(np.float32), half.astype(np.float64), np.load(path, mmap_mode="r"), torch.from_numpy(half)]
    for form in [*forms, torch.from_numpy(half).double()]:
        for chunk_rows in (None, 97):
            assert (assign_points(form, centers, 700, 100, chunk_rows=chunk_rows) == expected).all()
    assert (assign_points(torch.from_numpy(half), torch.from_numpy(centers), 700, 100) == expected).all()
    assert (assign(torch.from_numpy(squared_distances(half, centers)), 700, 100) == expected).all()


def test_threads_do_not_matter():
    points = unit_mixture(20_000, 64, 8)
    with threadpool_limits(1):
        one = assign_points(points, points[:8], 2500)
    with threadpool_limits(2):
        assert (assign_points(points, points[:8], 2500) == one).all()


def test_a_known_scan_changes_nothing_but_the_work():
    points = unit_mixture(20_000, 16, 8)
    table = RowTable(points).survey()
    before = points[:8].astype(np.float64)
    first = solve(PointCosts(table, before), 2600)
    after = before + 0.01 * np.random.default_rng(0).normal(size=before.shape)
    source = PointCosts(table, after)
    gaps = source.carried(before, first.labels, first.gaps)
    costs = squared_distances(points, after) + first.prices
    own = costs[np.arange(len(costs)), first.labels]
    costs[np.arange(len(costs)), first.labels] = np.inf
    assert (gaps <= costs.min(1) - own + 1e-9).all(), "a carried margin must never be too large"
    warm = solve(source, 2600, prices=first.prices, known=(first.labels.copy(), first.seconds, gaps))
    assert (warm.labels == solve(source, 2600).labels).all()


def test_margins_of_the_result_are_true_or_too_small():
    points = unit_mixture(5000, 16, 6)
    found = solve(PointCosts(RowTable(points), points[:6]), 900)
    costs = squared_distances(points, points[:6]) + found.prices
    own = costs[np.arange(5000), found.labels].copy()
    costs[np.arange(5000), found.labels] = np.inf
    assert (found.gaps <= costs.min(1) - own + 1e-12).all()


def test_bad_values_are_named():
    costs = np.zeros((5, 2))
    costs[[2, 4], [0, 1]] = np.nan, np.inf
    with pytest.raises(ValueError, match=r"2 of 5 rows .* first is row 2"):
        assign(costs, 5)
    with pytest.raises(ValueError, match=r"2 of 5 rows hold NaN or infinity.* first is row 2"):
        assign_points(costs, np.zeros((1, 2)), 5)
    with pytest.raises(ValueError, match="1 centers hold NaN"):
        assign_points(np.zeros((5, 2)), np.array([[0.0, np.nan]]), 5)
    with pytest.raises(ValueError, match=r"centers must be \(k, 2\)"):
        assign_points(np.zeros((5, 2)), np.zeros((1, 3)), 5)


@pytest.mark.parametrize(
    ("limits", "message"),
    [
        ((1, 0), "2 x 1 = 2 < 5"),
        ((5, 3), "2 x 3 = 6 > 5"),
        ((np.array([1, 3]), 0), r"1 \+ 3 = 4 < 5"),
        ((np.array([1, 9]), np.array([2, 0])), "min 2 > max 1 in cluster 0"),
        ((-1, 0), "capacity|max_size"),
        ((2.5, 0), "whole numbers"),
        ((np.array([3, 3, 3]), 0), r"one a cluster \(2\)"),
    ],
)
def test_limits_that_cannot_be_met_show_the_arithmetic(limits, message):
    with pytest.raises(ValueError, match=message):
        assign(np.zeros((5, 2)), *limits)


def test_no_rows_and_one_cluster():
    assert assign(np.zeros((0, 3)), 1).shape == (0,)
    assert assign(np.random.default_rng(0).normal(size=(4, 1)), 4).tolist() == [0, 0, 0, 0]


@pytest.mark.parametrize("k", [2, 3, 17])
def test_margins_carried_over_moved_centers_are_never_too_large(k):
    """Rows of all lengths, zero among them: what is left of a margin after the centres moved is at most the margin scanned anew."""
    rng = np.random.default_rng(k)
    points = (rng.normal(size=(3000, 5)) * rng.uniform(0, 4, size=(3000, 1))).astype(np.float32)
    points[0] = 0
    centers, prices = rng.normal(size=(k, 5)), rng.uniform(0, 0.2, k)
    table = RowTable(points).survey()
    labels, _, gaps = PointCosts(table, centers).scan(prices)
    for size in (0.0, 1e-3, 0.3):
        moved = centers + size * rng.normal(size=centers.shape)
        left = PointCosts(table, moved).carried(centers, labels, gaps)
        costs = squared_distances(points.astype(np.float64), moved) + prices
        own = costs[np.arange(len(points)), labels]
        costs[np.arange(len(points)), labels] = np.inf
        assert (left <= costs.min(1) - own + 1e-12).all()
        assert size or np.abs(left - gaps).max() < 1e-4


def test_largest_falls_by_hand():
    """Costs of three clusters change by 1, 5 and 2, or by 2 |x| (0.5, 0, 1) less or more."""
    falls = largest_falls(np.array([1.0, 5.0, 2.0]), np.array([0.5, 0.0, 1.0]), np.array([0.0, 3.0]))
    # |x| = 3: rivals change by at least 1 - 3, 5, 2 - 6; the own cluster by at most 1 + 3, 5, 2 + 6
    assert falls.tolist() == [[2.0 - 1.0, -4.0 - 4.0], [1.0 - 5.0, -4.0 - 5.0], [1.0 - 2.0, -2.0 - 8.0]]


@pytest.mark.parametrize("far", [1e5, 1e7, 1e10])
def test_a_far_row_or_centre_does_not_make_near_ones_equal(far: float) -> None:
    """Ties are relative to what is compared: 1e-12 of the largest cost of all was more than near rows cost altogether."""
    assert assign(np.array([[0.0, 1.0, far**2], [1.0, 0.0, far**2]]), None).tolist() == [0, 1]
    near = np.random.default_rng(0).random((200, 1))
    for points, centers in ((near, [[0.0], [1.0], [far]]), (np.append(near, [[far]], 0), [[0.0], [1.0]])):
        costs = squared_distances(points, np.array(centers))
        assert assign_points(points, np.array(centers), None).tolist() == costs.argmin(1).tolist()
        half = [100, 100, 1] if len(centers) == 3 else [100, 101]
        labels = assign_points(points, np.array(centers), half)
        order = np.argsort(costs[:200, 0] - costs[:200, 1], kind="stable")
        expected = np.ones(200, int)
        expected[order[:100]] = 0
        assert labels[:200].tolist() == expected.tolist()


def test_heavy_tailed_rows_close_the_duality_gap() -> None:
    rng = np.random.default_rng(5)
    points = rng.pareto(1.2, (3000, 4)).astype(np.float32)
    centers = points[rng.choice(3000, 20, replace=False)].astype(np.float64)
    found = solve(PointCosts(RowTable(points), centers), 200)
    costs = squared_distances(points, centers)
    paid = costs[np.arange(3000), found.labels].sum()
    bound = (costs + found.prices).min(1).sum() - 200 * found.prices.clip(min=0).sum()
    assert paid - bound <= 1e-11 * paid


def test_a_surrounding_autocast_does_not_reach_the_products() -> None:
    points = unit_mixture(3000, 256, 8)
    centers, tensor = points[:8].astype(np.float64), torch.from_numpy(points)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        labels = assign_points(tensor, centers, None)
    assert labels.tolist() == squared_distances(points, centers).argmin(1).tolist()
