"""Allocation: balanced steps, the same on every layout, each row once an epoch; cases 11, 12 and 13."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from clusterft.allocation import ClusterBatchSampler, ShuffledBatchSampler, quota_schedule
from clusterft.interfaces import Sampler

CASES = Path(__file__).parent / "golden" / "cases"


def counts(steps, clusters):
    """(steps, k) rows of each cluster in each step."""
    k = int(max(clusters)) + 1
    return np.array([np.bincount(np.asarray(clusters)[s], minlength=k) for s in steps])


def gathered(make, world, epoch):
    """What all ranks together process in each step, from their micro-batches."""
    samplers = [make(rank=r, world=world) for r in range(world)]
    return [sorted(row for s in samplers for batch in s.step_batches(step) for row in batch) for step in samplers[0].plan(epoch)]


# -- by hand ----------------------------------------------------------------------------------------------------------


def test_three_equal_clusters_batch_four_by_hand():
    """3 clusters of 4, steps of 4: one cluster has two rows, which one rotates; clusters served in the order 2, 0, 1."""
    used = list(quota_schedule([4, 4, 4], 4, [2, 0, 1]))
    steps = [(b - a).tolist() for a, b in pairwise([np.zeros(3, int), *used])]
    assert steps == [[1, 1, 2], [2, 1, 1], [1, 2, 1]]


def test_unequal_clusters_come_in_proportion_by_hand():
    """6 + 3 + 1 rows in steps of 5: after the first step 3, 1.5 and 0.5 rows are due; the second cluster's is due first."""
    used = [u.tolist() for u in quota_schedule([6, 3, 1], 5, [0, 1, 2])]
    assert used == [[3, 2, 0], [6, 3, 1]]


def test_worker_c_processes_cluster_c_when_k_is_w():
    clusters = [0, 1, 2, 3] * 6
    sampler = ClusterBatchSampler(clusters, global_batch=8, workers=4, seed=1)
    for step in sampler.plan(0):
        for worker, run in enumerate(sampler.runs(step)):
            assert [clusters[i] for i in run] == [worker] * 2


@pytest.mark.parametrize("micro_batch", [1, 2, 4])
def test_one_cluster_a_rank_at_every_micro_batch(micro_batch):
    """The round-robin order of one list mixes clusters from two rows a micro-batch on; blocks by worker do not."""
    clusters = [i % 4 for i in range(32)]
    for rank in range(4):
        sampler = ClusterBatchSampler(clusters, global_batch=16, rank=rank, world=4, micro_batch=micro_batch, seed=0)
        assert {clusters[i] for batch in sampler.batches(0) for i in batch} == {rank}
        assert all(len(batch) == micro_batch for batch in sampler.batches(0))


def test_k_unlike_w_cuts_the_ordered_step_into_near_equal_runs():
    clusters = [i % 4 for i in range(40)]
    sampler = ClusterBatchSampler(clusters, global_batch=10, workers=3, seed=3)
    for step in sampler.plan(0):
        runs = sampler.runs(step)
        assert [len(r) for r in runs] == [4, 3, 3]
        assert [i for r in runs for i in r] == step
        assert [clusters[i] for i in step] == sorted(clusters[i] for i in step)


# -- properties -------------------------------------------------------------------------------------------------------


@given(
    sizes=st.lists(st.integers(1, 30), min_size=1, max_size=9),
    batch=st.integers(1, 40),
    world=st.integers(1, 5),
    extra=st.integers(0, 4),
    micro=st.integers(1, 6),
    seed=st.integers(0, 5),
)
@settings(max_examples=150, deadline=None)
def test_every_layout_takes_every_row_once_in_the_same_steps(sizes, batch, world, extra, micro, seed):
    clusters = np.random.default_rng(seed).permutation(np.repeat(np.arange(len(sizes)), sizes))

    def make(rank, world):
        return ClusterBatchSampler(
            clusters, global_batch=batch, seed=seed, rank=rank, world=world, workers=world + extra, micro_batch=micro
        )

    plan = make(0, world).plan(1)
    assert gathered(make, world, 1) == [sorted(step) for step in plan]
    assert sorted(row for step in plan for row in step) == list(range(len(clusters)))
    assert [len(step) for step in plan[:-1]] == [batch] * (len(plan) - 1)
    assert all(len(b) <= micro for r in range(world) for b in make(r, world).batches(1))


