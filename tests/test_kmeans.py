"""Capacity-constrained K-means: golden values, case 09, a slow twin, and sameness over row orders, threads and input forms."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from clustering_kit import flow_optimum, squared_distances, unit_mixture
from sklearn.cluster import KMeans
from sklearn.exceptions import ConvergenceWarning, NotFittedError
from sklearn.utils.estimator_checks import check_estimator
from threadpoolctl import threadpool_limits

import clusterft
from clusterft.assignment import assign_points
from clusterft.kmeans import CapacityKMeans, check_feasible, effective_clusters
from clusterft.limits import default_capacity
from clusterft.lloyd import lloyd
from clusterft.released import (
    greedy_assign,
    greedy_assign_distances,
    pairwise_sq_distances,
    plain_kmeans,
    released_clustering,
)
from clusterft.rows import ExactSums, RowTable

GOLDEN = Path(__file__).parent / "golden"
CASE_09 = GOLDEN / "cases" / "09-fewer-samples-than-clusters"
REQUESTS = json.loads((CASE_09 / "requests.json").read_text())
EXPECTED_09 = json.loads((CASE_09 / "expected.json").read_text())


def golden(name: str):
    return np.load(GOLDEN / f"{name}.npz"), json.loads((GOLDEN / f"{name}.json").read_text())


def sum_of_squares(points: np.ndarray, labels: np.ndarray) -> float:
    """To the means of the labels, written the long way."""
    return sum(float(((points[labels == c] - points[labels == c].mean(0)) ** 2).sum()) for c in np.unique(labels))


NAMES = ("balanced_k4", "longtail_k4", "longtail_k8")


@pytest.mark.parametrize("name", NAMES)
def test_released_procedure_step_by_step(name):
    arrays, facts = golden(name)
    points, k = arrays["embeddings"], facts["K"]
    plain = plain_kmeans(points, k, random_state=42)
    assert (plain.labels_ == arrays["labels_unconstrained"]).all()
    np.testing.assert_allclose(plain.cluster_centers_, arrays["centers"], atol=1e-5)
    capacity = default_capacity(len(points), k, 1.5)
    assert capacity == (facts["cap"] or capacity)
    greedy = greedy_assign(points, arrays["centers"], capacity)
    assert (greedy == arrays["labels"]).all()
    distances = pairwise_sq_distances(points, arrays["centers"])
    np.testing.assert_allclose(distances[np.arange(len(points)), greedy], arrays["sq_distance"], atol=1e-5)
    whole = released_clustering(points, k, random_state=42)
    assert (whole.labels == arrays["labels"]).all()
    assert whole.capped == facts["capped"]


@pytest.mark.parametrize("name", NAMES)
def test_released_solver_gives_the_golden_labels(name):
    arrays, facts = golden(name)
    model = CapacityKMeans(facts["K"], solver="released", random_state=42).fit(arrays["embeddings"])
    assert (model.labels_ == arrays["labels"]).all()
    assert np.bincount(model.labels_).tolist() == facts["cluster_sizes"]
    assert model.inertia_ == pytest.approx(float(arrays["sq_distance"].sum()), rel=1e-5)


@pytest.mark.parametrize("name", NAMES)
def test_exact_is_never_above_greedy_at_the_same_centres(name):
    arrays, facts = golden(name)
    points, centers = arrays["embeddings"], arrays["centers"]
    distances = squared_distances(points, centers)
    exact = assign_points(points, centers, default_capacity(len(points), facts["K"], 1.5))
    assert distances[np.arange(len(points)), exact].sum() <= distances[np.arange(len(points)), arrays["labels"]].sum() + 1e-9


@pytest.mark.parametrize("name", NAMES)
def test_moving_the_centres_under_the_cap_beats_both_peers(name):
    arrays, facts = golden(name)
    points, k = arrays["embeddings"], facts["K"]
    ours = CapacityKMeans(k, random_state=0).fit(points)
    slow = CapacityKMeans(k, random_state=0, n_init=3, solver="min_cost_flow").fit(points)
    assert ours.inertia_ <= slow.inertia_ * 1.001
    assert ours.inertia_ <= sum_of_squares(points.astype(np.float64), arrays["labels"]) + 1e-6
    assert np.bincount(slow.labels_).max() <= default_capacity(len(points), k, 1.5)


def test_greedy_by_hand():
    # pairs by distance: (0,a) 0, (1,a) 1, (2,a) 2, (1,b) 3, (2,b) 4; room for one in a, two in b
    assert greedy_assign_distances(np.array([[0.0, 9.0], [1.0, 3.0], [2.0, 4.0]]), 2).tolist() == [0, 0, 1]
    # greedy is not optimal: it lets row 0 take a (1 + 10), exact pays 2 + 1
    costs = np.array([[1.0, 2.0], [1.5, 10.0]])
    assert greedy_assign_distances(costs, 1).tolist() == [0, 1]


@pytest.mark.parametrize("request_", REQUESTS, ids=lambda r: str(r["id"]))
def test_case_09_is_decided_before_any_work(request_):
    wanted = EXPECTED_09["per_request"][request_["id"]]
    points = np.load(CASE_09 / request_["file"])
    limits = {"size_min": request_["size_min"], "size_max": request_["size_max"]}
    if wanted["feasible"]:
        check_feasible(len(points), request_["k"], limits["size_min"], limits["size_max"])
        model = CapacityKMeans(request_["k"], capacity_factor=None, random_state=0, **limits).fit(points)
        sizes = np.bincount(model.labels_)
        assert sizes.min() >= (limits["size_min"] or 0) and sizes.max() <= (limits["size_max"] or len(points))
        return
    with pytest.raises(ValueError) as caught:
        check_feasible(len(points), request_["k"], limits["size_min"], limits["size_max"])
    for reason in wanted["why"]:
        assert reason in str(caught.value)
    with pytest.raises(ValueError):
        CapacityKMeans(request_["k"], capacity_factor=None, **limits).fit(points)


def test_case_09_sizes_and_sums():
    points = np.load(CASE_09 / "points_10x1.npy")
    four = CapacityKMeans(3, size_min=3, size_max=4, random_state=0).fit(points)
    assert sorted(np.bincount(four.labels_)) == EXPECTED_09["request_4"]["sizes_sorted"]
    assert four.inertia_ == EXPECTED_09["request_4"]["optimal_inertia"]
    five = CapacityKMeans(2, size_min=5, size_max=5, random_state=0).fit(points)
    assert np.bincount(five.labels_).tolist() == EXPECTED_09["request_5"]["sizes"]
    assert five.inertia_ == EXPECTED_09["request_5"]["optimal_inertia"]
    assert np.bincount(CapacityKMeans(1, size_min=1, size_max=50).fit(points).labels_).tolist() == [10]


def test_case_09_more_clusters_than_rows_are_lowered_with_a_message(caplog):
    assert effective_clusters(3, 8) == EXPECTED_09["auto_policy"]["effective_k"]
    assert all(part in caplog.text for part in EXPECTED_09["auto_policy"]["message_has"])
    caplog.clear()
    assert effective_clusters(8, 3) == 3 and not caplog.text


def test_feasibility_needs_no_model_library():
    code = "import sys; from clusterft.limits import check_feasible; check_feasible(10, 3); print('torch' in sys.modules)"
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert answer.stdout.strip() == "False"


@pytest.mark.parametrize(
    ("n", "k", "factor", "wanted"), [(10, 1, 1.1, 10), (100, 10, 1.1, 11), (600, 4, 1.5, 225), (7, 2, 1.0, 4), (5, 2, None, 5)]
)
def test_default_capacity_survives_binary_fractions(n, k, factor, wanted):
    assert default_capacity(n, k, factor) == wanted


def slow_lloyd(points: np.ndarray, centers: np.ndarray, high: int, steps: int) -> np.ndarray:
    """K-means with min-cost flow on distances in units of 1e-9."""
    k = len(centers)
    for _ in range(steps):
        costs = np.rint(squared_distances(points, centers) * 1e9).astype(np.int64)
        labels = assign_points(points, centers, high, 1)
        assert costs[np.arange(len(points)), labels].sum() <= flow_optimum(costs, np.ones(k, np.int64), np.full(k, high)) + len(
            points
        )
        centers = np.stack([points[labels == c].astype(np.float64).mean(0) for c in range(k)])
    return centers


def test_lloyd_equals_the_slow_twin():
    points = unit_mixture(400, 6, 5)
    low, high = np.ones(5, np.int64), np.full(5, 100)
    for steps in (1, 3, 6):
        found = lloyd(RowTable(points).survey(), points[:5].astype(np.float64), low, high, max_iter=steps, tolerance=0)
        if found.n_iter == steps:
            np.testing.assert_allclose(found.centers, slow_lloyd(points, points[:5], 100, steps), rtol=1e-9, atol=1e-9)
        assert found.inertia == pytest.approx(sum_of_squares(points.astype(np.float64), found.labels), rel=1e-9)


def test_carried_margins_do_not_change_the_course(monkeypatch):
    points = unit_mixture(6000, 32, 8)
    table, limits = RowTable(points).survey(), (np.ones(8, np.int64), np.full(8, 1000))
    plain = lloyd(table, points[:8].astype(np.float64), *limits, max_iter=40, tolerance=0)
    monkeypatch.setattr("clusterft.lloyd.CARRY_FROM", 0)
    carried = lloyd(table, points[:8].astype(np.float64), *limits, max_iter=40, tolerance=0)
    assert plain.n_iter == carried.n_iter and plain.inertia == carried.inertia
    assert (plain.labels == carried.labels).all()


def test_without_a_cap_it_is_plain_kmeans():
    points = unit_mixture(3000, 16, 4, noise=0.3)
    ours = CapacityKMeans(4, capacity_factor=None, random_state=0, tol=0).fit(points)
    theirs = KMeans(4, n_init=10, random_state=0, tol=0).fit(points.astype(np.float64))
    assert ours.inertia_ == pytest.approx(theirs.inertia_, rel=1e-6)


@pytest.mark.parametrize(("n", "d", "k"), [(3000, 12, 6), (7000, 150, 5)])
def test_same_labels_for_any_row_order(n, d, k):
    points = unit_mixture(n, d, k)
    order = np.random.default_rng(5).permutation(n)
    first = CapacityKMeans(k, random_state=3, capacity_factor=1.2).fit(points)
    second = CapacityKMeans(k, random_state=3, capacity_factor=1.2).fit(points[order])
    assert (first.labels_[order] == second.labels_).all()
    assert (first.cluster_centers_ == second.cluster_centers_).all()
    assert first.inertia_ == second.inertia_


def test_row_order_with_equal_rows_lattices_and_zero_vectors():
    rng = np.random.default_rng(9)
    points = np.concatenate([rng.integers(0, 3, (500, 2)), np.zeros((200, 2), int)]).astype(np.float32)
    names = np.array([f"id{i:04}" for i in rng.permutation(len(points))])
    order = rng.permutation(len(points))
    first = CapacityKMeans(5, random_state=1, capacity_factor=1.0).fit(points, row_ids=names)
    second = CapacityKMeans(5, random_state=1, capacity_factor=1.0).fit(points[order], row_ids=names[order])
    assert (first.labels_[order] == second.labels_).all(), "with ids even equal rows keep their labels"
    assert np.bincount(first.labels_).tolist() == [140] * 5
    without = CapacityKMeans(5, random_state=1, capacity_factor=1.0).fit(points[order])
    contents = [tuple(p) for p in points.tolist()]
    assert sorted(zip(contents, first.labels_, strict=True)) == sorted(
        zip([contents[i] for i in order], without.labels_, strict=True)
    )
    with pytest.raises(ValueError, match="row_ids must name the 700 rows"):
        CapacityKMeans(5).fit(points, row_ids=names[:-1])


def test_same_labels_for_any_number_of_threads():
    points = unit_mixture(9000, 256, 8)
    with threadpool_limits(1):
        one = CapacityKMeans(8, random_state=0, n_init=3).fit(points).labels_
    with threadpool_limits(2):
        assert (CapacityKMeans(8, random_state=0, n_init=3).fit(points).labels_ == one).all()


def test_same_labels_from_memory_maps_tensors_and_chunks(tmp_path):
    half = unit_mixture(6000, 32, 6).astype(np.float16)
    np.save(tmp_path / "half.npy", half)
    expected = CapacityKMeans(6, random_state=0).fit(half)
    mapped = np.load(tmp_path / "half.npy", mmap_mode="r")
    for form in (mapped, half.astype(np.float32), half.astype(np.float64), torch.from_numpy(half)):
        model = CapacityKMeans(6, random_state=0, chunk_rows=1000).fit(form)
        assert (model.labels_ == expected.labels_).all() and model.inertia_ == expected.inertia_
    assert (
        CapacityKMeans(6, random_state=0).fit(torch.from_numpy(half)).predict(torch.from_numpy(half)) == expected.predict(half)
    ).all()


def test_centres_are_means_sizes_fall_and_limits_hold():
    points = unit_mixture(2000, 10, 5)
    model = CapacityKMeans(5, random_state=0, size_min=300, size_max=500).fit(points)
    sizes = np.bincount(model.labels_)
    assert sizes.min() >= 300 and sizes.max() <= 500 and (np.diff(sizes) <= 0).all()
    for c in range(5):
        np.testing.assert_allclose(model.cluster_centers_[c], points[model.labels_ == c].astype(np.float64).mean(0), atol=1e-12)
    assert model.inertia_ == pytest.approx(sum_of_squares(points.astype(np.float64), model.labels_), rel=1e-12)


def test_limits_of_their_own_keep_the_clusters_numbers():
    limits = np.array([100, 300, 600])
    model = CapacityKMeans(3, random_state=0, size_min=limits, size_max=limits).fit(unit_mixture(1000, 4, 3))
    assert np.bincount(model.labels_).tolist() == limits.tolist()


def test_predict_takes_the_nearest_centre():
    points = unit_mixture(1500, 10, 4)
    model = CapacityKMeans(4, random_state=0).fit(points)
    assert (model.predict(points) == squared_distances(points, model.cluster_centers_).argmin(1)).all()
    with pytest.raises(NotFittedError):
        CapacityKMeans(4).predict(points)


def test_fewer_distinct_rows_than_clusters_are_reported_and_divided():
    points = np.repeat(np.array([[0.0], [1.0], [5.0]]), 4, axis=0)
    with pytest.warns(ConvergenceWarning, match="3 distinct values, fewer than the 5 clusters"):
        model = CapacityKMeans(5, random_state=0).fit(points)
    sizes = np.bincount(model.labels_, minlength=5)
    assert sizes.min() >= 1 and sizes.max() <= 4
    assert model.inertia_ == 0


def test_empty_clusters_are_filled_on_the_sample_and_on_all_rows():
    points = np.repeat(np.arange(5.0), [9000, 500, 300, 200, 100])[:, None]
    with pytest.warns(ConvergenceWarning, match="5 distinct values"):
        model = CapacityKMeans(8, capacity_factor=None, random_state=0).fit(points)
    assert np.bincount(model.labels_, minlength=8).min() >= 1
    assert model.inertia_ < 1e-9
    tight = CapacityKMeans(8, random_state=0, size_min=np.array([1, 1, 1, 1, 1, 1, 1, 10093]), size_max=10093).fit(points)
    assert np.bincount(tight.labels_).tolist() == [1] * 7 + [10093]


@pytest.mark.parametrize("k", [1, 7])
def test_one_cluster_and_as_many_as_rows(k):
    points = np.random.default_rng(0).normal(size=(7, 3))
    model = CapacityKMeans(k, random_state=0).fit(points)
    assert np.bincount(model.labels_).tolist() == ([7] if k == 1 else [1] * 7)


@pytest.mark.parametrize("solver", ["exact", "released", "min_cost_flow"])
def test_rows_that_are_not_finite_are_named(solver):
    points = unit_mixture(50, 3, 2)
    points[[7, 9], 1] = np.nan, np.inf
    with pytest.raises(ValueError, match=r"2 of 50 rows hold NaN or infinity values.* the first is row 7"):
        CapacityKMeans(2, solver=solver).fit(points)
    with pytest.raises(ValueError, match="first is row 7"):
        CapacityKMeans(2, solver=solver).fit(torch.from_numpy(points))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"solver": "greedy"}, "known are exact, released, min_cost_flow"),
        ({"n_clusters": 0}, "n_clusters must be a whole number"),
        ({"n_clusters": 2.0}, "n_clusters must be a whole number"),
        ({"n_init": 0}, "n_init must"),
        ({"capacity_factor": 0.9}, "capacity_factor must be at least 1"),
        ({"tol": -1}, "tol must not be negative"),
        ({"n_clusters": 60}, "k=60 > 50 rows"),
        ({"solver": "released", "size_min": 2}, "released solver knows only capacity_factor"),
        ({"solver": "min_cost_flow", "size_max": np.full(8, 20) + np.arange(8)}, "same limits for every cluster"),
    ],
)
def test_wrong_options_are_refused_by_name(options, message):
    with pytest.raises(ValueError, match=message):
        CapacityKMeans(**options).fit(unit_mixture(50, 3, 2))


def test_exact_sums_do_not_drift_and_keep_small_columns():
    rng = np.random.default_rng(0)
    points = (rng.normal(size=(3000, 3)) * [1e6, 1.0, 1e-6]).astype(np.float32)
    table, labels = RowTable(points).survey(), rng.integers(0, 4, 3000).astype(np.int32)
    sums = ExactSums(table, 4)
    sums.update(None, labels)
    for _ in range(20):
        other = rng.integers(0, 4, 3000).astype(np.int32)
        sums.update(labels, other)
        labels = other
    fresh = ExactSums(table, 4)
    fresh.update(None, labels)
    assert (fresh.totals == sums.totals).all() and (fresh.counts == sums.counts).all()
    wanted = np.stack([points[labels == c].astype(np.float64).mean(0) for c in range(4)])
    np.testing.assert_allclose(sums.means(), wanted, rtol=1e-9, atol=1e-15)


def test_a_warning_says_when_iterations_ran_out():
    with pytest.warns(ConvergenceWarning, match="did not converge in 1 iterations"):
        CapacityKMeans(5, max_iter=1, n_init=1, random_state=0, tol=0).fit(unit_mixture(3000, 8, 5))


def test_scikit_learns_own_checks():
    check_estimator(CapacityKMeans(n_clusters=2, capacity_factor=None))


def test_an_installation_that_cannot_be_written_to_still_works(tmp_path):
    """Neither the source folder nor the home can be written: compiled anew, nothing left beside the source."""
    package = tmp_path / "clusterft"
    shutil.copytree(Path(clusterft.__file__).parent, package, ignore=shutil.ignore_patterns("__pycache__"))
    (package / "__pycache__").write_text("a file where numba and Python would want a folder")
    home = tmp_path / "home"
    home.write_text("no folder either")
    code = (
        "import numpy as np; from clusterft.released import greedy_assign_distances as g; import clusterft;"
        "print(clusterft.__file__, g(np.array([[0., 9.], [1., 3.]]), 1).tolist())"
    )
    environment = {
        **os.environ,
        "PYTHONPATH": str(tmp_path),
        "HOME": str(home),
        "XDG_CACHE_HOME": str(home),
        "PYTHONDONTWRITEBYTECODE": "1",
    }
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment)
    assert answer.returncode == 0, answer.stderr
    assert answer.stdout.split(maxsplit=1) == [str(package / "__init__.py"), "[0, 1]\n"]


def test_negative_zero_is_zero() -> None:
    rows = np.random.default_rng(0).integers(-1, 2, (6000, 5)).astype(np.float64)
    other = np.where(rows == 0, -0.0, rows)
    assert (RowTable(rows).survey().keys == RowTable(other).survey().keys).all()
    a, b = (CapacityKMeans(4, random_state=0).fit(x) for x in (rows, other))
    assert (a.labels_ == b.labels_).all()


@pytest.mark.parametrize("tol", [1e-4, 0.0])
def test_equal_rows_need_no_iterations_whatever_their_value(tol: float) -> None:
    with pytest.warns(ConvergenceWarning, match="fewer than the 7 clusters"):
        model = CapacityKMeans(7, random_state=0, tol=tol).fit(np.full((9000, 5), 3.3))
    assert model.n_iter_ <= 3 and model.inertia_ < 1e-20


def test_a_large_table_is_no_worse_than_scikit_learn_where_no_cap_binds() -> None:
    """Above the size of the seeding sample: restarts race on it, swaps improve the best, all rows refine."""
    rows = unit_mixture(12_000, 64, 8)
    ours = [CapacityKMeans(8, capacity_factor=None, random_state=s).fit(rows).inertia_ for s in range(3)]
    theirs = [KMeans(8, n_init=10, random_state=s).fit(rows).inertia_ for s in range(3)]
    assert max(ours) <= 1.01 * min(theirs)
