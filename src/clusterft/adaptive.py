"""Training with re-selection: segments of training alternate with selections by the model as it then is.

    train steps 0 ... t-1 ► checkpoint-t ► features, clusters, selection/1 ► train steps t ... ► checkpoint-2t ► selection/2 ► ...

In come the configuration and a run directory with its first selection; out come a trained model under `train` and one folder a
re-selection under `selection`. Without `sampler.reselect_every_*` there is one segment, and this is the training stage as it always is.

Every part is a stage that restarts by itself and leaves a marker: a checkpoint at the segment's end, or the selection's header.json.
Weights are handed over through the checkpoint, rows through the selection's files; the ranks only read. Which part comes next is read
off the newest whole checkpoint, so a run that was killed anywhere goes on there and ends in the same bits.
"""

from __future__ import annotations

import json
import logging
import shutil
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from omegaconf import DictConfig
from safetensors.torch import load_file
from torch import nn

from clusterft import checkpoint, stages
from clusterft.atomic import write_atomic
from clusterft.config import load_frozen
from clusterft.distributed import Dist, single_process
from clusterft.feature_context import FeatureContext
from clusterft.features import FeatureStore, compute
from clusterft.interfaces import Feature
from clusterft.records import Selection
from clusterft.row_io import write_rows
from clusterft.seeding import generator
from clusterft.segments import Segment, check_reselection, period, segments, selection_folder
from clusterft.selection_io import read_selection, write_selection
from clusterft.store import StoreError
from clusterft.trainer import TrainResult, is_finished, read_result

COST = "cost.json"
log = logging.getLogger(__name__)


def train(cfg: DictConfig, run_dir: Path, ready: stages.Prepared | None = None) -> TrainResult:
    """The training stage of a run whose first selection is written, with its re-selections. Goes on where it was interrupted.

    ready: the prepared pool, loaded here when it is needed and not given. Raises ValueError for settings that do not fit, StoreError
    for a selection that is gone, launch.WorkerError and Preempted from the ranks.
    """
    check_reselection(cfg.sampler, stages.make_selector(cfg), epochs=cfg.trainer.epochs)
    first = read_selection(run_dir / "selection")
    parts = segments(cfg.sampler, epochs=cfg.trainer.epochs, rows=first.budget, global_batch=cfg.trainer.global_batch)
    at = _steps_done(run_dir, parts)
    for part in parts[_part_of(at, parts) :]:
        if part.number and at == part.begin:
            ready = ready or stages.prepare(cfg)
            reselect(cfg, ready, run_dir, part, rows=first.budget)
        stages.run_on_workers(
            cfg,
            "train",
            processes=cfg.runtime.processes,
            threads=cfg.runtime.threads_per_process,
            run_dir=run_dir,
            segment=part.number,
            begin_step=part.begin,
            until_step=part.end,
        )
        at = part.end
    return read_result(run_dir / "train")


def _steps_done(run_dir: Path, parts: Sequence[Segment]) -> int:
    """Global steps behind the newest whole checkpoint. Not looked up where there is one segment: training finds it itself."""
    if len(parts) == 1:
        return 0
    if is_finished(run_dir / "train"):
        return parts[-1].end
    return checkpoint.find_latest(run_dir / "train").step


def _part_of(step: int, parts: Sequence[Segment]) -> int:
    """Which segment comes next after `step` steps; the last one for a finished training."""
    return next((part.number for part in parts if step < part.end), parts[-1].number)


def reselect(cfg: DictConfig, ready: stages.Prepared, run_dir: Path, part: Segment, *, rows: int) -> None:
    """Writes the selection of segment `part` from the model at checkpoint-`part.begin`, unless that very one is there.

    Features are computed by as many processes as the first selection's and dropped afterwards: no other run has this model. Raises
    StoreError if the checkpoint is not whole, and what a feature pass or `choose` raises.
    """
    folder, saved = selection_folder(run_dir, part.number), _saved_at(run_dir, part.begin)
    weights = weights_name(saved)
    if (folder / "header.json").exists():
        if read_selection(folder).info["reselection"]["weights_sha256"] == weights:
            return shutil.rmtree(folder / "features", ignore_errors=True)  # there only if it was killed just before this
        log.warning("%s was made by other weights than those of %s; choosing anew", folder, saved.name)
        (folder / "header.json").unlink()
    runtime, made_at = cfg.runtime, {"segment": part.number, "step": part.begin}
    layout = {"processes": runtime.feature_processes, "threads": runtime.feature_threads, "run_dir": run_dir}
    stages.run_on_workers(cfg, "clusterft.adaptive:features_entry", **layout, **made_at)
    selector = stages.make_selector(cfg)
    have = compute(selector.feature_specs(), current_context(cfg, ready, single_process(runtime.device), saved), _store(folder))
    started, cpu_started = time.perf_counter(), time.process_time()
    chosen = selector.choose(ready.pool, have, rows, generator(cfg.seed, "choose", part.number))
    seconds, cpu_seconds = time.perf_counter() - started, time.process_time() - cpu_started
    before = read_selection(selection_folder(run_dir, part.number - 1))
    facts = made_at | {"weights_sha256": weights, "rows_of_selection_before": len(set(chosen.ids) & set(before.ids))}
    write_atomic(folder / COST, json.dumps(_cost(list(have.values()), seconds, cpu_seconds), indent=1) + "\n")
    write_rows(stages.selected_rows(ready, chosen), folder)
    write_selection(replace(chosen, seed=cfg.seed, info=dict(chosen.info) | {"reselection": facts}), folder)
    shutil.rmtree(folder / "features")


