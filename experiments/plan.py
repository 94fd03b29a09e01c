"""plan = required - complete: what a table still needs, what it shares with others, and how long that will take.

In come an experiment, `resolve(overrides) -> (run_id, config)` from the composition root, and the records; out comes a `Plan`
with one entry a cell. A cell whose overrides begin with `+experiment=OTHER` is composed with that experiment in place of its own
(table11 looks at the first runs of other tables).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from experiments.artifacts import missing_artifacts
from experiments.cost_model import CostModel, Estimate
from experiments.grid import array_string, equal_configs
from experiments.recordstore import Records
from experiments.spec import NOT_BUILT, Cell, ExperimentConfig, artifacts_of, expand, not_built

Resolve = Callable[[Sequence[str]], tuple[str, Any]]


@dataclass(frozen=True)
class PlannedCell:
    """A cell with its run.

    state   complete | missing | failed | conflict | not built yet; reason says why when it is not complete
    estimate  what is still to run: nothing for complete cells and for the second cell of one run
    """

    cell: Cell
    run_id: str | None
    state: str
    reason: str = ""
    estimate: Estimate = field(default_factory=Estimate)
    artifacts: tuple[str, ...] = ()
    shared_with: tuple[str, ...] = ()


@dataclass(frozen=True)
class Plan:
    """All cells of one experiment."""

    spec: ExperimentConfig
    cells: tuple[PlannedCell, ...]

    def of(self, *states: str) -> list[PlannedCell]:
        return [c for c in self.cells if c.state in states]

    @property
    def to_run(self) -> list[PlannedCell]:
        """One cell for each run that must still be made (missing or failed), in order of position."""
        first: dict[str, PlannedCell] = {}
        for planned in self.of("missing", "failed"):
            assert planned.run_id is not None
            first.setdefault(planned.run_id, planned)
        return list(first.values())

    @property
    def artifacts_to_make(self) -> list[PlannedCell]:
        """One cell for each complete run that lacks an artifact."""
        first = {c.run_id: c for c in reversed(self.of("complete")) if c.artifacts}
        return sorted(first.values(), key=lambda c: c.cell.index)

    @property
    def run_ids(self) -> list[str]:
        return sorted({c.run_id for c in self.cells if c.run_id is not None})

    @property
    def hours(self) -> float:
        return _hours([c.estimate for c in self.cells])

    @property
    def complete(self) -> bool:
        return not self.artifacts_to_make and len(self.of("complete")) == len(self.cells)

    @property
    def missing_array(self) -> str:
        """The --array string that runs what is missing or failed."""
        return array_string(c.cell.index for c in self.to_run)

    @property
    def equal_cells(self) -> dict[str, list[int]]:
        """Runs that several cells of this experiment share."""
        return equal_configs([c.run_id or f"none-{i}" for i, c in enumerate(self.cells)])


def plan(
    spec: ExperimentConfig,
    resolve: Resolve,
    records: Records,
    available: Collection[str] | None = None,
    cost: CostModel | None = None,
) -> Plan:
    """The plan of one experiment. `available`: selectors that exist (None: all); `cost`: estimates (None: no hours)."""
    planned: list[PlannedCell] = []
    counted: set[str] = set()
    made: set[str] = set()  # features that complete runs have left
    for cell in expand(spec):
        reason = not_built(spec, cell, available)
        if reason is not None:
            planned.append(PlannedCell(cell, None, NOT_BUILT, reason))
            continue
        run_id, config = resolve(cell.overrides)
        run = records.run(run_id)
        estimate = Estimate()
        if cost is not None and run.state in ("missing", "failed") and run_id not in counted:
            estimate = cost.estimate(config)
            counted.add(run_id)
        elif cost is not None and run.state == "complete":
            made |= cost.estimate(config).features.keys()
        lacking = missing_artifacts(run.artifacts, artifacts_of(spec, cell.row)) if run.state == "complete" else ()
        planned.append(PlannedCell(cell, run_id, run.state, run.reason, estimate, lacking))
    return Plan(spec, tuple(replace(c, estimate=c.estimate.without(made)) if made else c for c in planned))


@dataclass(frozen=True)
class PlanSet:
    """Several experiments together: no run twice."""

    plans: Mapping[str, Plan]
    owners: Mapping[str, tuple[str, ...]] = field(default_factory=dict)  # run id -> experiments that need it

    @property
    def cells(self) -> int:
        return sum(len(p.cells) for p in self.plans.values())

    @property
    def unique_runs(self) -> int:
        return len(self.owners)

    @property
    def shared_runs(self) -> int:
        """Runs that more than one experiment needs."""
        return sum(len(ids) > 1 for ids in self.owners.values())

    @property
    def hours(self) -> float:
        """Hours still to run; a run that several experiments need counts once."""
        estimates: dict[str, Estimate] = {}
        for one in self.plans.values():
            for planned in one.to_run:
                assert planned.run_id is not None
                estimates.setdefault(planned.run_id, planned.estimate)
        return _hours(estimates.values())


def _hours(estimates: Iterable[Estimate]) -> float:
    """Of several runs; the work that some of them share counts once."""
    estimates = list(estimates)
    features = {key: seconds for one in estimates for key, seconds in one.features.items()}
    return (sum(one.seconds for one in estimates) + sum(features.values())) / 3600


def combine(plans: Iterable[Plan]) -> PlanSet:
    """Marks in every plan which experiments share a cell's run."""
    plans = list(plans)
    owners: dict[str, list[str]] = {}
    for one in plans:
        for run_id in one.run_ids:
            owners.setdefault(run_id, []).append(one.spec.id)
    marked = {}
    for one in plans:
        cells = tuple(
            replace(c, shared_with=tuple(i for i in owners[c.run_id] if i != one.spec.id)) if c.run_id else c for c in one.cells
        )
        marked[one.spec.id] = replace(one, cells=cells)
    return PlanSet(marked, {run_id: tuple(ids) for run_id, ids in sorted(owners.items())})


