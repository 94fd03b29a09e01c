"""Re-selection: when it happens, that nothing but the rows changes hands, and that a killed run ends in the same bits."""

from __future__ import annotations

import json
import signal
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from adaptive_kit import MOMENTS, ROOT, adaptive_cfg, trained
from composed import shared_cache
from forked_runs import ForkingServer
from safetensors.torch import load_file
from training_kit import rows, run_training, sampler_config, selection, tiny_model, trainer_config

from clusterft import adaptive, checkpoint, stages
from clusterft.cli.training import copy_selection
from clusterft.cluster import ClusterSelector
from clusterft.distributed import single_process
from clusterft.feature_store import identity_of
from clusterft.metrics_log import read_metrics
from clusterft.preflight import preflight
from clusterft.segments import Segment, check_reselection, segments, selection_folder
from clusterft.selection_io import read_selection
from clusterft.train_setup import make_sampler
from clusterft.trainer import read_result, train

LAYOUT = {"epochs": 2, "rows": 10, "global_batch": 4}  # 3 steps an epoch, the third of 2 rows


def limits(**sampler) -> list[tuple[int, int]]:
    found = segments(sampler_config(**sampler), **LAYOUT)
    assert [part.number for part in found] == list(range(len(found)))
    return [(part.begin, part.end) for part in found]


def test_segments_by_hand():
    assert limits() == [(0, 6)]
    assert limits(reselect_every_epochs=1) == [(0, 3), (3, 6)]
    assert limits(reselect_every_steps=2) == [(0, 2), (2, 4), (4, 6)]
    assert limits(reselect_every_steps=4) == [(0, 4), (4, 6)]
    assert limits(reselect_every_steps=5) == [(0, 5), (5, 6)]


@pytest.mark.parametrize(
    ("sampler", "words"),
    [
        ({"reselect_every_epochs": 1, "reselect_every_steps": 2}, "both set; set one of them to null"),
        ({"reselect_every_steps": 0}, "reselect_every_steps=0 must be at least 1"),
        ({"reselect_every_steps": 6}, "reselect_every_steps=6 is never reached: training has 6 steps, 3 an epoch, on 10 rows"),
        ({"reselect_every_epochs": 2}, "reselect_every_epochs=2 is never reached"),
    ],
)
def test_periods_that_make_no_sense_are_refused(sampler, words):
    with pytest.raises(ValueError, match=words):
        limits(**sampler)


@pytest.mark.parametrize("selector", ["random", "full", "ifd", "s2l"])
def test_only_selectors_that_follow_the_model_may_choose_anew(tmp_path, selector):
    with pytest.raises(ValueError, match=r"does not follow the model in training.*use selector=cluster"):
        preflight(adaptive_cfg(tmp_path, tmp_path, f"selector={selector}", "sampler.reselect_every_steps=2"))


def test_too_few_epochs_are_refused_before_any_work(tmp_path):
    with pytest.raises(ValueError, match=r"never reached in trainer\.epochs=1"):
        preflight(adaptive_cfg(tmp_path, tmp_path, "sampler.reselect_every_epochs=1"))
    check_reselection(sampler_config(reselect_every_epochs=1), ClusterSelector, epochs=2)


# -- the hand-over inside training --------------------------------------------------------------------------------------


def part_of_training(out: Path, chosen, encoded, **steps: int):
    model = tiny_model()
    cfg = trainer_config(checkpoint_every_steps=None)
    result = train(model, encoded, chosen, cfg, sampler_config(), dist=single_process(), out_dir=out, seed=5, **steps)
    return model, result


def test_handing_over_to_the_same_rows_changes_no_bit(tmp_path):
    """Optimiser state, schedule, place in the epoch and dropout go on: only the rows are exchanged. Step 3 is inside epoch 0."""
    encoded = rows(40)
    chosen = selection(encoded)
    whole, once = part_of_training(tmp_path / "whole", chosen, encoded)
    part_of_training(tmp_path / "parts", chosen, encoded, stop_after=3)
    part_of_training(tmp_path / "parts", chosen, encoded, begin_step=3, stop_after=6)
    model, result = part_of_training(tmp_path / "parts", chosen, encoded, begin_step=6, stop_after=8)
    assert all(torch.equal(a, b) for a, b in zip(whole.parameters(), model.parameters(), strict=True))
    assert result.losses == once.losses
    assert (result.steps, result.total_steps, result.resumed_from) == (8, 8, ())


