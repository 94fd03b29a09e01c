"""One cell from configuration to record.json, on one page.

    begin (config.yaml first) ► prepare ► select ► train on W workers (► select ► train ...) ► evaluate ► record.json (last)

A run that is complete is returned as it is. A run that was interrupted goes on: features, selection, checkpoints and per-problem
results are all found again by their stages.
"""

from __future__ import annotations

import logging
import shutil
import time
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from clusterft import adaptive, evaluation, provenance, stages
from clusterft.inputs import Facts, changed_input, input_facts
from clusterft.launch import Preempted
from clusterft.records import Metric, RunRecord, Selection
from clusterft.store import RunStore, StoreError, refuse_other_config, run_id
from clusterft.trainer import TrainResult

log = logging.getLogger(__name__)


def run_one(cfg: DictConfig) -> RunRecord:
    """Runs one cell, or returns its record if it is complete.

    Raises StoreError if the directory belongs to another configuration or another process; re-raises what a stage raised, after a
    record with `status: failed` and the message was written. A preempted run leaves no record: the same command continues it.
    """
    store, name = RunStore(Path(cfg.runtime.runs_dir)), run_id(cfg)
    done = _complete(store, name, cfg)
    if done is not None and not _leftovers(cfg, store.path(name)):
        return done
    run_dir = store.begin(cfg)
    with store.lock(name):
        done = _complete(store, name, cfg)  # another process may have finished it between the look above and the lock
        if done is not None:
            _tidy(cfg, run_dir)
            return done
        try:
            record = _run_stages(cfg, run_dir, name)
        except (KeyboardInterrupt, Preempted):
            raise
        except Exception as problem:
            _note_failure(cfg, store, name, problem)
            raise
        store.write(record)
        _tidy(cfg, run_dir)
    return record


def _note_failure(cfg: DictConfig, store: RunStore, name: str, problem: Exception) -> None:
    """A record that says why. Where even that cannot be written (a full disk), the first problem is still the one to be told."""
    try:
        store.write(_record(cfg, name, "failed", error=f"{type(problem).__name__}: {problem}"))
        (store.path(name) / "error.txt").write_text("".join(traceback.format_exception(problem)), encoding="utf-8")
    except OSError as second:
        log.warning("the failure of run %s could not be recorded: %s", name, second)


def _complete(store: RunStore, name: str, cfg: DictConfig) -> RunRecord | None:
    """The record of a finished run. Raises StoreError if it was made from other files or another configuration than there are now."""
    record = store.read(name)
    if record is None or record.status != "complete":
        return None
    frozen = store.path(name) / "config.yaml"
    if frozen.exists():
        refuse_other_config(frozen, cfg)
    changed = changed_input(record.inputs)
    if changed:
        raise StoreError(
            f"run {name}: {changed}; give the new contents another name, or move {store.path(name)} away to run it again"
        )
    return record


def _leftovers(cfg: DictConfig, run_dir: Path) -> list[Path]:
    """What a complete run no longer needs: checkpoints, half-written files, and weights that nobody asked to keep.

    The weights go only where the run was begun without keep_model, too: a later look at it must not delete what was kept.
    """
    found = [*run_dir.glob("train/checkpoint-*"), *run_dir.glob("train/.checkpoint-*.tmp")]
    found += [p for p in run_dir.rglob(".*") if p.is_file() and not p.name.startswith(".lock")]
    begun = run_dir / "config.yaml"
    if not cfg.runtime.keep_model and begun.exists() and not OmegaConf.load(begun).runtime.keep_model:
        found += list(run_dir.glob("train/model"))
    return found


def _tidy(cfg: DictConfig, run_dir: Path) -> None:
    """After the record, never before it: a run killed in between is complete, one killed earlier still has all it needs."""
    for path in _leftovers(cfg, run_dir):
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink()


def _run_stages(cfg: DictConfig, run_dir: Path, name: str) -> RunRecord:
    inputs = input_facts(OmegaConf.to_container(cfg, resolve=True))
    ready = stages.prepare_for_cell(cfg)
    selection, seconds = stages.select(cfg, ready, run_dir)
    trained = adaptive.train(cfg, run_dir, ready)
    started = time.perf_counter()
    metrics = evaluation.evaluate(cfg, ready, run_dir)
    evaluation_seconds = time.perf_counter() - started
    return complete_record(
        cfg,
        name,
        selection=selection,
        pool_rows=len(ready.pool),
        seconds=seconds,
        trained=trained,
        metrics=metrics,
        evaluation_seconds=evaluation_seconds,
        reselections=adaptive.reselections(cfg, run_dir, selection),
        inputs=inputs,
    )


def complete_record(
    cfg: DictConfig,
    name: str,
    *,
    selection: Selection,
    pool_rows: int,
    seconds: Mapping[str, float],
    trained: TrainResult,
    metrics: Sequence[Metric],
    evaluation_seconds: float,
    reselections: Sequence[Mapping[str, Any]] = (),
    inputs: Facts | None = None,
) -> RunRecord:
    """The record of a run whose stages have all finished. seconds: as `stages.select` returned them; what re-selections
    (`adaptive.reselections`) cost is added."""
    seconds = adaptive.with_reselections(seconds, reselections)
    cost = {
        **seconds,
        "training_seconds": trained.wall_seconds,
        "training_cpu_seconds": trained.cpu_seconds,
        "evaluation_seconds": evaluation_seconds,
        "total_seconds": seconds["selection_seconds"] + trained.wall_seconds,
        "peak_memory_gib": trained.peak_memory_gib,
    }
    facts = selection_facts(selection, pool_rows)
    if reselections:
        facts["reselections"] = [dict(one) for one in reselections]
    return _record(
        cfg, name, "complete", selection=facts, train=trained.facts(), metrics=tuple(metrics), cost=cost, inputs=inputs
    )


def selection_facts(selection: Selection, pool_rows: int) -> dict:
    """What a table needs of a selection."""
    return {
        "method": selection.method,
        "budget": selection.budget,
        "pool_rows": pool_rows,
        "pool_fingerprint": selection.pool_fingerprint,
        "data_usage": selection.budget / pool_rows,
        "info": dict(selection.info),
    }


def _record(
    cfg: DictConfig,
    name: str,
    status: str,
    *,
    selection: dict | None = None,
    train: dict | None = None,
    metrics: tuple[Metric, ...] = (),
    cost: dict | None = None,
    error: str | None = None,
    inputs: Facts | None = None,
) -> RunRecord:
    commit, dirty = provenance.commit()
    return RunRecord(
        run_id=name,
        status=status,
        config=OmegaConf.to_container(cfg, resolve=True),
        seed=cfg.seed,
        commit=commit,
        dirty=dirty,
        packages=provenance.packages(),
        hardware=provenance.hardware(),
        selection=selection or {},
        train=train or {},
        metrics=metrics,
        cost=cost or {},
        error=error,
        inputs=inputs or {},
    )