@given(sizes=st.lists(st.integers(1, 60), min_size=1, max_size=12), batch=st.integers(1, 70), seed=st.integers(0, 3))
@settings(max_examples=150, deadline=None)
def test_shares_stay_within_one_row_of_proportion(sizes, batch, seed):
    n, total = np.array(sizes), sum(sizes)
    order = np.random.default_rng(seed).permutation(len(sizes))
    used = np.array(list(quota_schedule(sizes, batch, order)))
    done = np.minimum(np.arange(1, len(used) + 1) * batch, total)
    assert used.sum(1).tolist() == done.tolist()
    assert used[-1].tolist() == sizes
    assert (np.abs(used * total - n * done[:, None]) < total).all()
    assert (np.diff(used, axis=0, prepend=0) >= 0).all()


@given(k=st.integers(1, 20), q=st.integers(1, 30), batch=st.integers(1, 70))
@settings(max_examples=150, deadline=None)
def test_equal_clusters_differ_by_at_most_one_in_every_step(k, q, batch):
    clusters = np.repeat(np.arange(k), q)
    table = counts(ClusterBatchSampler(clusters, global_batch=batch, seed=0).plan(0), clusters)
    assert (table.max(1) - table.min(1)).max() <= 1
    if batch % k == 0:
        assert (table[:-1] == batch // k).all()


def test_which_cluster_has_one_more_rotates_over_steps_and_epochs():
    clusters = np.repeat(np.arange(4), 15)
    sampler = ClusterBatchSampler(clusters, global_batch=6, seed=0)
    table = counts(sampler.plan(0), clusters)
    assert table.sum(0).tolist() == [15] * 4
    assert len({tuple(row) for row in table.tolist()}) > 1
    first = {tuple(counts(sampler.plan(e)[:1], clusters)[0]) for e in range(12)}
    assert len(first) > 1


@pytest.mark.parametrize("kind", ["cluster", "shuffled"])
def test_epochs_differ_seeds_differ_and_both_repeat(kind):
    def plan(seed, epoch):
        layout = {"global_batch": 6, "seed": seed}
        if kind == "cluster":
            return ClusterBatchSampler([0, 1, 2] * 8, **layout).plan(epoch)
        return ShuffledBatchSampler(24, **layout).plan(epoch)

    assert plan(0, 0) == plan(0, 0)
    assert plan(0, 0) != plan(0, 1)
    assert plan(0, 0) != plan(1, 0)
    assert sorted(i for s in plan(0, 1) for i in s) == list(range(24))


def test_a_permuted_selection_trains_in_the_same_order():
    ids = [f"row{i:02d}" for i in range(24)]
    clusters = np.array([0, 1, 2] * 8)
    turn = np.random.default_rng(1).permutation(24)
    plain = ClusterBatchSampler(clusters, global_batch=6, seed=4, ids=ids)
    turned = ClusterBatchSampler(clusters[turn], global_batch=6, seed=4, ids=[ids[i] for i in turn])
    assert plain.fingerprint() == turned.fingerprint()
    for a, b in zip(plain.plan(1), turned.plan(1), strict=True):
        assert [ids[i] for i in a] == [ids[turn[i]] for i in b]


def test_lengths_only_reorder_rows_inside_a_worker():
    lengths = list(range(24))
    plain = ClusterBatchSampler([0, 1] * 12, global_batch=12, seed=0, micro_batch=2)
    sorted_ = ClusterBatchSampler([0, 1] * 12, global_batch=12, seed=0, micro_batch=2, lengths=lengths)
    for step in plain.plan(0):
        a, b = plain.step_batches(step), sorted_.step_batches(step)
        assert sorted(i for x in a for i in x) == sorted(i for x in b for i in x)
        flat = [lengths[i] for x in b for i in x]
        assert flat == sorted(flat, reverse=True)


def test_virtual_workers_are_carried_in_consecutive_blocks():
    blocks = [list(ClusterBatchSampler([0] * 9, global_batch=9, workers=7, rank=r, world=3, seed=0).my_workers) for r in range(3)]
    assert blocks == [[0, 1, 2], [3, 4], [5, 6]]


# -- as a batch_sampler -------------------------------------------------------------------------------------------------


def test_it_is_a_sampler_and_a_torch_batch_sampler():
    from torch.utils.data import DataLoader

    sampler = ClusterBatchSampler([0, 1] * 10, global_batch=4, micro_batch=2, seed=0)
    assert isinstance(sampler, Sampler)
    loader = DataLoader(list(range(20)), batch_sampler=sampler, collate_fn=list)
    assert len(loader) == len(sampler) == 10
    first, second = list(loader), list(loader)
    assert first == list(sampler.batches(0))
    assert second == list(sampler.batches(1)), "a second pass moves on to the next epoch by itself"
    sampler.set_epoch(0)
    assert list(loader) == first


def test_mid_epoch_resume_in_epoch_one_uses_epoch_ones_order():
    def make():
        return ClusterBatchSampler([0, 1, 2] * 8, global_batch=6, micro_batch=2, seed=9)

    whole = make()
    expected = list(whole.batches(1))
    broken = make()
    list(broken)
    stream = iter(broken)
    seen = [next(stream) for _ in range(5)]
    state = json.loads(json.dumps(broken.state_dict()))
    resumed = make()
    resumed.load_state_dict(state)
    resumed.set_epoch(1)
    assert seen + list(resumed) == expected
    assert list(resumed) == list(whole.batches(2))
    ahead = broken.state_dict(batches_done=3)
    resumed.load_state_dict(ahead)
    assert list(resumed) == expected[3:]


def test_a_foreign_state_is_refused():
    state = ClusterBatchSampler([0, 1] * 8, global_batch=4, seed=0).state_dict()
    for other in (
        ClusterBatchSampler([0, 1] * 8, global_batch=8, seed=0),
        ClusterBatchSampler([0, 1] * 8, global_batch=4, seed=1),
        ClusterBatchSampler([0, 1] * 9, global_batch=4, seed=0),
        ClusterBatchSampler([1, 0] * 8, global_batch=4, seed=0),
        ShuffledBatchSampler(16, global_batch=4, seed=0),
    ):
        with pytest.raises(ValueError, match="other rows, another global batch or another seed"):
            other.load_state_dict(state)
    middle = ClusterBatchSampler([0, 1] * 8, global_batch=4, seed=0).state_dict(batches_done=1)
    with pytest.raises(ValueError, match="stopped inside an epoch with layout"):
        ClusterBatchSampler([0, 1] * 8, global_batch=4, seed=0, world=2).load_state_dict(middle)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"global_batch": 0}, "global_batch is 0"),
        ({"micro_batch": 0}, "micro_batch is 0"),
        ({"rank": 2, "world": 2}, "rank 2 is outside"),
        ({"workers": 2, "world": 4}, "4 processes for 2 workers"),
        ({"idle": "repeat"}, "skip, empty"),
    ],
)
def test_sizes_that_cannot_be_met_are_refused(change, words):
    with pytest.raises(ValueError, match=words):
        ClusterBatchSampler([0, 1], **{"global_batch": 2, "seed": 0} | change)


