"""Odd numbers of rows, ranks and clusters, full disks, slow selections: nobody hangs, nothing earlier is lost."""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from datetime import timedelta

import numpy as np
import pytest
import torch
from composed import shared_cache, smoke
from safetensors.torch import load_file
from tiny_feature_context import tiny_context
from training_kit import run_training

from clusterft import checkpoint, launch, stages
from clusterft.cluster import ClusterSelector
from clusterft.distributed import single_process
from clusterft.features import FeatureStore, compute
from clusterft.interfaces import FeatureSpec
from clusterft.metrics_log import read_metrics
from clusterft.runner import run_one
from clusterft.store import RunStore, run_id
from clusterft.trainer import read_result

KIT = "training_kit:run_training"


def assert_same_end(a, b):
    left, right = load_file(a / "final.safetensors"), load_file(b / "final.safetensors")
    assert all(torch.equal(left[n], right[n]) for n in left)
    steps = [[(m["step"], m["loss"], m["order"]) for m in read_metrics(folder)] for folder in (a, b)]
    assert steps[0] == steps[1]


@pytest.mark.parametrize(
    ("rows", "clusters", "trainer", "processes"),
    [
        (3, None, {"workers": 8, "global_batch": 8}, 8),  # case 13: five ranks never have a row
        (13, 3, {"workers": 4, "global_batch": 8}, 4),  # K is not W, and the last step has five rows
        (10, 6, {"workers": 2, "global_batch": 4}, 2),
    ],
)
def test_uneven_rows_on_real_ranks_end_as_in_one_process(tmp_path, rows, clusters, trainer, processes):
    options = {"n": rows, "k": clusters, "trainer": trainer | {"epochs": 1, "warmup_steps": 0}}
    run_training(dist=single_process(), out=str(tmp_path / "one"), **options)
    launch.run(KIT, options | {"out": str(tmp_path / "many")}, processes=processes, threads=1)
    assert_same_end(tmp_path / "one", tmp_path / "many")


def test_more_processes_than_workers_are_refused_with_both_numbers(tmp_path):
    with pytest.raises(launch.WorkerError, match=r"runtime\.processes=3 for trainer\.workers=2"):
        launch.run(KIT, {"out": str(tmp_path), "trainer": {"workers": 2}}, processes=3, threads=1)


class SlowSelector(ClusterSelector):
    """Takes its time to choose, as a selection from millions of rows does."""

    def choose(self, *args):
        time.sleep(13.0)
        return super().choose(*args)


@pytest.mark.slow
def test_a_selection_longer_than_the_collective_timeout_does_not_kill_the_job(tmp_path):
    """No rank waits in a collective while rows are chosen: the ranks of the training stage are started afterwards."""
    target = ["selector._target_=test_rank_faults.SlowSelector"]
    cfg = smoke(tmp_path, "selector=cluster", "data.max_rows=40", "evaluators=none", *target)
    folder = RunStore(tmp_path / "runs").begin(cfg)
    started = time.monotonic()
    stages.select(cfg, stages.prepare(cfg), folder)
    limit = timedelta(seconds=12)
    assert time.monotonic() - started > limit.total_seconds()
    arguments = {"config_path": str(folder / "config.yaml")}
    launch.run("clusterft.stages:train_entry", arguments, processes=2, threads=1, timeout=limit)
    assert read_result(folder / "train").steps == read_result(folder / "train").total_steps


# -- disks that are full or may not be written ----------------------------------------------------------------------------


@pytest.fixture
def small_disk(tmp_path):
    """A file system of its own: yields (folder, resize(bytes or "ro"))."""
    folder = tmp_path / "disk"
    folder.mkdir()
    if os.geteuid() != 0 or shutil.which("mount") is None:
        pytest.skip("mounting a small file system needs root")
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", folder], capture_output=True, check=False).returncode:
        pytest.skip("this machine does not let a small file system be mounted")
    yield folder, lambda option: subprocess.run(["mount", "-o", f"remount,{option}", folder], check=True)
    subprocess.run(["umount", "--lazy", folder], check=True)


def test_a_disk_that_fills_up_keeps_the_last_checkpoint_and_training_goes_on(small_disk, tmp_path):
    folder, resize = small_disk
    options = {"trainer": {"checkpoint_every_steps": 2, "keep_last": 3}}
    run_training(dist=single_process(), out=str(tmp_path / "whole"), **options)
    one = sum(p.stat().st_size for p in (tmp_path / "whole" / "checkpoint-2").iterdir())
    resize(f"size={int(1.6 * one)}")
    with pytest.raises(launch.WorkerError, match=r"rank \d: .*No space left on device"):
        launch.run(KIT, options | {"out": str(folder / "run")}, processes=2, threads=1)
    assert checkpoint.find_latest(folder / "run").step == 2
    resize(f"size={20 * one}")
    launch.run(KIT, options | {"out": str(folder / "run")}, processes=2, threads=1)
    assert read_result(folder / "run").resumed_from == (2,)
    assert_same_end(tmp_path / "whole", folder / "run")


def wide_rows(context, spec, writer):
    """An extractor of (1000,) float32 rows, one put a row."""
    for i in writer.pending:
        writer.put([i], np.full((1, 1000), float(i), np.float32))


def test_a_disk_that_fills_up_during_a_feature_pass_keeps_the_rows_done(small_disk):
    folder, resize = small_disk
    spec, context = FeatureSpec("wide", "test_rank_faults:wide_rows", {}), tiny_context(40)
    with pytest.raises(OSError, match=r"No space left on device|is the disk full"):
        compute([spec], context, FeatureStore(folder))
    resize("size=4m")
    done = FeatureStore(folder).writer(spec, context).done
    assert 5 < done.sum() < 40
    rows = compute([spec], context, FeatureStore(folder))["wide"].rows
    assert np.array_equal(rows[:, 0], np.arange(40))


def test_a_run_on_a_full_disk_says_so_and_leaves_no_half_record(small_disk):
    folder, _ = small_disk
    cfg = smoke(folder, "selector=random", "selector.budget=fraction", "selector.ratio='0.5'", "data.max_rows=40")
    stages.prepare(cfg)  # the pool is cached elsewhere
    (folder / "filler").write_bytes(bytes(48 * 1024))
    with pytest.raises((OSError, launch.WorkerError), match="No space left on device"):
        run_one(cfg)
    assert RunStore(folder / "runs").read(run_id(cfg)) is None or RunStore(folder / "runs").read(run_id(cfg)).status == "failed"
    assert shared_cache().exists()


def test_a_read_only_cache_is_one_error_that_names_the_folder(small_disk):
    folder, resize = small_disk
    resize("ro")
    spec, context = FeatureSpec("wide", "test_rank_faults:wide_rows", {}), tiny_context(4)
    with pytest.raises(OSError, match=rf"Read-only file system: '{folder}"):
        compute([spec], context, FeatureStore(folder / "features"))