def test_after_the_hand_over_steps_hold_the_new_rows_at_the_same_place(tmp_path):
    """Also when training is interrupted once more within the second segment."""
    first, second = rows(40), [replace(row, id=f"new{row.id}") for row in rows(40, seed=1)]
    one, two = selection(first), selection(second)
    part_of_training(tmp_path / "a", one, first, stop_after=3)
    _, result = part_of_training(tmp_path / "a", two, second, begin_step=3, stop_after=8)
    for n, (chosen, encoded, steps) in enumerate([(one, first, {"stop_after": 3}), *[(two, second, {"begin_step": 3})] * 2]):
        part_of_training(tmp_path / "b", chosen, encoded, **steps | ({"stop_after": 5} if n == 1 else {}))
    assert read_result(tmp_path / "b").losses == result.losses
    assert read_result(tmp_path / "b").resumed_from == (5,)
    plans = []
    for chosen, encoded in ((one, first), (two, second)):
        sampler = make_sampler(chosen, encoded, trainer_config(), sampler_config(), single_process(), 5)
        plans.append([sampler.plan(epoch)[at] for epoch in (0, 1) for at in range(4)])
    tokens = [sum(len(first[i]) for i in step) for step in plans[0][:3]] + [sum(len(second[i]) for i in s) for s in plans[1][3:]]
    lines = read_metrics(tmp_path / "a")
    assert [line["tokens"] for line in lines] == tokens
    assert [line["rows"] for line in lines] == [12, 12, 12, 4] * 2
    assert [line["step"] for line in lines] == list(range(1, 9))


def test_other_numbers_of_rows_and_missing_checkpoints_are_refused(tmp_path):
    encoded = rows(40)
    with pytest.raises(ValueError, match="takes over at step 3, but the newest whole checkpoint is of step 0"):
        part_of_training(tmp_path, selection(encoded), encoded, begin_step=3)
    part_of_training(tmp_path, selection(encoded), encoded, stop_after=3)
    with pytest.raises(ValueError, match="use another run directory"):
        part_of_training(tmp_path, selection(encoded[:36]), encoded[:36], begin_step=3)
    with pytest.raises(ValueError, match=r"train\(\) keeps one selection"):
        run_training(dist=single_process(), out=str(tmp_path / "x"), sampler={"reselect_every_steps": 2})


# -- whole runs ---------------------------------------------------------------------------------------------------------

EVERY = "sampler.reselect_every_steps=2"


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    """A smoke run of four steps: one re-selection after the second, in one process."""
    return trained(tmp_path_factory.mktemp("adaptive"), shared_cache(), EVERY)


def weights(run_dir: Path) -> dict[str, torch.Tensor]:
    return load_file(run_dir / "train/model/model.safetensors")


def same_end(a: Path, b: Path) -> bool:
    """The same weights to the bit, the same second selection, the same losses."""
    left, right = weights(a), weights(b)
    header = [(p / "selection/1/header.json").read_bytes() for p in (a, b)]
    same = left.keys() == right.keys() and all(torch.equal(left[n], right[n]) for n in left)
    return same and header[0] == header[1] and read_result(a / "train").losses == read_result(b / "train").losses