def test_clusters_that_make_no_sense_are_refused():
    for bad, words in (
        ([[0, 1]], "vector of integers"),
        ([0.5, 1.0], "vector of integers"),
        ([-1, 0], "found -1"),
        ([], "no rows"),
    ):
        with pytest.raises(ValueError, match=words):
            ClusterBatchSampler(bad, global_batch=1, seed=0)


# -- case 12: balanced batches ------------------------------------------------------------------------------------------

CASE12 = CASES / "12-balanced-batches-after-prepare"


@pytest.fixture(scope="module")
def chosen():
    return [json.loads(line) for line in (CASE12 / "selection.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("block", ["global_batch_8", "global_batch_6"])
def test_case12_same_balanced_global_batches_for_every_layout(chosen, block):
    expected = json.loads((CASE12 / "expected.json").read_text())[block]
    clusters, batch = [row["cluster"] for row in chosen], int(block.rsplit("_", 1)[1])
    plans = []
    for world, per_device in expected["layouts"]:

        def make(rank, world, per_device=per_device):
            return ClusterBatchSampler(clusters, global_batch=batch, rank=rank, world=world, micro_batch=per_device, seed=7)

        plans.append((gathered(make, world, 0), gathered(make, world, 1)))
    assert all(plan == plans[0] for plan in plans)
    for steps in plans[0]:
        table = counts(steps, clusters)
        assert sorted(i for s in steps for i in s) == list(range(16))
        if batch == 8:
            assert len(steps) == expected["steps_per_epoch"]
            assert (table == expected["rows_of_each_cluster_in_each_global_batch"]).all()
        else:
            assert (table.max(1) - table.min(1)).max() <= expected["per_batch_cluster_counts_differ_by_at_most"]
            assert len(steps[-1]) == expected["last_batch_rows"]
    assert plans[0][0] != plans[0][1]


def test_case12_weights_sum_to_one(chosen):
    expected = json.loads((CASE12 / "expected.json").read_text())
    sizes = np.bincount(json.loads((CASE12 / "cluster_of_row.json").read_text()))
    assert sizes.tolist() == expected["cluster_sizes"]
    assert {str(r["cluster"]): r["weight"] for r in chosen} == expected["weights"]
    assert sum(r["weight"] for r in chosen) == pytest.approx(expected["sum_of_weights"])
    assert all(r["weight"] == pytest.approx(sizes[r["cluster"]] / 64 / 4) for r in chosen)


# -- case 13: fewer rows than ranks ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(("file", "world", "block"), [("train.jsonl", 8, "train_stage"), ("train24.jsonl", 5, "train24")])
def test_case13_every_row_counts_once_and_idle_ranks_weigh_nothing(file, world, block):
    folder = CASES / "13-three-rows-eight-gpus"
    gradients = [json.loads(line)["toy_gradient"] for line in (folder / file).read_text().splitlines()]
    expected = json.loads((folder / "expected.json").read_text())[block]
    layout = {"global_batch": world, "world": world, "micro_batch": 1, "seed": 0}
    samplers = [ShuffledBatchSampler(len(gradients), rank=r, **layout) for r in range(world)]
    seen = [row for s in samplers for batch in s.batches(0) for row in batch]
    assert sorted(seen) == list(range(len(gradients)))
    assert np.mean([gradients[i] for i in seen]) == expected["mean_gradient"]
    if "steps" in expected:
        assert samplers[0].steps_per_epoch == expected["steps"]
    else:
        assert sum(not list(s.batches(0)) for s in samplers) == 5


def test_case13_idle_empty_gives_every_rank_equally_many_batches():
    samplers = [ShuffledBatchSampler(3, global_batch=8, rank=r, world=8, micro_batch=1, seed=0, idle="empty") for r in range(8)]
    batches = [list(s.batches(0)) for s in samplers]
    assert [len(b) for b in batches] == [1] * 8
    assert sorted(batches) == [[[]]] * 5 + [[[0]], [[1]], [[2]]]


# -- case 11: the order is the same in any process ----------------------------------------------------------------------------


@pytest.mark.parametrize("hash_seed", ["0", "1", "random"])
def test_case11_order_does_not_depend_on_the_process(hash_seed):
    code = (
        "from clusterft.allocation import ClusterBatchSampler as C, ShuffledBatchSampler as S\n"
        "ids = [f'r{i:03d}' for i in range(80)]\n"
        "clusters = [i % 4 for i in range(80)]\n"
        "print(C(clusters, global_batch=8, seed=1, ids=ids).plan(1), S(80, global_batch=8, seed=1, ids=ids).plan(1))"
    )
    env = {**os.environ, "PYTHONHASHSEED": hash_seed}
    printed = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True).stdout
    ids = [f"r{i:03d}" for i in range(80)]
    here = ClusterBatchSampler([i % 4 for i in range(80)], global_batch=8, seed=1, ids=ids).plan(1)
    also = ShuffledBatchSampler(80, global_batch=8, seed=1, ids=ids).plan(1)
    assert printed.strip() == f"{here} {also}"
