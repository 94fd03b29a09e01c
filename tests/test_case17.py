"""Case 17: preempted, requeued, resumed. Its four interruptions, with its numbers, on real ranks."""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from training_kit import run_training

from clusterft import checkpoint, launch
from clusterft.distributed import Dist, Preempted, single_process
from clusterft.metrics_log import read_metrics
from clusterft.trainer import read_result

CASE = Path(__file__).parent / "golden" / "cases" / "17-preempt-requeue-resume"
FORTY_STEPS = {"n": 240, "trainer": {"epochs": 2, "checkpoint_every_steps": 23, "keep_last": 3}}


def killed_while_writing(*, dist: Dist, step: int, **options) -> None:
    """Trains; rank 0 dies when it opens the first file of checkpoint-`step`."""

    def hook(event: str, arguments: tuple) -> None:
        if event == "open" and f".checkpoint-{step}.tmp/" in str(arguments[0]):
            os.kill(os.getpid(), signal.SIGKILL)

    if dist.is_main:
        sys.addaudithook(hook)
    run_training(dist=dist, **options)


def test_sigterm_in_step_17_then_sigkill_while_writing_at_23_then_another_world(tmp_path):
    expected = json.loads((CASE / "expected.json").read_text())
    whole, run = tmp_path / "whole", tmp_path / "run"
    run_training(dist=single_process(), out=str(whole), **FORTY_STEPS)

    stopped = FORTY_STEPS | {"out": str(run), "kill_at": 16, "kill_signal": int(signal.SIGTERM)}  # after step 16: during step 17
    with pytest.raises(Preempted, match="after step 17 of 40, checkpoint written"):
        launch.run("training_kit:run_training", stopped, processes=4, threads=1)
    assert checkpoint.find_latest(run).step == expected["after_sigterm_in_training"]["checkpoint_step"]

    with pytest.raises(launch.WorkerError, match="rank 0: killed by SIGKILL"):
        launch.run("test_case17:killed_while_writing", FORTY_STEPS | {"out": str(run), "step": 23}, processes=4, threads=1)
    assert checkpoint.find_latest(run).step == expected["after_sigkill_in_step_23"]["resume_step"]

    launch.run("training_kit:run_training", FORTY_STEPS | {"out": str(run)}, processes=2, threads=1)  # 4 -> 2 ranks
    assert read_result(run).resumed_from == (17,)  # the resume that was killed before its first checkpoint left no trace
    one, two = read_metrics(whole), read_metrics(run)
    assert [line["step"] for line in two] == list(range(1, 41))
    for key in ("order", "loss", "epoch", "tokens"):
        assert [line[key] for line in one] == [line[key] for line in two], key
    left, right = load_file(whole / "final.safetensors"), load_file(run / "final.safetensors")
    assert all(torch.equal(left[n], right[n]) for n in left)