@pytest.mark.slow
def test_a_run_chooses_anew_with_its_own_weights_and_keeps_as_many_rows(run, tmp_path):
    cfg = adaptive_cfg(run.parent, shared_cache(), EVERY)
    first, second = (read_selection(selection_folder(run, n)) for n in (0, 1))
    result = read_result(run / "train")
    assert (result.steps, result.resumed_from) == (-(-first.budget // 8), ()) == (4, ())
    assert first.budget == second.budget and first.info["objective"] != second.info["objective"]
    assert second.weights.mean() == pytest.approx(1, abs=1e-12)
    assert sorted(p.name for p in (run / "selection").iterdir() if p.is_dir()) == ["1"]
    assert not (run / "selection/1/features").exists()
    made = adaptive.reselections(cfg, run, first)
    assert [(one["segment"], one["step"]) for one in made] == [(1, 2)]
    assert made[0]["rows_of_selection_before"] == len(set(first.ids) & set(second.ids))
    assert made[0]["distinct_rows_so_far"] == len(set(first.ids) | set(second.ids))
    n = len(stages.prepare(cfg).pool)
    assert made[0]["cost"]["forward_passes"] == n and made[0]["cost"]["backward_passes"] == 0
    seconds = dict.fromkeys(made[0]["cost"], 1.0)
    total = adaptive.with_reselections(seconds, made)
    assert total == {name: 1.0 + value for name, value in made[0]["cost"].items()}
    assert total["selection_seconds"] - 1 == pytest.approx(total["feature_seconds"] + total["choose_seconds"] - 2)
    copy_selection(run / "selection", tmp_path / "copy")
    assert read_selection(tmp_path / "copy").ids == first.ids and not (tmp_path / "copy/1").exists()


@pytest.mark.slow
def test_the_proxies_of_a_re_selection_are_those_of_the_weights_at_that_step(run, tmp_path):
    """The key of a feature tells checkpoints apart, and the model in the feature pass has the checkpoint's weights."""
    cfg = adaptive_cfg(tmp_path, shared_cache(), EVERY)
    ready = stages.prepare(cfg)
    encoded = stages.selected_rows(ready, read_selection(run / "selection"))
    model = stages.model_for(cfg, device="cpu")
    untrained = {name: p.detach().clone() for name, p in model.named_parameters()}
    seed = stages.seed_hash(cfg.seed, "train")
    chosen, one = read_selection(run / "selection"), single_process()
    train(model, encoded, chosen, cfg.trainer, cfg.sampler, dist=one, out_dir=tmp_path, seed=seed, stop_after=2)
    saved = checkpoint.find_latest(tmp_path).path
    assert read_selection(run / "selection/1").info["reselection"]["weights_sha256"] == adaptive.weights_name(saved)
    context = adaptive.current_context(cfg, ready, one, saved)
    current = dict(context.load_model().named_parameters())
    assert all(torch.equal(p, current[name]) for name, p in model.named_parameters())
    assert not all(torch.equal(p, current[name]) for name, p in untrained.items())
    (spec,) = stages.make_selector(cfg).feature_specs()
    plain = stages.feature_context(cfg, ready, one)
    assert identity_of(spec, context) == identity_of(spec, plain) | {"weights": adaptive.weights_name(saved)}


@pytest.mark.slow
def test_four_processes_give_the_bits_of_one(run, tmp_path):
    layout = ["runtime.processes=4", "runtime.feature_processes=2"]
    assert same_end(run, trained(tmp_path, shared_cache(), EVERY, *layout))


@pytest.mark.slow
def test_sigkill_during_and_after_a_re_selection_gives_the_uninterrupted_end(run, tmp_path):
    with ForkingServer() as server, open(tmp_path / "log", "w+", encoding="utf-8") as log:
        for moment in MOMENTS:
            command = [str(ROOT / "tests/adaptive_kit.py"), moment, str(tmp_path), str(shared_cache()), EVERY]
            assert server.launch(command, {}, log.fileno()).wait(240) == -signal.SIGKILL, log.read()
    assert not list(tmp_path.glob("*/train/result.json"))
    assert same_end(run, trained(tmp_path, shared_cache(), EVERY))


@pytest.mark.slow
def test_a_selection_made_by_other_weights_is_made_again(run, tmp_path):
    """Not trusted because it lies there: the folder of another run, say."""
    before = trained(tmp_path, shared_cache(), EVERY)
    header = before / "selection/1/header.json"
    forged = json.loads(header.read_text())
    forged["info"]["reselection"]["weights_sha256"] = "0" * 64
    header.write_text(json.dumps(forged))
    cfg = adaptive_cfg(tmp_path, shared_cache(), EVERY)
    adaptive.reselect(cfg, stages.prepare(cfg), before, Segment(1, 2, 4), rows=forged["budget"])
    assert header.read_bytes() == (run / "selection/1/header.json").read_bytes()
