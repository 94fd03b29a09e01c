"""Checkpoints are whole or not there; a killed run ends as if nothing had happened. Case 17."""

from __future__ import annotations

import json
import os
import shutil
import signal
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from training_kit import rows as make_rows
from training_kit import run_training, selection, tiny_model, trainer_config
from training_kit import sampler_config as make_sampler_config

from clusterft import checkpoint, launch
from clusterft.distributed import Preempted, single_process
from clusterft.metrics_log import read_metrics
from clusterft.trainer import read_result, train

CASE17 = Path(__file__).parent / "golden" / "cases" / "17-preempt-requeue-resume"
KIT = "training_kit:run_training"
ALWAYS = {"checkpoint_every_steps": 2, "keep_last": 3}


def write(folder: Path, step: int, **files: str) -> Path:
    writers = {name: (lambda path, text=text: path.write_text(text)) for name, text in files.items()}
    return checkpoint.save(folder, step, writers, single_process())


# -- folders ------------------------------------------------------------------------------------------------------------


def test_case17_torn_checkpoints_are_passed_over_with_the_reason():
    expected = json.loads((CASE17 / "expected.json").read_text())["run_b_torn"]
    found = checkpoint.find_latest(CASE17 / "run_b_torn")
    assert found.step == expected["resume_step"]
    assert found.path.name == "checkpoint-10"
    assert dict(found.rejected) == expected["rejected"]


def test_case17_logs_only_starts_at_zero_and_a_finished_run_is_whole():
    assert checkpoint.find_latest(CASE17 / "run_a_logs_only") == checkpoint.Found(None, 0, {})
    assert checkpoint.find_latest(CASE17 / "run_c_done").step == 40


def test_a_written_checkpoint_is_whole_and_any_change_is_noticed(tmp_path):
    folder = write(tmp_path, 7, a="alpha", b="beta")
    assert checkpoint.fault(folder) is None
    assert json.loads((folder / "manifest.json").read_text())["files"]["a"]["bytes"] == 5
    (folder / "a").write_text("alphA")
    assert checkpoint.fault(folder) == "a has another sha256 than the manifest says"
    (folder / "a").write_text("alp")
    assert checkpoint.fault(folder) == "a 3 bytes, manifest says 5"
    (folder / "a").unlink()
    assert checkpoint.fault(folder) == "a missing"
    shutil.move(folder, tmp_path / "checkpoint-9")
    assert checkpoint.fault(tmp_path / "checkpoint-9") == "manifest is of step 7"
    (tmp_path / "checkpoint-9" / "manifest.json").write_text("{")
    assert checkpoint.fault(tmp_path / "checkpoint-9").startswith("manifest cannot be read")
    for odd in ('{"step": 9, "files": []}', '{"step": 9, "files": {"a": {}}}', '{"step": 9}', "null", "[]"):
        (tmp_path / "checkpoint-9" / "manifest.json").write_text(odd)
        assert checkpoint.fault(tmp_path / "checkpoint-9").startswith("manifest cannot be read")
    (tmp_path / "checkpoint-9" / "manifest.json").write_text('{"step": 9, "files": {}}')
    assert checkpoint.fault(tmp_path / "checkpoint-9") == "manifest lists no file"


def test_folders_that_only_look_like_checkpoints_are_left_alone(tmp_path):
    write(tmp_path, 3, a="x")
    for name in ("checkpoint-final", "checkpoint-", "checkpoint-12.bak"):
        (tmp_path / name).mkdir()
    found = checkpoint.find_latest(tmp_path)
    assert (found.step, dict(found.rejected)) == (3, {})
    assert checkpoint.prune(tmp_path, 1) == []
    assert (tmp_path / "checkpoint-final").exists()


def test_prune_keeps_the_newest_and_clears_leftovers_of_writing(tmp_path):
    for step in (2, 4, 10):
        write(tmp_path, step, a="x")
    (tmp_path / ".checkpoint-12.tmp").mkdir()
    (tmp_path / "checkpoint-11").mkdir()
    assert sorted(checkpoint.prune(tmp_path, 2)) == [".checkpoint-12.tmp", "checkpoint-2"]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["checkpoint-10", "checkpoint-11", "checkpoint-4"]
    with pytest.raises(ValueError, match="keep_last=0"):
        checkpoint.prune(tmp_path, 0)


def test_a_failed_write_leaves_nothing_visible_and_names_the_cause(tmp_path):
    def full(path: Path) -> None:
        path.write_text("half")
        raise OSError(28, "No space left on device")

    write(tmp_path, 1, a="x")
    with pytest.raises(OSError, match=r"rank 0: checkpoint-2 could not be written: .*No space left"):
        checkpoint.save(tmp_path, 2, {"a": full}, single_process())
    assert checkpoint.find_latest(tmp_path).step == 1
    assert not (tmp_path / "checkpoint-2").exists()


# -- resume -------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """Eight uninterrupted steps in one process, with dropout."""
    out = tmp_path_factory.mktemp("whole")
    run_training(dist=single_process(), out=str(out), trainer=ALWAYS, dropout=0.1)
    return out


def assert_same_end(a: Path, b: Path) -> None:
    """Same weights to the bit, same losses, same rows in the same order, every step logged once."""
    left, right = load_file(a / "final.safetensors"), load_file(b / "final.safetensors")
    assert all(torch.equal(left[n], right[n]) for n in left)
    one, two = read_metrics(a), read_metrics(b)
    for key in ("step", "epoch", "loss", "lr", "order", "tokens"):
        assert [line[key] for line in one] == [line[key] for line in two], key
    assert [line["step"] for line in two] == list(range(1, 9))
    assert read_result(a).losses == read_result(b).losses


