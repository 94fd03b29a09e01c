"""Where the cells of an experiment stand: complete, running, queued, failed or missing, and the --array string for the rest.

In come a plan, the run directories and SLURM's queue; out comes text for people, whose last line `slurm/submit.sh` reads too. A cell
counts as running when SLURM says so or when a process of this machine holds its run's lock, and is then not submitted again.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from rich.console import Console

from experiments.grid import array_string, parse_array
from experiments.plan import Plan, PlannedCell
from experiments.recordstore import Records, load_records
from experiments.resolve import narrowed
from experiments.spec import NOT_BUILT, override_key

LOCKS = Path("/proc/locks")
UNSTARTED = ("PENDING", "CONFIGURING", "REQUEUED", "REQUEUE_HOLD", "SPECIAL_EXIT", "SUSPENDED")
ALIVE = ("RUNNING", "COMPLETING", *UNSTARTED)
NOT_OF_A_CELL = ("cell", "plan", "status", "check", "render", "explain", "runtime.nodes", "runtime.launcher")
"""Keys that an array adds to, or that look at, the cells of the same command."""


@dataclass(frozen=True)
class Task:
    """One task of an array in SLURM's queue."""

    job: str
    index: int
    state: str


def same_cells(overrides: Sequence[str]) -> str:
    """What two commands share that count the same cells in the same order: kept in the comment of a job."""
    return " ".join(sorted(o for o in overrides if override_key(o) not in NOT_OF_A_CELL))


def read_queue(comment: str) -> list[Task]:
    """The living tasks of this user's arrays with this comment; none where there is no SLURM.

    Raises RuntimeError if SLURM is there and does not answer: a cell might then be submitted twice.
    """
    if shutil.which("squeue") is None:
        return []
    if not (
        os.environ.get("SLURM_CONF") or Path("/etc/slurm/slurm.conf").exists() or Path("/run/slurm/conf/slurm.conf").exists()
    ):
        return []
    command = ["squeue", "--noheader", "--array", "--me", "--states=all", "--format=%F|%K|%T|%k"]
    asked = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    if asked.returncode != 0:
        raise RuntimeError(f"squeue does not answer, so nobody knows what is queued: {asked.stderr.strip()}")
    return parse_queue(asked.stdout, comment)


def parse_queue(text: str, comment: str) -> list[Task]:
    """Tasks from lines `job|index|state|comment`; the index of pending tasks may be a list."""
    tasks = []
    for line in text.splitlines():
        job, index, state, said = line.split("|", 3)
        if said == comment and state in ALIVE and index != "N/A":
            tasks += [Task(job, i, state) for i in parse_array(index)]
    return tasks


def locked_runs(runs_dir: Path, run_ids: Collection[str]) -> set[str]:
    """Runs whose lock a process of this machine holds, from the kernel's own list: looking does not take the lock."""
    if not LOCKS.exists():
        return set()
    held = {line.split()[5] for line in LOCKS.read_text().splitlines() if " FLOCK " in line and "->" not in line}
    inodes = {name.rsplit(":", 1)[1] for name in held}
    found = set()
    for run in run_ids:
        lock = runs_dir / run / ".lock"
        if lock.exists() and str(lock.stat().st_ino) in inodes:
            found.add(run)
    return found


@dataclass(frozen=True)
class Status:
    """Indices of cells by state; a run that several cells share has all of them in its state. `rest`: one cell a run to submit."""

    plan: Plan
    cells: Mapping[str, tuple[PlannedCell, ...]]
    jobs: tuple[str, ...]
    rest: str


def status_of(plan: Plan, tasks: Sequence[Task], locked: Collection[str], wanted: Collection[int]) -> Status:
    """wanted: indices that the command's overrides leave (`narrowed`); the others are not counted."""
    by_index = {c.cell.index: c.run_id for c in plan.cells}
    queued = {by_index[t.index] for t in tasks if t.index in by_index and t.state in UNSTARTED}
    running = {by_index[t.index] for t in tasks if t.index in by_index and t.state not in UNSTARTED} | set(locked)
    cells: dict[str, list[PlannedCell]] = {
        s: [] for s in ("complete", "running", "queued", "failed", "missing", "conflict", NOT_BUILT)
    }
    rest: dict[str, int] = {}
    for one in plan.cells:
        if one.cell.index not in wanted:
            continue
        state = one.state
        if state in ("missing", "failed"):
            state = "running" if one.run_id in running else "queued" if one.run_id in queued else state
        cells[state].append(one)
        if state in ("missing", "failed"):
            rest.setdefault(one.run_id, one.cell.index)
    jobs = tuple(sorted({t.job for t in tasks}))
    return Status(plan, {k: tuple(v) for k, v in cells.items()}, jobs, array_string(rest.values()))


_NAMES = {"complete": "done"}


def describe_status(status: Status) -> str:
    """Counts and indices by state, why what failed failed, and the array string of the rest."""
    spec = status.plan.spec
    counted = sum(len(c) for c in status.cells.values())
    lines = [f"{spec.id}: {counted} cells" + (f"; in SLURM's queue as {', '.join(status.jobs)}" if status.jobs else "")]
    for state, cells in status.cells.items():
        if cells or state not in ("conflict", NOT_BUILT):
            where = f"  [{array_string(c.cell.index for c in cells)}]" if cells else ""
            lines.append(f"  {_NAMES.get(state, state):<8} {len(cells):4d}{where}")
        if state in ("failed", "conflict"):
            lines += [f"    [{c.cell.index}] {c.cell.name}: {c.reason}" for c in cells]
    lines.append(f"  the rest: --array={status.rest}" if status.rest else "  nothing is left to submit")
    return "\n".join(lines)


class Experiment(Protocol):
    """What is asked of a `drive.Driver`."""

    overrides: list[str]
    runs_dir: Path

    def plan(self, records: Records) -> Plan: ...


def show_status(every: Sequence[Experiment], console: Console) -> None:
    """Prints what stands where, from the records, the locks of this machine and SLURM's queue. Starts and changes nothing.

    Raises ValueError for overrides that no cell agrees with, RuntimeError if SLURM does not answer.
    """
    refused = []
    for one in every:
        planned = one.plan(load_records([one.runs_dir], check_inputs=True))
        try:
            wanted = {c.index for c in narrowed([c.cell for c in planned.cells], one.overrides)}
        except ValueError as problem:  # of several tables those without the axis value have nothing to say
            refused.append(problem)
            continue
        tasks = read_queue(same_cells(one.overrides))
        status = status_of(planned, tasks, locked_runs(one.runs_dir, planned.run_ids), wanted)
        console.print(describe_status(status), markup=False, highlight=False, soft_wrap=True)
    if len(refused) == len(every):
        raise refused[0]
