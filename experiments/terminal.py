"""A table on the terminal, with rich: a wide table is cut into blocks that fit, each with the names of its lines; marks are letters."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table as RichTable
from rich.text import Text

from experiments.cells import text_rows
from experiments.table import Table


def print_table(table: Table, console: Console | None = None) -> None:
    """Prints the table without intervals, then what is wrong with it."""
    console = console or Console()
    headings, rows = text_rows(table, interval=False)
    title = f"{table.id}: {table.title} ({table.scale})"
    names = 3 if table.has_columns else 2
    texts = [[_styled(text, mark) for text, mark in row] for row in rows]
    for number, block in enumerate(blocks([headings, *texts], names, console.width)):
        grid = RichTable(title=title.replace("[", "\\[") if number == 0 else None, title_justify="left")
        for i in block:
            grid.add_column(headings[i], justify="left" if i < names - 1 else "right", overflow="fold")
        for row in texts:
            grid.add_row(*(row[i] for i in block))
        console.print(grid)
    if table.scale_note:
        console.print(table.scale_note, markup=False)
    for problem in table.problems:
        console.print(f"not in the table: {problem}", markup=False)
    for note in table.notes:
        console.print(f"note: {note}", markup=False)


def blocks(rows: list[list[str]], names: int, width: int) -> list[list[int]]:
    """Columns to print together: each block repeats the first `names` columns and takes as many others as fit into `width` signs."""
    need = [max(_shown_width(row[i]) for row in rows) + 3 for i in range(len(rows[0]))]
    fixed = sum(need[:names]) + 1
    found: list[list[int]] = [[]]
    for i in range(names, len(need)):
        if found[-1] and fixed + sum(need[j] for j in found[-1]) + need[i] > width:
            found.append([])
        found[-1].append(i)
    return [[*range(names), *block] for block in found]


def _shown_width(text: str) -> int:
    return Text.from_markup(text).cell_len


def _styled(text: str, mark: str) -> str:
    text = text.replace("[", "\\[")
    return {"best": f"[bold]{text} *[/bold]", "noise": f"{text} ≈"}.get(mark, text)
