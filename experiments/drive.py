"""From a composed experiment to its table on the terminal: plan, run what is missing, render.

In come the composed configuration, the command line's overrides and three functions of the composition root: `preflight(cfg)`,
`run(cfg) -> RunRecord` and `measure(cfg, artifacts)`. This module trains nothing and imports no torch, so that a full store renders in seconds.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from hydra import compose
from omegaconf import DictConfig, OmegaConf
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from clusterft.records import RunRecord
from clusterft.store import RunStore
from experiments.analysis import make_table
from experiments.cost_model import CostModel, hardware_for
from experiments.plan import Plan, PlannedCell, combine, describe, plan
from experiments.recordstore import Records, export_records, load_records
from experiments.render import explain
from experiments.resolve import ROOT, Resolver, available_selectors, narrowed
from experiments.results import check_results, write_results
from experiments.spec import ExperimentConfig, load_spec, override_key
from experiments.table import Table
from experiments.terminal import print_table

ALL = "all"
SHARED = ("experiment", "scale")
"""Overrides under which other tables are planned when a table tells what it shares with them."""

Run = Callable[[DictConfig], RunRecord]
Preflight = Callable[[DictConfig], None]
Measure = Callable[[DictConfig, Sequence[str]], None]


class Driver:
    """One experiment at one scale."""

    def __init__(self, cfg: DictConfig, overrides: Sequence[str]) -> None:
        scale = (
            OmegaConf.to_container(cfg.scale, resolve=True)
            if cfg.scale is not None
            else {"name": "paper", "what": "the paper's set-up"}
        )
        self.scale, self.scale_note = scale["name"], scale["what"]
        self.spec: ExperimentConfig = load_spec(cfg.experiment, self.scale)
        self.overrides = list(overrides)
        self.resolve = Resolver(overrides)
        self.available = available_selectors()
        self.runs_dir = Path(cfg.runtime.runs_dir)
        self.hardware = hardware_for(cfg.runtime.device)
        self.results = ROOT / "results" / self.scale

    def plan(self, records: Records) -> Plan:
        """What is complete, missing, failed; reads only the records."""
        cost = CostModel(self.hardware, measured=[run.stored.record for run in records.runs() if run.stored])
        return plan(self.spec, self.resolve, records, self.available, cost)

    def wanted(self, planned: Plan, cell: int | None) -> list[PlannedCell]:
        """The runs to make now: all that are missing, those of a narrowed axis, or one cell. Raises ValueError for no such cell."""
        if cell is not None and not 0 <= cell < len(planned.cells):
            raise ValueError(
                f"cell={cell} is outside 0 ... {len(planned.cells) - 1}, the cells of {self.spec.id}; nothing was started"
            )
        kept = {c.index for c in narrowed([c.cell for c in planned.cells], self.overrides)}
        chosen = [c for c in planned.cells if c.cell.index in kept and cell in (None, c.cell.index)]
        runs: dict[str | None, PlannedCell] = {}
        for one in chosen:
            if one.state in ("missing", "failed"):
                runs.setdefault(one.run_id, one)
        return list(runs.values())

    def table(self, folder: Path) -> Table:
        """required and complete, from the records below `folder`: of a real run, this machine's run directories, never committed results."""
        return make_table(self.spec, self.resolve, load_records([folder]), self.available, self.scale, self.scale_note)


def drivers(cfg: DictConfig, overrides: Sequence[str]) -> list[Driver]:
    """One driver, or one for each member of an experiment that stands for several."""
    if cfg.experiment.kind != "all":
        return [Driver(cfg, overrides)]
    found = []
    for member in cfg.experiment.members:
        own = [f"+experiment={member}" if override_key(o) == "experiment" else o for o in overrides]
        found.append(Driver(compose("config", overrides=own), own))
    return found


