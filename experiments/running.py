"""Makes runs one after another and tells a person how far it is.

In come jobs, each a run with the way to its configuration, and the composition root's `run` and `preflight`; out comes a sentence for each
run that failed. Nothing here knows tables.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from omegaconf import DictConfig
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from clusterft.records import RunRecord
from clusterft.store import RunStore

Run = Callable[[DictConfig], RunRecord]
Preflight = Callable[[DictConfig], None]

IN_A_ROW = 3
"""Runs that may fail one after another before the command stops."""

BAR = (
    TextColumn("{task.description}"),
    BarColumn(),
    MofNCompleteColumn(),
    TimeElapsedColumn(),
    TextColumn("{task.fields[left]}"),
)


@dataclass(frozen=True)
class Job:
    """A run to make. `config` composes when it is called: a long list of runs holds no configurations."""

    name: str
    run_id: str | None
    config: Callable[[], DictConfig]


def run_jobs(jobs: Sequence[Job], runs_dir: Path, run: Run, preflight: Preflight, console: Console) -> list[str]:
    """Makes the runs one after another, with the time left as measured so far. Everything is checked before the first one.

    Returns a sentence for each run that failed and left a record that says so. Of one job alone, and after `IN_A_ROW` that failed one after
    another (the fault is not the cell's then), the error is raised.
    """
    for job in jobs:
        preflight(job.config())
    failed: list[str] = []
    in_a_row = 0
    started = time.perf_counter()
    with Progress(*BAR, console=console, transient=True) as bar:
        task = bar.add_task("runs", total=len(jobs), left="", visible=bool(jobs))
        for done, job in enumerate(jobs, start=1):
            bar.update(task, description=job.name)
            began = time.time()
            try:
                said = summary(run(job.config()))
                in_a_row = 0
            except (RuntimeError, ValueError) as problem:
                in_a_row += 1
                if in_a_row == IN_A_ROW or len(jobs) == 1 or not failed_since(RunStore(runs_dir), job.run_id, began):
                    raise
                said = f"failed: {problem}"
                failed.append(f"{job.name} (run {job.run_id}) failed: {problem}")
            seconds = (time.perf_counter() - started) / done * (len(jobs) - done)
            bar.update(task, advance=1, left=f"about {seconds / 60:.0f} min left")
            console.print(f"[{done}/{len(jobs)}] {job.name}: {said}", markup=False, highlight=False)
    return failed


def failed_since(store: RunStore, run_id: str | None, began: float) -> bool:
    """Whether the run has written down that it failed. A run that was asked to stop has not."""
    if run_id is None:
        return False
    record = store.read(run_id)
    return record is not None and record.status == "failed" and (store.path(run_id) / "record.json").stat().st_mtime >= began - 1


def summary(record: RunRecord) -> str:
    """One line about a finished run."""
    selection, cost = record.selection, record.cost
    scores = ", ".join(f"{m.task} {m.name} {_shown(m.value, m.unit)}" for m in record.metrics)
    rows = f"{selection['budget']} of {selection['pool_rows']} rows"
    return f"{rows}, selection {cost['selection_seconds']:.1f} s, training {cost['training_seconds']:.1f} s, {scores}"


def _shown(value: float, unit: Any) -> str:
    return f"{100 * value:.1f} %" if unit == "fraction" else f"{value:.4f} nats"
