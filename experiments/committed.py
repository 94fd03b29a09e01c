"""Tables again from the records that are committed beside them, where the runs themselves are not: compared, or written."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from experiments.pages import write_pages
from experiments.reading import read_table
from experiments.recordstore import Records
from experiments.resolve import narrowed
from experiments.results import check_results, write_results
from experiments.table import Table

if TYPE_CHECKING:
    from experiments.drive import Driver


def check(every: Sequence[Driver], console: Console) -> None:
    """Exits 1, naming the files, if rendering the committed records gives anything but the committed results.

    Of several tables those that were never made at this scale are named and passed over; a single one has to be there. Raises ValueError
    for a seed or an axis value that the single table does not have.
    """
    records = every[0].committed()
    there = [one for one in every if is_made(one, records)]
    absent = [one.spec.id for one in every if one not in there]
    if not there:
        sys.exit(f"error: never made at scale {every[0].scale}: {', '.join(absent)}; leave --check out to make the runs")
    if len(every) == 1:
        narrowed([c.cell for c in every[0].plan(records, costs=False).cells], every[0].overrides)
    changed = [line for one in there for line in check_results(one.table(records), one.spec, one.results)]
    for line in changed:
        console.print(line, markup=False, highlight=False, soft_wrap=True)
    if absent:
        console.print(f"never made at scale {every[0].scale}: {', '.join(absent)}", markup=False, highlight=False)
    if changed:
        sys.exit("error: the committed results are not what their records give; --render in place of --check writes them")
    console.print(f"{len(there)} committed results are what their committed records give", markup=False)


def render(every: Sequence[Driver], console: Console) -> None:
    """Writes the committed results again from the committed records: what a change of the tables' code needs where the runs are not.

    Raises ValueError, and writes nothing, when no table of those asked for is committed at this scale, or when one would lose a run.
    """
    records = every[0].committed()
    there = [one for one in every if is_made(one, records)]
    if not there:
        raise ValueError(
            f"render=true makes committed results again, and results/{every[0].scale} has none of "
            f"{', '.join(one.spec.id for one in every)}; leave it out to make the runs"
        )
    tables = {one.spec.id: one.table(records) for one in there}
    lost = [one.spec.id for one in there if loses(tables[one.spec.id], one.results)]
    if lost:
        raise ValueError(
            f"{', '.join(lost)}: the committed table shows runs that these settings do not name, or whose records are gone; nothing was "
            "written. Leave render=true out to make the runs"
        )
    for one in there:
        write_results(tables[one.spec.id], one.spec, one.results)
    write_pages(there[0].results.parents[1], there[0].scale)
    console.print(f"written from the committed records: {', '.join(tables)}", markup=False, highlight=False)


def loses(table: Table, folder: Path) -> bool:
    """Whether writing `table` to `folder` would take a run away from the table that is there."""
    path = folder / f"{table.id}.json"
    if not path.exists():
        return False
    before = read_table(path)
    return not run_ids(before) <= run_ids(table) or (before.final and not table.final)


def run_ids(table: Table) -> set[str]:
    return {run_id for _, _, value in table.cells() for run_id in value.run_ids.values()}


def is_made(one: Driver, records: Records) -> bool:
    """Whether a table is committed: a file of it is there, or every run that it needs (then its files were lost)."""
    cells = one.plan(records, costs=False).cells
    return any(one.results.glob(f"{one.spec.id}.*")) or (bool(cells) and all(cell.state == "complete" for cell in cells))