@pytest.mark.parametrize("stop", [1, 3, 4, 6])
def test_stopping_and_going_on_equals_one_go(whole, tmp_path, stop):
    """Also in the middle of epoch 1 (steps 5 to 8), which goes on with epoch 1's order."""
    options = {"out": str(tmp_path), "trainer": ALWAYS, "dropout": 0.1}
    first = run_training(dist=single_process(), stop_after=stop, **options)
    assert (first.steps, first.total_steps) == (stop, 8)
    assert not (tmp_path / "result.json").exists()
    second = run_training(dist=single_process(), **options)
    assert second.resumed_from == (stop,)
    assert second.tokens == read_result(whole).tokens
    assert_same_end(whole, tmp_path)


@pytest.mark.parametrize("optimizer", ["adafactor", "adamw", "sgd"])
def test_every_optimizer_resumes_exactly(tmp_path, optimizer):
    settings = ALWAYS | {"optimizer": optimizer, "learning_rate": 1e-3, "max_grad_norm": 1.0, "weight_decay": 0.01}
    run_training(dist=single_process(), out=str(tmp_path / "a"), trainer=settings)
    run_training(dist=single_process(), out=str(tmp_path / "b"), trainer=settings, stop_after=5)
    run_training(dist=single_process(), out=str(tmp_path / "b"), trainer=settings)
    assert_same_end(tmp_path / "a", tmp_path / "b")


def test_sigkill_of_a_rank_loses_at_most_the_steps_since_the_checkpoint(whole, tmp_path):
    """Rank 0 of 4 dies after logging step 5 (checkpoint 4); the same command ends in the bits of one uninterrupted process."""
    options = {"out": str(tmp_path), "trainer": ALWAYS, "dropout": 0.1}
    with pytest.raises(launch.WorkerError, match="rank 0: killed by SIGKILL"):
        launch.run(KIT, options | {"kill_at": 5}, processes=4, threads=1)
    assert checkpoint.find_latest(tmp_path).step == 4
    assert [line["step"] for line in read_metrics(tmp_path)] == [1, 2, 3, 4, 5]
    launch.run(KIT, options, processes=4, threads=1)
    assert read_result(tmp_path).resumed_from == (4,)
    assert_same_end(whole, tmp_path)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_a_signal_to_one_rank_checkpoints_all_and_another_world_goes_on(whole, tmp_path, number):
    """A signal to rank 0 of 2 while step 3 begins: checkpoint at 3, between the regular ones; 4 ranks then go on exactly."""
    options = {"out": str(tmp_path), "trainer": ALWAYS, "dropout": 0.1}
    with pytest.raises(Preempted, match="after step 3 of 8, checkpoint written"):
        launch.run(KIT, options | {"kill_at": 2, "kill_signal": int(number)}, processes=2, threads=1)
    assert checkpoint.find_latest(tmp_path).step == 3
    launch.run(KIT, options, processes=4, threads=1)
    assert read_result(tmp_path).resumed_from == (3,)
    assert_same_end(whole, tmp_path)


def test_torn_checkpoints_of_a_real_run_are_skipped_and_reported(whole, tmp_path):
    options = {"out": str(tmp_path), "trainer": ALWAYS, "dropout": 0.1}
    run_training(dist=single_process(), stop_after=6, **options)
    weights = tmp_path / "checkpoint-6" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    result = run_training(dist=single_process(), **options)
    assert result.resumed_from == (4,)
    assert list(result.rejected_checkpoints) == ["checkpoint-6"]
    assert "manifest says" in result.rejected_checkpoints["checkpoint-6"]
    assert_same_end(whole, tmp_path)


def test_keep_last_bounds_the_checkpoints(whole):
    assert sorted(p.name for p in whole.glob("checkpoint-*")) == ["checkpoint-2", "checkpoint-4", "checkpoint-6"]


def test_a_finished_run_computes_nothing_and_gives_the_trained_weights(whole):
    before = (whole / "metrics.jsonl").stat().st_mtime_ns
    model, encoded = tiny_model(seed=3), make_rows(40)
    args = (encoded, selection(encoded), trainer_config(**ALWAYS), make_sampler_config())
    result = train(model, *args, dist=single_process(), out_dir=whole, seed=5)
    assert result == read_result(whole)
    assert (whole / "metrics.jsonl").stat().st_mtime_ns == before
    trained = load_file(whole / "final.safetensors")
    assert all(torch.equal(p, trained[n]) for n, p in model.named_parameters())


def test_a_checkpoint_of_other_rows_or_batch_is_refused(tmp_path):
    run_training(dist=single_process(), out=str(tmp_path), stop_after=2)
    for change in ({"n": 36}, {"trainer": {"global_batch": 8}}):
        with pytest.raises(ValueError, match="use another run directory"):
            run_training(dist=single_process(), out=str(tmp_path), **change)
    assert checkpoint.find_latest(tmp_path).step == 2


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_read_only_folder_is_one_sentence(tmp_path):
    tmp_path.chmod(0o500)
    with pytest.raises(OSError, match="Permission denied"):
        run_training(dist=single_process(), out=str(tmp_path / "run"), stop_after=1)