def features_entry(*, dist: Dist, config_path: str, segment: int, step: int) -> None:
    """One rank of a re-selection's feature pass: the selector's features with the weights of checkpoint-`step`."""
    cfg, run_dir = load_frozen(Path(config_path)), Path(config_path).parent
    context = current_context(cfg, stages.prepare(cfg), dist, _saved_at(run_dir, step))
    compute(stages.make_selector(cfg).feature_specs(), context, _store(selection_folder(run_dir, segment)))


def current_context(cfg: DictConfig, ready: stages.Prepared, dist: Dist, saved: Path) -> FeatureContext:
    """What extractors see in the middle of training: the run's model with the weights of the checkpoint `saved`.

    The weights' own hash is part of every feature's key.
    """

    def load() -> Any:
        model = stages.model_for(cfg, device=str(dist.device))
        put_weights(model, saved)
        return model

    return replace(stages.feature_context(cfg, ready, dist), load_model=load, weights=weights_name(saved))


def put_weights(model: nn.Module, saved: Path) -> None:
    """Copies the weights of a checkpoint into the trainable parameters. Raises ValueError if it holds other ones."""
    tensors, parameters = load_file(saved / "model.safetensors"), dict(model.named_parameters())
    odd = tensors.keys() ^ {name for name, p in parameters.items() if p.requires_grad}
    if odd:
        raise ValueError(f"{saved}: its parameters are not those of this model, for example {min(odd)}")
    with torch.no_grad():
        for name, tensor in tensors.items():
            parameters[name].copy_(tensor)


def weights_name(saved: Path) -> str:
    """SHA-256 of the weights in a checkpoint, as its manifest has it."""
    return checkpoint.listed_files(saved)["model.safetensors"]["sha256"]


def _saved_at(run_dir: Path, step: int) -> Path:
    folder = run_dir / "train" / f"checkpoint-{step}"
    problem = checkpoint.fault(folder)
    if problem is not None:
        raise StoreError(f"{folder} cannot be used to choose anew: {problem}; run the same command again, which trains up to it")
    return folder


def _store(folder: Path) -> FeatureStore:
    return FeatureStore(folder / "features")


def _cost(have: Sequence[Feature], choose_seconds: float, choose_cpu_seconds: float) -> dict[str, float]:
    """Seconds and passes over single rows of one re-selection, as measured when its features were computed."""
    costs = [feature.cost for feature in have]
    feature_seconds = sum(c.wall_seconds for c in costs)
    return {
        "feature_seconds": feature_seconds,
        "choose_seconds": choose_seconds,
        "selection_seconds": feature_seconds + choose_seconds,
        "selection_cpu_seconds": sum(c.cpu_seconds or 0.0 for c in costs) + choose_cpu_seconds,
        "forward_passes": sum(c.forward_passes or 0.0 for c in costs),
        "backward_passes": sum(c.backward_passes or 0.0 for c in costs),
    }


def reselections(cfg: DictConfig, run_dir: Path, first: Selection) -> list[dict[str, Any]]:
    """What the record keeps of each re-selection of a finished training: step, rows in common with the one before, clusters, cost."""
    if period(cfg.sampler) is None:
        return []
    parts = segments(cfg.sampler, epochs=cfg.trainer.epochs, rows=first.budget, global_batch=cfg.trainer.global_batch)
    found, seen = [], set(first.ids)
    for part in parts[1:]:
        folder = selection_folder(run_dir, part.number)
        selection = read_selection(folder)
        seen |= set(selection.ids)
        info = dict(selection.info)
        cost = json.loads((folder / COST).read_text(encoding="utf-8"))
        found.append(info.pop("reselection") | {"info": info, "cost": cost, "distinct_rows_so_far": len(seen)})
    return found


def with_reselections(seconds: Mapping[str, float], made: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """What choosing cost over a whole run: `seconds` of the first selection (`stages.select`) plus every re-selection's."""
    total = dict(seconds)
    for one in made:
        for name, value in one["cost"].items():
            total[name] += value
    return total
