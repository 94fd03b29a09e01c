"""The CluSTER selector: the released algorithm's golden values, then facts by hand, then equivalences."""

import json
from pathlib import Path

import numpy as np
import pytest

from clusterft.cluster import (
    Clustering,
    ClusterSelector,
    balanced_rows,
    fill_evenly,
    fill_in_proportion,
    own_sq_distances,
    unbiased_weights,
)
from clusterft.interfaces import Feature
from clusterft.records import Example, Pool
from clusterft.seeding import generator
from clusterft.within import WITHIN, pick_within

GOLDEN = Path(__file__).parent / "golden"
NAMES = ["balanced_k4", "longtail_k4", "longtail_k8"]


def golden(name):
    return json.loads((GOLDEN / f"{name}.json").read_text()), np.load(GOLDEN / f"{name}.npz")


def selector(**changes):
    settings = {
        "n_clusters": 4, "capacity_factor": 1.5, "solver": "exact", "n_init": 3, "within": "peripheral", "allocation": "equal",
        "weights": "balanced", "proxy": {},
    }  # fmt: skip
    return ClusterSelector(**{**settings, **changes})


def pool_of(n):
    return Pool("made up", tuple(Example(f"{i:016x}", "p", "r") for i in range(n)))


def blobs(sizes, seed=0, spread=0.05):
    """Unit-norm points around orthogonal axes, `sizes[c]` of them around axis c."""
    rng = np.random.default_rng(seed)
    points = np.concatenate([np.eye(8)[c] + spread * rng.normal(size=(n, 8)) for c, n in enumerate(sizes)])
    return (points / np.linalg.norm(points, axis=1, keepdims=True)).astype(np.float32)


def choose(points, budget, seed=0, **changes):
    return selector(**changes).choose(
        pool_of(len(points)), {"gradient_proxy": Feature(points)}, budget, generator(seed, "choose")
    )


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("within", ["peripheral", "core"])
def test_released_selection_is_reproduced_row_by_row(name, within):
    facts, arrays = golden(name)
    clustering = Clustering(arrays["labels"].astype(np.int32), arrays["centers"], arrays["sq_distance"].astype(np.float64))
    assert clustering.sizes.tolist() == facts["cluster_sizes"]
    checked = 0
    for result in facts["results"]:
        if result["within_cluster"] != within:
            continue
        q = balanced_rows(clustering.sizes, result["selection_ratio"])
        assert q == result["kept_per_cluster"]
        kept = [
            np.sort(
                pick_within(
                    within, np.flatnonzero(clustering.labels == c), q, clustering, arrays["embeddings"], np.random.default_rng(0)
                )
            )
            for c in range(facts["K"])
        ]
        assert [k.tolist() for k in kept] == result["kept_indices_by_cluster"]
        checked += 1
    assert checked == 3


@pytest.mark.parametrize("name", NAMES)
def test_released_weights_are_reproduced(name):
    facts, _ = golden(name)
    sizes = np.array(facts["cluster_sizes"])
    weights = unbiased_weights(sizes, np.full(facts["K"], 7))
    assert weights == pytest.approx(facts["rank_weights"], abs=1e-12)


