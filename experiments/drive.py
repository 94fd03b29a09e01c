"""From a composed experiment to its table on the terminal: plan, run what is missing, render.

In come the composed configuration, the command line's overrides and three functions of the composition root: `preflight(cfg)`,
`run(cfg) -> RunRecord` and `measure(cfg, artifacts)`. This module trains nothing and imports no torch, so that a full store renders in seconds.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from hydra import compose
from omegaconf import DictConfig, OmegaConf
from rich.console import Console

from clusterft.memory_plan import memory_lines
from experiments.analysis import make_table
from experiments.committed import check, render, why_kept
from experiments.composing import Composer
from experiments.cost_model import CostModel, hardware_for
from experiments.pages import write_pages
from experiments.plan import Plan, PlannedCell, combine, describe, plan
from experiments.recordstore import Records, export_artifacts, export_records, load_records
from experiments.render import explain
from experiments.resolve import DROPPED, ROOT, Resolver, available_selectors, experiment_file, narrowed, settings
from experiments.results import refuse_unwritable, write_results
from experiments.running import Job, Preflight, Run, run_jobs
from experiments.spec import ExperimentConfig, artifacts_of, expand, load_spec, override_key
from experiments.status import show_status
from experiments.table import Table
from experiments.terminal import print_table

ALL = "all"
RESULTS = "results"
"""The folder that the pages are about; tables in another one stand for themselves."""
SETTINGS = "settings of the command line"
SHARED = ("experiment", "scale")
"""Overrides under which other tables are planned when a table tells what it shares with them."""

Measure = Callable[[DictConfig, Sequence[str]], None]


class Driver:
    """One experiment at one scale.

    cfg: what the command line composes; node: the experiment's own part of it, `cfg.experiment` unless it is a member of another one.
    """

    def __init__(self, cfg: DictConfig, overrides: Sequence[str], composer: Composer, node: Any = None) -> None:
        scale = (
            OmegaConf.to_container(cfg.scale, resolve=True)
            if cfg.scale is not None
            else {"name": "paper", "what": "the paper's set-up"}
        )
        self.scale, self.scale_note = scale["name"], ". ".join(scale[key] for key in ("what", "shows") if scale.get(key))
        self.spec: ExperimentConfig = load_spec(node if node is not None else cfg.experiment, self.scale)
        self.overrides = list(overrides)
        self.resolve = Resolver(overrides, composer)
        self.available = available_selectors()
        self.runs_dir = Path(cfg.runtime.runs_dir)
        self.hardware = hardware_for(cfg.runtime.device)
        if not str(cfg.runtime.results_dir).strip():
            raise ValueError("runtime.results_dir is empty; name a folder, or leave it out for results/")
        self.results = ROOT / Path(cfg.runtime.results_dir).expanduser() / self.scale
        self.has_pages = self.results.parent == ROOT / RESULTS
        self.settings = settings(overrides)

    def plan(self, records: Records, *, costs: bool = True) -> Plan:
        """What is complete, missing, failed; reads only the records. costs: with estimates for what is missing."""
        measured = [run.stored.record for run in records.runs() if run.stored] if costs else []
        cost = CostModel(self.hardware, measured=measured) if costs else None
        return plan(self.spec, self.resolve, records, self.available, cost)

    def wanted(self, planned: Plan, cell: int | None) -> list[PlannedCell]:
        """The runs to make now: all that are missing, those of a narrowed axis, or one cell. Raises ValueError for no such cell."""
        if cell is not None and not 0 <= cell < len(planned.cells):
            raise ValueError(
                f"cell={cell} is outside 0 ... {len(planned.cells) - 1}, the cells of {self.spec.id}; nothing was started"
            )
        kept = {c.index for c in narrowed([c.cell for c in planned.cells], self.overrides)}
        if cell is not None and cell not in kept:
            raise ValueError(
                f"cell={cell} is {planned.cells[cell].cell.name}, which the command line leaves out; nothing was started"
            )
        chosen = [c for c in planned.cells if c.cell.index in kept and cell in (None, c.cell.index)]
        runs: dict[str | None, PlannedCell] = {}
        for one in chosen:
            if one.state in ("missing", "failed"):
                runs.setdefault(one.run_id, one)
        return list(runs.values())

    def table(self, records: Records) -> Table:
        """required and complete. For a real run from this machine's run directories, never from committed results."""
        table = make_table(self.spec, self.resolve, records, self.available, self.scale, self.scale_note)
        axes = {
            override_key(o) for cell in expand(self.spec) for o in cell.overrides
        }  # they keep their values, whatever is asked
        changed = [o for o in self.settings if override_key(o) not in axes]
        return replace(table, notes=(*table.notes, f"{SETTINGS}: {', '.join(changed)}")) if changed else table

    def note_of(self, table: Table) -> list[str]:
        """What a table says of the settings that it was made with."""
        return [note for note in table.notes if note.startswith(SETTINGS)]

    def narrow(self, planned: Plan) -> Plan:
        """The part of a plan that agrees with the command line; nothing where no cell does."""
        try:
            kept = {c.index for c in narrowed([c.cell for c in planned.cells], self.overrides)}
        except ValueError:
            kept = set()
        return replace(planned, cells=tuple(c for c in planned.cells if c.cell.index in kept))

    def committed(self) -> Records:
        """The records that are committed beside this scale's tables."""
        return load_records([self.results / "records"])


