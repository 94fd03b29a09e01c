"""S2L: allocation tables of both rules, what becomes of missing losses, and a real proxy's trajectories."""

from __future__ import annotations

import numpy as np
import pytest
from omegaconf import OmegaConf
from test_models import gguf_conf, write_tiny_gguf
from tiny_feature_context import TINY, tiny_context

from baselines.s2l import S2LSelector, draw_paper, draw_released, fill_gaps, share_evenly
from clusterft.features import FeatureStore, compute
from clusterft.gguf_convert import sha256_of
from clusterft.interfaces import Feature
from clusterft.models import ModelError
from clusterft.records import Example, Pool
from clusterft.seeding import generator
from clusterft.trajectories import TrajectoryParams, moments, proxy_rows


def clusters_of(sizes):
    ends = np.cumsum(sizes)
    return [np.arange(end - size, end) for size, end in zip(sizes, ends, strict=True)]


def taken(draw, sizes, budget):
    clusters = clusters_of(sizes)
    chosen = draw(clusters, budget, generator(0, "draw"))
    assert len(set(chosen)) == len(chosen)
    return [int(np.isin(c, chosen).sum()) for c in clusters]


@pytest.mark.parametrize(
    ("sizes", "budget", "paper", "released"),
    [
        ([5, 5, 5, 5], 10, [2, 2, 3, 3], [2, 2, 3, 3]),
        ([1, 1, 1, 100], 50, [1, 1, 1, 47], [0, 0, 0, 50]),
        ([1, 2, 3, 10], 9, [1, 2, 3, 3], [0, 0, 3, 6]),
        ([3, 4, 5], 100, [3, 4, 5], [3, 4, 5]),
    ],
)
def test_allocation_table(sizes, budget, paper, released):
    assert share_evenly(sizes, budget) == paper == taken(draw_paper, sizes, budget)
    assert taken(draw_released, sizes, budget) == released


def test_only_tiny_clusters():
    assert share_evenly([2, 2, 2], 4) == [1, 1, 2]
    assert sum(taken(draw_released, [2, 2, 2], 4)) == 4


def test_allocation_is_fair_and_exact_on_random_sizes():
    rng = np.random.default_rng(0)
    for _ in range(200):
        sizes = sorted(rng.integers(1, 30, size=rng.integers(1, 12)).tolist())
        budget = int(rng.integers(1, sum(sizes) + 10))
        shares = share_evenly(sizes, budget)
        assert sum(shares) == min(budget, sum(sizes)) and shares == sorted(shares)
        assert all(share <= size for share, size in zip(shares, sizes, strict=True))
        open_ = [share for share, size in zip(shares, sizes, strict=True) if share < size]
        assert not open_ or min(open_) >= max(shares) - 1


def select(trajectories, budget, *, k=3, rule="paper", finite=None, seed=0):
    n = len(trajectories)
    pool = Pool("toy", tuple(Example(f"{i:03d}", "p", "r") for i in range(n)))
    flags = np.ones_like(trajectories) if finite is None else finite
    selector = S2LSelector(clusters=k, rule=rule, n_init=3, proxy={})
    features = {"loss_trajectories": Feature(np.hstack([np.where(flags > 0, trajectories, 0), flags]).astype(np.float32))}
    return selector.choose(pool, features, budget, generator(seed, "choose"))


def test_three_separated_groups_give_ten_each():
    levels = np.repeat([1.0, 5.0, 9.0], [10, 20, 70])
    chosen = select(levels[:, None] + np.zeros((100, 4)), 30)
    rows = np.array([int(i) for i in chosen.ids])
    assert [int((levels[rows] == level).sum()) for level in (1.0, 5.0, 9.0)] == [10, 10, 10]
    assert chosen.info["trajectory_cluster_sizes"] == [10, 20, 70] and chosen.clusters is None


def test_k_is_the_number_of_clusters_that_can_be_filled():
    """3 distinct trajectories, K = 10: three clusters, so R_k counts three."""
    levels = np.repeat([1.0, 5.0, 9.0], [10, 20, 70])
    chosen = select(levels[:, None] + np.zeros((100, 4)), 30, k=10)
    assert chosen.info["trajectory_cluster_taken"] == [10, 10, 10] and chosen.info["clusters_asked"] == 10


def test_fewer_rows_than_clusters():
    assert len(select(np.random.default_rng(0).random((60, 3)), 20, k=100).ids) == 20


def test_rows_without_any_loss_are_rejected_not_a_cluster():
    rng = np.random.default_rng(0)
    finite = np.ones((100, 4))
    finite[:10] = 0
    chosen = select(rng.random((100, 4)) + 1, 30, k=8, finite=finite)
    assert set(chosen.rejected) == {f"{i:03d}" for i in range(10)} and set(chosen.rejected.values()) == {"no_finite_loss"}
    assert not set(chosen.ids) & set(chosen.rejected) and sum(chosen.info["trajectory_cluster_sizes"]) == 90
    with pytest.raises(ValueError, match=r"budget of 95 rows, but only 90"):
        select(rng.random((100, 4)), 95, finite=finite)


def test_gaps_are_filled_from_the_same_row():
    nan = np.nan
    filled = fill_gaps(np.array([[nan, 4.0, nan, 2.0, nan], [1.0, 1.0, 1.0, 1.0, 1.0]]))
    assert filled.tolist() == [[4.0, 4.0, 3.0, 2.0, 2.0], [1.0] * 5]


def test_a_row_with_gaps_takes_part():
    finite = np.ones((30, 4))
    finite[3, 1] = 0
    chosen = select(np.random.default_rng(1).random((30, 4)), 30, finite=finite)
    assert len(chosen.ids) == 30 and chosen.info["rows_with_gaps"] == 1