@pytest.mark.parametrize("name", NAMES)
def test_exact_clusters_are_no_worse_than_the_released_ones(name):
    facts, arrays = golden(name)
    points = arrays["embeddings"]
    ours = selector(n_clusters=facts["K"], n_init=10).cluster(points, np.random.default_rng(0))
    means = np.stack([points[arrays["labels"] == c].mean(axis=0) for c in range(facts["K"])])
    assert ours.sizes.max() <= -(-3 * facts["N"] // (2 * facts["K"]))
    assert ours.sq_distances.sum() <= own_sq_distances(points, means, arrays["labels"]).sum() + 1e-9


def test_q_is_the_exact_floor_and_never_zero():
    assert balanced_rows([100, 400], "0.29") == 29
    assert balanced_rows([100, 400], 0.29) == 29
    assert balanced_rows([3, 9], "0.34") == 1
    with pytest.raises(ValueError, match=r"floor\(0.33 x 3\) = 0"):
        balanced_rows([3, 9], "0.33")


def test_even_filling_by_hand():
    assert fill_evenly(np.array([5, 5, 5]), 6).tolist() == [2, 2, 2]
    assert fill_evenly(np.array([1, 4, 10]), 9).tolist() == [1, 4, 4]
    assert fill_evenly(np.array([5, 7, 6]), 7).tolist() == [2, 3, 2]
    assert fill_evenly(np.array([1, 2, 3]), 6).tolist() == [1, 2, 3]


@pytest.mark.parametrize("seed", range(30))
def test_filling_keeps_its_promises_on_random_sizes(seed):
    rng = np.random.default_rng(seed)
    sizes = rng.integers(1, 40, size=rng.integers(1, 12))
    for budget in {len(sizes), int(sizes.sum()), int(rng.integers(len(sizes), sizes.sum() + 1))}:
        for kept in (fill_evenly(sizes, budget), fill_in_proportion(rng.random(len(sizes)), sizes, budget)):
            assert kept.sum() == budget
            assert (kept <= sizes).all() and (kept >= 0).all()
        even = fill_evenly(sizes, budget)
        open_ = even < sizes
        assert even[open_].max(initial=0) - even[open_].min(initial=10**9) <= 1
        assert even[~open_].max(initial=0) <= even[open_].max(initial=10**9 if open_.sum() == 0 else 0) + 0


def test_proportional_shares_by_hand():
    assert fill_in_proportion(np.array([50.0, 30.0, 20.0]), np.array([50, 30, 20]), 10).tolist() == [5, 3, 2]
    with pytest.raises(ValueError, match="2 rows cannot give each of 3 clusters"):
        fill_in_proportion(np.ones(3), np.array([5, 5, 5]), 2)


def test_weights_are_k_pi_by_hand_and_average_one():
    weights = unbiased_weights(np.array([28, 20, 12, 4]), np.array([4, 4, 4, 4]))
    assert weights == pytest.approx([4 * 28 / 64, 4 * 20 / 64, 4 * 12 / 64, 4 * 4 / 64])
    assert weights.mean() == pytest.approx(1)


def test_weighted_means_estimate_the_pool_for_any_allocation():
    """The weighted mean of cluster constants over the selection is the pool's own mean, whatever was kept."""
    points = blobs([40, 25, 20, 15])
    value_of_cluster = np.array([1.0, 10.0, 100.0, 1000.0])
    for allocation in ("equal", "proportional", "neyman"):
        got = choose(points, 40, allocation=allocation)
        truth = value_of_cluster @ np.array(got.info["pi"])
        assert (got.weights * value_of_cluster[got.clusters]).mean() == pytest.approx(truth, rel=1e-12)


def test_peripheral_keeps_the_farthest_core_the_nearest_of_every_cluster():
    points = blobs([30, 30, 20, 20])
    far, near = choose(points, 40, within="peripheral"), choose(points, 40, within="core")
    for c in range(4):
        assert (far.clusters == c).sum() == (near.clusters == c).sum() == 10
        assert far.distances[far.clusters == c].min() >= near.distances[near.clusters == c].max()


@pytest.mark.parametrize("within", WITHIN)
def test_the_budget_is_exact_and_every_row_has_a_score(within):
    points = blobs([30, 25, 25, 20])
    for budget in (4, 5, 7, 80, 99, 100):
        got = choose(points, budget, within=within)
        assert len(got.ids) == budget
        assert len(got.scores) == 100


@pytest.mark.parametrize("within", WITHIN)
def test_a_permuted_pool_gives_the_same_ids_weights_and_clusters(within):
    points, pool = blobs([30, 25, 25, 20]), pool_of(100)
    order = np.random.default_rng(3).permutation(100)
    moved = Pool("moved", tuple(pool.examples[i] for i in order))
    one = selector(within=within).choose(pool, {"gradient_proxy": Feature(points)}, 40, generator(5, "choose"))
    two = selector(within=within).choose(moved, {"gradient_proxy": Feature(points[order])}, 40, generator(5, "choose"))
    assert one.ids == two.ids
    assert (one.weights == two.weights).all() and (one.clusters == two.clusters).all()


def test_ties_go_to_the_smaller_id():
    points = np.repeat(np.eye(4, 8, dtype=np.float32), 6, axis=0)
    got = choose(points, 8, n_init=1)
    assert sorted(got.ids) == [f"{i:016x}" for c in range(4) for i in (6 * c, 6 * c + 1)]


def test_the_budget_rule_and_choose_see_the_same_clusters():
    points = blobs([40, 30, 20, 10])
    method, pool, features = selector(), pool_of(100), {"gradient_proxy": Feature(points)}
    budget = method.budget(pool, features, "0.5", generator(7, "choose"))
    got = method.choose(pool, features, budget, generator(7, "choose"))
    assert budget == 4 * (min(got.info["cluster_sizes"]) // 2)
    assert set(np.bincount(got.clusters)) == {budget // 4}


def test_rows_without_direction_are_rejected_with_a_reason_and_never_drawn():
    points = blobs([20, 20, 20, 20])
    points[3], points[50, 0] = 0.0, np.nan
    got = choose(points, 78)
    assert got.rejected == {f"{3:016x}": "zero_proxy", f"{50:016x}": "nonfinite"}
    assert not set(got.rejected) & set(got.ids)
    with pytest.raises(ValueError, match=r"79 rows is not an integer in 1 ... 78"):
        choose(points, 79)


@pytest.mark.parametrize("option", ["within", "allocation", "weights"])
def test_an_unknown_option_lists_the_known_ones(option):
    with pytest.raises(ValueError, match=f"{option} 'nope' is unknown; known are"):
        selector(**{option: "nope"})


def test_square_root_weights_lie_between_none_and_balanced():
    points = blobs([40, 30, 20, 10])
    full, root = choose(points, 40), choose(points, 40, weights="sqrt")
    assert choose(points, 40, weights="none").weights is None
    assert root.weights.mean() == pytest.approx(1)
    assert root.weights.max() < full.weights.max() and root.weights.min() > full.weights.min()
    assert root.weights**2 / full.weights == pytest.approx((root.weights**2 / full.weights)[0])


@pytest.mark.parametrize("allocation", ["equal", "proportional", "neyman"])
def test_a_budget_below_one_row_a_cluster_is_refused(allocation: str) -> None:
    selector = ClusterSelector(
        n_clusters=8,
        capacity_factor=1.5,
        solver="exact",
        n_init=10,
        within="core",
        allocation=allocation,
        weights="balanced",
        proxy={},
    )
    with pytest.raises(ValueError, match="5 rows cannot be divided into 8 clusters"):
        selector.check(5, None)
    with pytest.raises(ValueError, match="a budget of 3 rows cannot give each of 8 clusters at least one"):
        selector.check(100, 3)
    proxies = np.random.default_rng(0).normal(size=(100, 4))
    clustering = selector.cluster(proxies, generator(0, "choose"))
    with pytest.raises(ValueError, match="a budget of 3 rows cannot give each of 8 clusters at least one"):
        selector.rows_per_cluster(clustering, 3)