def drivers(cfg: DictConfig, overrides: Sequence[str]) -> list[Driver]:
    """One driver, or one for each member of an experiment that stands for several; they share what they compose."""
    composer = Composer(dropped=DROPPED)
    if cfg.experiment.kind != ALL:
        return [Driver(cfg, overrides, composer)]
    return members(cfg, overrides, composer, list(cfg.experiment.members))


def members(cfg: DictConfig, overrides: Sequence[str], composer: Composer, names: Sequence[str]) -> list[Driver]:
    """A driver for each name. An experiment file decides on nothing but its own node and groups, so that its node can be read as it is;
    only where the command line changes a node it has to be composed."""
    overrides = [o for o in overrides if override_key(o) != "experiment.members"]
    changed = any(override_key(o).startswith("experiment.") for o in overrides)
    found = []
    for name in names:
        own = [f"+experiment={name}" if override_key(o) == "experiment" else o for o in overrides]
        node = compose("config", overrides=own).experiment if changed else experiment_file(name).experiment
        found.append(Driver(cfg, own, composer, node))
    return found


def run_experiment(cfg: DictConfig, overrides: Sequence[str], run: Run, preflight: Preflight, measure: Measure) -> None:
    """Plans, runs what is missing, renders. `plan=true` only plans; `cell=i` runs that cell and renders nothing; `explain=[line,column]`
    names the runs behind a value; `status=true` says what is done, running, queued, failed and missing; `check=true` renders from the
    committed records and exits 1 if a committed result would change; `render=true` renders from them and writes.

    Raises ValueError for an impossible request before anything starts. A run that fails does not keep the others from being made; the
    command then ends with code 1 and names it.
    """
    console = Console()
    every = drivers(cfg, overrides)
    if cfg.check:
        check(every, console)
        return
    if cfg.render:
        render(every, console)
        return
    records = load_records([every[0].runs_dir], check_inputs=True)
    if cfg.explain is not None:
        say_why(every, records, cfg.explain, console)
        return
    if cfg.status:
        show_status(every, console)
        return
    planned = [one.plan(records) for one in every]
    wanted = wanted_of(every, planned, cfg.cell)
    if cfg.plan and len(every) == 1:
        planned = [combine([planned[0], *plans_of_others(cfg, every[0], records)]).plans[every[0].spec.id]]
    planned = [one.narrow(its) for one, its in zip(every, planned, strict=True)]
    if cfg.cell is None:
        show_plans(planned, console)
    if cfg.plan:
        show_memory(every, planned, console)
        return
    jobs = [
        Job(f"{one.spec.id} {its.cell.name}", its.run_id, partial(one.resolve.config, its.cell.overrides)) for one, its in wanted
    ]
    if cfg.cell is None:
        refuse_unwritable(every[0].results, cfg.runtime.results_dir)
    failed = run_jobs(jobs, every[0].runs_dir, run, preflight, console)
    if cfg.cell is None:
        failed += finish(every, measure, console)
    if failed:
        sys.exit("error: " + "; ".join(failed))


def wanted_of(every: Sequence[Driver], planned: Sequence[Plan], cell: int | None) -> list[tuple[Driver, PlannedCell]]:
    """The runs to make, each once, with the table that asks first. An axis that is narrowed leaves tables without it untouched.

    Raises ValueError when nothing agrees with the command line.
    """
    if cell is not None and len(every) > 1:
        raise ValueError(f"cell={cell} counts within one table; name it instead of {ALL}")
    runs: dict[str | None, tuple[Driver, PlannedCell]] = {}
    refused = []
    for one, its in zip(every, planned, strict=True):
        try:
            cells = one.wanted(its, cell)
        except ValueError as problem:
            refused.append(problem)
            continue
        for wanted in cells:
            runs.setdefault(wanted.run_id, (one, wanted))
    if len(refused) == len(every):
        raise refused[0]
    return list(runs.values())


