"""`clusterft eval FOLDER`: the evaluation stage of `run.py` on trained runs of a selection, and their record.json."""

from __future__ import annotations

import argparse
import json
import shlex
import time
from pathlib import Path

from clusterft import adaptive, evaluation, stages
from clusterft.api import check_unchanged, open_folder
from clusterft.cli.console import console, facts_table
from clusterft.config import load_frozen
from clusterft.overrides import UserError
from clusterft.records import RunRecord
from clusterft.runner import complete_record
from clusterft.selection_io import read_selection
from clusterft.store import RunStore
from clusterft.trainer import read_result


def run(args: argparse.Namespace) -> int:
    records = evaluate_folder(args.folder, args.run)
    if args.json:
        print(json.dumps([r.to_json() for r in records], indent=1, default=list))
        return 0
    for record in records:
        rows = [(f"{m.task}/{m.name}", f"{m.value:.4f} {m.unit}, n={m.n:,}") for m in record.metrics]
        console().print(facts_table(f"run {record.run_id}", rows or [("", "no evaluator is configured")]))
    return 0


def evaluate_folder(folder: Path, only: str | None) -> list[RunRecord]:
    """Records of the trained runs: those on disk as they are, the others evaluated now.

    Raises UserError if nothing was trained, and what an evaluator raises.
    """
    shown, folder = shlex.quote(str(folder)), folder.absolute()
    header = open_folder(folder).header
    check_unchanged(header)
    store = RunStore(folder / "run")
    trained = sorted(p.parents[1] for p in store.root.glob("*/train/result.json"))
    if not trained:
        raise UserError(f"{folder} holds no trained run; run `clusterft train {shown}` first")
    chosen = [p for p in trained if only in (None, p.name)]
    if not chosen:
        raise UserError(f"{folder} holds no trained run {only}; there are {', '.join(p.name for p in trained)}")
    return [_evaluated(store, run_dir, header["seconds"]) for run_dir in chosen]


def _evaluated(store: RunStore, run_dir: Path, seconds: dict[str, float]) -> RunRecord:
    done = store.read(run_dir.name)
    if done is not None and done.status == "complete":
        return done
    cfg = load_frozen(run_dir / "config.yaml")
    with store.lock(run_dir.name):
        ready = stages.prepare(cfg)
        selection = read_selection(run_dir / "selection")
        selection.check_against(ready.pool)
        started = time.perf_counter()
        metrics = evaluation.evaluate(cfg, ready, run_dir)
        record = complete_record(
            cfg,
            run_dir.name,
            selection=selection,
            pool_rows=len(ready.pool),
            seconds=seconds,
            trained=read_result(run_dir / "train"),
            metrics=metrics,
            evaluation_seconds=time.perf_counter() - started,
            reselections=adaptive.reselections(cfg, run_dir, selection),
        )
        store.write(record)
    return record
