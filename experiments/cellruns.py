"""The cells of an experiment with what is known of their runs: what tables, remarks and analyses go through."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from experiments.plan import Resolve
from experiments.recordstore import Records, Run
from experiments.spec import NOT_BUILT, Cell, ExperimentConfig, expand, not_built


@dataclass(frozen=True)
class CellRun:
    """A cell with the state of its run."""

    cell: Cell
    run: Run


def cell_runs(
    spec: ExperimentConfig, resolve: Resolve, records: Records, available: Collection[str] | None = None
) -> list[CellRun]:
    """Every cell of an experiment with its run; selectors that do not exist are not resolved."""
    found = []
    for cell in expand(spec):
        reason = not_built(spec, cell, available)
        if reason is not None:
            found.append(CellRun(cell, Run("", NOT_BUILT, reason)))
        else:
            found.append(CellRun(cell, records.run(resolve(cell.overrides)[0])))
    return found


def by_line(runs: list[CellRun]) -> list[list[CellRun]]:
    """The seeds of each table line together, lines in order."""
    groups: dict[tuple[str, str], list[CellRun]] = {}
    for one in runs:
        groups.setdefault(one.cell.line, []).append(one)
    return list(groups.values())