def plans_of_others(cfg: DictConfig, one: Driver, records: Records) -> list[Plan]:
    """The plans of all other tables and figures at this scale: which of them share a run with this one."""
    whole = [o for o in one.overrides if override_key(o) in SHARED]
    names = [name for name in experiment_file(ALL).experiment.members if name != one.spec.id]
    return [other.plan(records, costs=False) for other in members(cfg, whole, one.resolve.composer, names)]


def show_plans(planned: Sequence[Plan], console: Console) -> None:
    for one in planned:
        console.print(describe(one), markup=False, highlight=False)
    if len(planned) > 1:
        whole = combine(planned)
        console.print(
            f"all: {whole.cells} cells, {whole.unique_runs} runs, {whole.shared_runs} shared between tables, about {whole.hours:.1f} h to run",
            markup=False, highlight=False,
        )  # fmt: skip


def show_memory(every: Sequence[Driver], planned: Sequence[Plan], console: Console) -> None:
    """What a training process of these cells needs, worked out before anything is loaded."""
    cells = [(one, cell) for one, its in zip(every, planned, strict=True) for cell in its.cells if cell.run_id is not None]
    console.print("memory of a training process at its peak, for the largest micro-batch:", markup=False, highlight=False)
    for line in memory_lines(one.resolve(cell.cell.overrides)[1] for one, cell in cells):
        console.print(f"  {line}", markup=False, highlight=False, soft_wrap=True)


def say_why(every: Sequence[Driver], records: Records, asked: Sequence[str], console: Console) -> None:
    """Names the runs behind a value: this machine's, or where it has none of this table the committed ones. Raises ValueError, KeyError."""
    if len(every) > 1 or len(asked) != 2:
        raise ValueError(
            'explain takes the name of a line and of a column of one table: --explain table2 "CluSTER r=1.00" average'
        )
    (one,) = every
    here = any(records.run(run_id).stored for run_id in one.plan(records, costs=False).run_ids)
    place = one.runs_dir if here else shown(one.results / "records")
    try:
        text = explain(one.table(records if here else one.committed()), *asked)
    except KeyError as problem:
        raise ValueError(problem.args[0]) from problem
    console.print(f"{text}\nrecords: {place}", markup=False, highlight=False)


def finish(every: Sequence[Driver], measure: Measure, console: Console) -> list[str]:
    """Makes the artifacts that the tables read, writes tables, records, artifacts and the pages about them, prints the tables.

    Returns a sentence for each run whose artifacts could not be made; the tables name what they lack.
    """
    records = load_records([every[0].runs_dir], check_inputs=True)
    failed = []
    for one in every:
        for planned in one.plan(records, costs=False).artifacts_to_make:
            console.print(f"{one.spec.id} {planned.cell.name}: {', '.join(planned.artifacts)}", markup=False, highlight=False)
            try:
                measure(one.resolve.config(planned.cell.overrides), planned.artifacts)
            except (RuntimeError, ValueError) as problem:
                failed.append(
                    f"{one.spec.id} {planned.cell.name} (run {planned.run_id}): no {', '.join(planned.artifacts)}: {problem}"
                )
    for one in every:
        table = one.table(records)
        if why := why_kept(table, one):
            print_table(table, console)
            console.print(
                f"not written: {shown(one.results / one.spec.id)}.* stays as it is: {why}; runtime.results_dir=FOLDER writes this one "
                "to another folder",
                markup=False, highlight=False,
            )  # fmt: skip
            continue
        written = write_results(table, one.spec, one.results)
        export(one, records)
        print_table(table, console)
        console.print(f"written: {', '.join(map(shown, written))}", markup=False)
    if every[0].has_pages:
        write_pages(every[0].results.parents[1], every[0].scale)
    return failed


def shown(path: Path) -> str:
    """A path as a person reads it: from the project's root where it lies below it."""
    return str(path.relative_to(ROOT) if path.is_relative_to(ROOT) else path)


def export(one: Driver, records: Records) -> None:
    """Copies the records and artifacts that a table is made of beside it."""
    planned = one.plan(records, costs=False)
    export_records(records, planned.run_ids, one.results / "records")
    needed: dict[str, set[str]] = {}
    for cell in planned.of("complete"):
        assert cell.run_id is not None
        needed.setdefault(cell.run_id, set()).update(artifacts_of(one.spec, cell.cell.row))
    export_artifacts(records, needed, one.results / "artifacts")
