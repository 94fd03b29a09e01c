"""Tables again from the records that are committed beside them, where the runs themselves are not: compared, or written."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.console import Console

from experiments.pages import write_pages
from experiments.reading import read_table
from experiments.recordstore import Records
from experiments.render import check_outputs
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

    Raises ValueError, and writes nothing, when no table of those asked for is committed at this scale, or when one must stay (`why_kept`).
    """
    records = every[0].committed()
    there = [one for one in every if is_made(one, records)]
    if not there:
        raise ValueError(
            f"render=true makes committed results again, and results/{every[0].scale} has none of "
            f"{', '.join(one.spec.id for one in every)}; leave it out to make the runs"
        )
    tables = {one.spec.id: one.table(records) for one in there}
    kept = {one.spec.id: why for one in there if (why := why_kept(tables[one.spec.id], one, rendered=True))}
    if kept:
        raise ValueError(f"{'; '.join(f'{name}: {why}' for name, why in kept.items())}; nothing was written")
    for one in there:
        write_results(tables[one.spec.id], one.spec, one.results)
    if there[0].has_pages:
        write_pages(there[0].results.parents[1], there[0].scale)
    console.print(f"written from the committed records: {', '.join(tables)}", markup=False, highlight=False)


def why_kept(table: Table, one: Driver, *, rendered: bool = False) -> str:
    """Why the table in the results folder stays as it is; "" where `table` may take its place. A file that cannot be read may.

    rendered: from committed records, so that no run may get lost. With settings of the command line none may either, nor may a table
    that was made without them change.
    """
    try:
        before = read_table(one.results / f"{table.id}.json")
    except (FileNotFoundError, ValueError):
        return ""
    if before.final and not table.final:
        return "the table there is complete, this one is not"
    if (made_of(before) & run_ids(table)) - made_of(table):
        return "the table there has runs that are not here"
    if (rendered or one.settings) and not run_ids(before) <= run_ids(table):
        return "the table there shows runs that these settings do not name"
    if one.settings and one.note_of(before) != one.note_of(table) and check_outputs(table, one.results):
        return f"the table there was made without {', '.join(one.settings)}"
    return ""


def run_ids(table: Table) -> set[str]:
    return {run_id for _, _, value in table.cells() for run_id in value.run_ids.values()}


def made_of(table: Table) -> set[str]:
    """Runs that gave a table a number."""
    return {value.run_ids[seed] for _, _, value in table.cells() for seed in value.by_seed if seed in value.run_ids}


def is_made(one: Driver, records: Records) -> bool:
    """Whether a table is committed: a file of it is there, or every run that it needs (then its files were lost)."""
    cells = one.plan(records, costs=False).cells
    return any(one.results.glob(f"{one.spec.id}.*")) or (bool(cells) and all(cell.state == "complete" for cell in cells))