def test_seed_draws_and_repeats():
    rows = np.random.default_rng(0).random((80, 4))
    assert select(rows, 20, seed=0).ids == select(rows, 20, seed=0).ids
    assert set(select(rows, 20, seed=0).ids) != set(select(rows, 20, seed=1).ids)


def test_moments_cover_the_whole_training():
    assert moments(49, 12)[-1] == 49 and moments(49, 12)[0] == 5 and len(moments(49, 12)) == 12
    assert moments(3, 12) == [1, 2, 3] and moments(10, 1) == [10]
    with pytest.raises(ValueError, match="points is 0"):
        moments(10, 0)


TRAINING = {
    "epochs": 2,
    "batch_rows": 4,
    "learning_rate": 3e-3,
    "schedule": "cosine",
    "warmup_ratio": 0.03,
    "weight_decay": 0.0,
    "precision": "float32",
    "seed": 42,
}


PROXY = {**OmegaConf.to_container(TINY), "shape": {**OmegaConf.to_container(TINY.shape), "hidden_size": 16}}


def selector(**proxy):
    settings = {"model": PROXY, "template": "alpaca", "max_length": 512, "points": 4, "training": TRAINING}
    return S2LSelector(clusters=5, rule="paper", n_init=2, proxy={**settings, **proxy})


def trajectories(tmp_path, context, **proxy):
    return compute(selector(**proxy).feature_specs(), context, FeatureStore(tmp_path))["loss_trajectories"]


def test_a_real_proxy_learns_and_is_read_along_the_way(tmp_path):
    context = tiny_context(16)
    feature = trajectories(tmp_path, context)
    losses = feature.rows[:, :4]
    assert feature.rows.shape == (16, 8) and (feature.rows[:, 4:] == 1).all()
    assert feature.extra["steps"].tolist() == [2, 4, 6, 8]
    assert losses[:, -1].mean() < losses[:, 0].mean() - 0.05
    assert feature.cost.forward_passes == 16 * 6 and feature.cost.backward_passes == 32 and feature.cost.flops > 0
    chosen = selector().choose(context.pool, {"loss_trajectories": feature}, 7, generator(0, "choose"))
    assert len(chosen.ids) == 7


def test_a_permuted_pool_has_the_same_trajectories(tmp_path):
    one = trajectories(tmp_path / "a", tiny_context(12))
    other = trajectories(tmp_path / "b", tiny_context(12, order=list(range(11, -1, -1))))
    np.testing.assert_array_equal(one.rows, other.rows[::-1])


def test_without_a_proxy_of_its_own_the_runs_model_is_copied(tmp_path):
    context = tiny_context(8)
    before = {k: v.clone() for k, v in context.load_model().state_dict().items()}
    feature = trajectories(tmp_path / "a", context, model=None, points=2)
    named = trajectories(tmp_path / "b", context, model=OmegaConf.to_container(TINY), points=2, max_length=9)
    assert feature.rows.shape == (8, 4)
    np.testing.assert_array_equal(named.rows, feature.rows)
    assert all((v == before[k]).all() for k, v in context.load_model().state_dict().items())


def test_rows_too_long_for_the_proxy_have_no_losses(tmp_path):
    feature = trajectories(tmp_path, tiny_context(12), max_length=166)
    missing = ~feature.rows[:, 4:].any(axis=1)
    assert 0 < missing.sum() < 12 and (feature.rows[missing] == 0).all()


def test_an_interrupted_training_goes_on_to_the_same_trajectories(tmp_path, monkeypatch):
    whole = trajectories(tmp_path / "whole", tiny_context(12))
    import clusterft.trajectories as module

    real, calls = module.mean_losses, []

    def dies(*args, **kwargs):
        calls.append(1)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return real(*args, **kwargs)

    monkeypatch.setattr(module, "mean_losses", dies)
    with pytest.raises(KeyboardInterrupt):
        trajectories(tmp_path / "cut", tiny_context(12))
    before = len(calls)
    resumed = trajectories(tmp_path / "cut", tiny_context(12))
    assert len(calls) - before == 2
    np.testing.assert_array_equal(resumed.rows, whole.rows)


def test_a_gguf_proxy_is_found_below_the_runs_assets_and_named_by_its_checksum(tmp_path):
    path = tmp_path / "assets/proxy/tiny.gguf"
    path.parent.mkdir(parents=True)
    write_tiny_gguf(path)
    proxy = OmegaConf.merge(gguf_conf(path), {"path": "proxy", "sha256": sha256_of(path)})
    params = {"template": "alpaca", "max_length": 64, "points": 1, "training": TRAINING}
    context = tiny_context(4, places={"assets_dir": tmp_path / "assets", "cache_dir": tmp_path / "cache"})
    model, encoded = proxy_rows(context, TrajectoryParams(model=OmegaConf.to_container(proxy), **params))
    assert model.config.hidden_size == 32 and [row.id for row in encoded] == list(context.pool.ids)
    with pytest.raises(ModelError, match=r"proxy/tiny\.gguf is not there"):
        proxy_rows(tiny_context(4), TrajectoryParams(model=OmegaConf.to_container(proxy), **params))
    with pytest.raises(ValueError, match=r"GGUF file without model\.sha256"):
        proxy_rows(context, TrajectoryParams(model={**OmegaConf.to_container(proxy), "sha256": None}, **params))


def test_an_unknown_rule_is_named():
    with pytest.raises(ValueError, match="paper, released"):
        S2LSelector(clusters=3, rule="other", n_init=1, proxy={})