def _incomplete(planned: Plan) -> list[str]:
    """What is not complete; the seeds of one line share an entry when they share the reason."""
    groups: dict[tuple[str, str, str], list[PlannedCell]] = {}
    for c in planned.cells:
        if c.state != "complete":
            shared = f"; also for {', '.join(c.shared_with)}" if c.shared_with else ""
            groups.setdefault((*c.cell.line, f"{c.state}, {c.reason}{shared}"), []).append(c)
    found = []
    for (row, column, reason), cells in groups.items():
        seeds = ", ".join(str(c.cell.seed) for c in cells)
        which = f"seed={seeds}" if len(cells) == 1 else f"seeds {seeds}"
        found.append(f"[{array_string(c.cell.index for c in cells)}] {' '.join(p for p in (row, column, which) if p)}: {reason}")
    return found


def describe(planned: Plan) -> str:
    """The plan as text: counts, what is missing and why, the array string, the hours."""
    spec = planned.spec
    counts = {state: len(planned.of(state)) for state in ("complete", "missing", "failed", "conflict", NOT_BUILT)}
    parts = ", ".join(f"{n} {state}" for state, n in counts.items() if n)
    lines = [f"{spec.id}: {len(planned.cells)} cells, {len(planned.run_ids)} runs: {parts or 'nothing to run'}"]
    lines += [f"  {text}" for text in _incomplete(planned)]
    for run_id, places in sorted(planned.equal_cells.items(), key=lambda item: item[1]):
        lines.append(f"  warning: cells {', '.join(map(str, places))} are the same run {run_id}; it is run once")
    for c in planned.artifacts_to_make:
        lines.append(f"  [{c.cell.index}] {c.cell.name}: run {c.run_id} lacks {', '.join(c.artifacts)}")
    if planned.to_run:
        estimate = f", about {planned.hours:.2f} h" if planned.hours else ""
        lines.append(f"  to run: {len(planned.to_run)} runs{estimate}; --array={planned.missing_array}")
    return "\n".join(lines)
