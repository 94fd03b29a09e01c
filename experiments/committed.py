"""Tables again from the records that are committed beside them, where the runs themselves are not: compared, or written."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.console import Console

from experiments.pages import write_pages
from experiments.recordstore import Records
from experiments.results import check_results, write_results

if TYPE_CHECKING:
    from experiments.drive import Driver


def check(every: Sequence[Driver], console: Console) -> None:
    """Exits 1, naming the files, if rendering the committed records gives anything but the committed results.

    Of several tables those that were never made at this scale are named and passed over; a single one has to be there.
    """
    records = every[0].committed()
    there = [one for one in every if len(every) == 1 or is_made(one, records)]
    changed = [line for one in there for line in check_results(one.table(records), one.spec, one.results)]
    for line in changed:
        console.print(line, markup=False, highlight=False, soft_wrap=True)
    if absent := [one.spec.id for one in every if one not in there]:
        console.print(f"never made at scale {every[0].scale}: {', '.join(absent)}", markup=False, highlight=False)
    if changed or not there:
        sys.exit(
            "error: the committed results are not what their records give; --render in place of --check writes them"
            if changed
            else 1
        )
    console.print(f"{len(there)} committed results are what their committed records give", markup=False)


def render(every: Sequence[Driver], console: Console) -> None:
    """Writes the committed results again from the committed records: what a change of the tables' code needs where the runs are not.

    Raises ValueError when no table of those asked for is committed at this scale.
    """
    records = every[0].committed()
    there = [one for one in every if is_made(one, records)]
    if not there:
        raise ValueError(
            f"render=true makes committed results again, and results/{every[0].scale} has none of "
            f"{', '.join(one.spec.id for one in every)}; leave it out to make the runs"
        )
    for one in there:
        write_results(one.table(records), one.spec, one.results)
    write_pages(there[0].results.parents[1], there[0].scale)
    console.print(f"written from the committed records: {', '.join(one.spec.id for one in there)}", markup=False, highlight=False)


def is_made(one: Driver, records: Records) -> bool:
    """Whether a table is committed: a file of it is there, or every run that it needs (then its files were lost)."""
    cells = one.plan(records, costs=False).cells
    return any(one.results.glob(f"{one.spec.id}.*")) or (bool(cells) and all(cell.state == "complete" for cell in cells))
