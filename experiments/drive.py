"""From a composed experiment to its table on the terminal: plan, run what is missing, render.

In come the composed configuration, the command line's overrides and two functions of the composition root: `preflight(cfg)` and
`run(cfg) -> RunRecord`. This module trains nothing and imports no torch, so that a full store renders in seconds.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from clusterft.records import RunRecord
from experiments.aggregate import build
from experiments.cost_model import CostModel
from experiments.plan import Plan, PlannedCell, describe, plan
from experiments.recordstore import load_records
from experiments.render import explain, write_outputs
from experiments.resolve import ROOT, Resolver, available_selectors, narrowed
from experiments.spec import ExperimentConfig, load_spec
from experiments.table import Table
from experiments.terminal import print_table

Run = Callable[[DictConfig], RunRecord]
Preflight = Callable[[DictConfig], None]


class Driver:
    """One experiment at one scale."""

    def __init__(self, cfg: DictConfig, overrides: Sequence[str]) -> None:
        scale = OmegaConf.to_container(cfg.scale, resolve=True) if cfg.scale is not None else {"name": "paper", "what": "the paper's set-up"}
        self.scale, self.scale_note = scale["name"], scale["what"]
        self.spec: ExperimentConfig = load_spec(cfg.experiment, self.scale)
        self.overrides = overrides
        self.resolve = Resolver(overrides)
        self.available = available_selectors()
        self.runs_dir = Path(cfg.runtime.runs_dir)
        self.results = ROOT / "results" / self.scale

    def plan(self) -> Plan:
        """What is complete, missing, failed; reads only the records."""
        found = load_records([self.runs_dir])
        return plan(self.spec, self.resolve, found, self.available, CostModel(measured=[r.stored.record for r in found.runs() if r.stored]))

    def wanted(self, planned: Plan, cell: int | None) -> list[PlannedCell]:
        """The runs to make now: all that are missing, those of a narrowed axis, or one cell. Raises ValueError for no such cell."""
        if cell is not None and not 0 <= cell < len(planned.cells):
            raise ValueError(f"cell={cell} is outside 0 ... {len(planned.cells) - 1}, the cells of {self.spec.id}; nothing was started")
        kept = {c.index for c in narrowed([c.cell for c in planned.cells], self.overrides)}
        chosen = [c for c in planned.cells if c.cell.index in kept and cell in (None, c.cell.index)]
        runs: dict[str | None, PlannedCell] = {}
        for one in chosen:
            if one.state in ("missing", "failed"):
                runs.setdefault(one.run_id, one)
        return list(runs.values())

    def table(self) -> Table:
        """required and complete, from the run directories of this machine only: committed results never stand in for a run."""
        return build(self.spec, self.resolve, load_records([self.runs_dir]), self.available, self.scale, self.scale_note)


def run_experiment(cfg: DictConfig, overrides: Sequence[str], run: Run, preflight: Preflight) -> None:
    """Plans, runs what is missing, renders. With `plan=true` only plans; with `cell=i` runs that cell and renders nothing.

    Raises ValueError for an impossible request before anything starts.
    """
    console = Console()
    driver = Driver(cfg, overrides)
    planned = driver.plan()
    if cfg.explain is not None:
        console.print(explain(driver.table(), *cfg.explain), markup=False)
        return
    wanted = driver.wanted(planned, cfg.cell)
    if cfg.cell is None:
        console.print(describe(planned), markup=False, highlight=False)
    if cfg.plan:
        return
    run_cells(wanted, driver.resolve, run, preflight, console)
    if cfg.cell is None:
        table = driver.table()
        written = write_outputs(table, driver.results)
        print_table(table, console)
        console.print(f"written: {', '.join(str(p.relative_to(ROOT)) for p in written)}", markup=False)


def run_cells(wanted: Sequence[PlannedCell], resolve: Resolver, run: Run, preflight: Preflight, console: Console) -> None:
    """Makes the runs one after another, with the time left as measured so far. Everything is checked before the first one."""
    if not wanted:
        return
    for one in wanted:
        preflight(resolve(one.cell.overrides)[1])
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.fields[left]}"))
    started = time.perf_counter()
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("runs", total=len(wanted), left="")
        for done, one in enumerate(wanted, start=1):
            bar.update(task, description=one.cell.name)
            record = run(resolve(one.cell.overrides)[1])
            seconds = (time.perf_counter() - started) / done * (len(wanted) - done)
            bar.update(task, advance=1, left=f"about {seconds / 60:.0f} min left")
            console.print(f"[{done}/{len(wanted)}] {one.cell.name}: {summary(record)}", markup=False, highlight=False)


def summary(record: RunRecord) -> str:
    """One line about a finished run."""
    selection, cost = record.selection, record.cost
    scores = ", ".join(f"{m.task} {m.name} {_shown(m.value, m.unit)}" for m in record.metrics)
    rows = f"{selection['budget']} of {selection['pool_rows']} rows"
    return f"{rows}, selection {cost['selection_seconds']:.1f} s, training {cost['training_seconds']:.1f} s, {scores}"


def _shown(value: float, unit: Any) -> str:
    return f"{100 * value:.1f} %" if unit == "fraction" else f"{value:.4f} nats"