def run_experiment(cfg: DictConfig, overrides: Sequence[str], run: Run, preflight: Preflight, measure: Measure) -> None:
    """Plans, runs what is missing, renders. `plan=true` only plans; `cell=i` runs that cell and renders nothing; `explain=[line,column]`
    names the runs behind a value; `check=true` renders from the committed records and exits 1 if a committed result would change.

    Raises ValueError for an impossible request before anything starts.
    """
    console = Console()
    every = drivers(cfg, overrides)
    if cfg.check:
        check(every, console)
        return
    if cfg.explain is not None:
        console.print(explain(every[0].table(every[0].runs_dir), *cfg.explain), markup=False)
        return
    planned = [one.plan(load_records([one.runs_dir])) for one in every]
    wanted = [one.wanted(its, cfg.cell) for one, its in zip(every, planned, strict=True)]
    if cfg.plan and len(every) == 1:
        planned = [combine([planned[0], *plans_of_others(every[0])]).plans[every[0].spec.id]]
    if cfg.cell is None:
        show_plans(planned, console)
    if cfg.plan:
        return
    for one, cells in zip(every, wanted, strict=True):
        run_cells(cells, one, run, preflight, console)
    if cfg.cell is None:
        for one in every:
            finish(one, measure, console)


def plans_of_others(one: Driver) -> list[Plan]:
    """The plans of all other tables and figures at this scale: which of them share a run with this one."""
    whole = [f"+experiment={ALL}" if override_key(o) == "experiment" else o for o in one.overrides if override_key(o) in SHARED]
    records = load_records([one.runs_dir])
    return [other.plan(records) for other in drivers(compose("config", overrides=whole), whole) if other.spec.id != one.spec.id]


def show_plans(planned: Sequence[Plan], console: Console) -> None:
    for one in planned:
        console.print(describe(one), markup=False, highlight=False)
    if len(planned) > 1:
        whole = combine(planned)
        console.print(
            f"all: {whole.cells} cells, {whole.unique_runs} runs, {whole.shared_runs} shared between tables, about {whole.hours:.1f} h to run",
            markup=False, highlight=False,
        )  # fmt: skip


def finish(one: Driver, measure: Measure, console: Console) -> None:
    """Makes the artifacts that the table reads, writes table and records, prints the table."""
    for planned in one.plan(load_records([one.runs_dir])).artifacts_to_make:
        measure(one.resolve(planned.cell.overrides)[1], planned.artifacts)
    records = load_records([one.runs_dir])
    table = one.table(one.runs_dir)
    written = write_results(table, one.spec, one.results)
    export_records(records, one.plan(records).run_ids, one.results / "records")
    print_table(table, console)
    console.print(f"written: {', '.join(str(p.relative_to(ROOT)) for p in written)}", markup=False)


def check(every: Sequence[Driver], console: Console) -> None:
    """Exits 1, naming the files, if rendering the committed records gives anything but the committed results."""
    changed = [line for one in every for line in check_results(one.table(one.results / "records"), one.spec, one.results)]
    for line in changed:
        console.print(line, markup=False)
    if changed:
        sys.exit(1)
    console.print(f"{len(every)} committed results are what their committed records give", markup=False)


def run_cells(wanted: Sequence[PlannedCell], driver: Driver, run: Run, preflight: Preflight, console: Console) -> None:
    """Makes the runs one after another, with the time left as measured so far. Everything is checked before the first one."""
    resolve, store = driver.resolve, RunStore(driver.runs_dir)
    wanted = [one for one in wanted if not is_complete(store, one.run_id)]
    if not wanted:
        return
    for one in wanted:
        preflight(resolve(one.cell.overrides)[1])
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.fields[left]}"),
    )
    started = time.perf_counter()
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("runs", total=len(wanted), left="")
        for done, one in enumerate(wanted, start=1):
            bar.update(task, description=one.cell.name)
            record = run(resolve(one.cell.overrides)[1])
            seconds = (time.perf_counter() - started) / done * (len(wanted) - done)
            bar.update(task, advance=1, left=f"about {seconds / 60:.0f} min left")
            console.print(f"[{done}/{len(wanted)}] {one.cell.name}: {summary(record)}", markup=False, highlight=False)


def is_complete(store: RunStore, run_id: str | None) -> bool:
    """An earlier experiment of the same command may have made it."""
    record = store.read(run_id) if run_id is not None else None
    return record is not None and record.status == "complete"


def summary(record: RunRecord) -> str:
    """One line about a finished run."""
    selection, cost = record.selection, record.cost
    scores = ", ".join(f"{m.task} {m.name} {_shown(m.value, m.unit)}" for m in record.metrics)
    rows = f"{selection['budget']} of {selection['pool_rows']} rows"
    return f"{rows}, selection {cost['selection_seconds']:.1f} s, training {cost['training_seconds']:.1f} s, {scores}"


def _shown(value: float, unit: Any) -> str:
    return f"{100 * value:.1f} %" if unit == "fraction" else f"{value:.4f} nats"
