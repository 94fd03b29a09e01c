"""A table on the terminal, with rich: wide tables wrap, marks are colours and letters."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table as RichTable

from experiments.cells import text_rows
from experiments.table import Table


def print_table(table: Table, console: Console | None = None) -> None:
    """Prints the table without intervals, then what is wrong with it."""
    console = console or Console()
    headings, rows = text_rows(table, interval=False)
    title = f"{table.id}: {table.title} ({table.scale})"
    grid = RichTable(title=title.replace("[", "\\["), title_justify="left")
    for i, name in enumerate(headings):
        grid.add_column(name, justify="left" if i == 0 else "right", overflow="fold")
    for row in rows:
        grid.add_row(*(_styled(text, mark) for text, mark in row))
    console.print(grid)
    if table.scale_note:
        console.print(table.scale_note, markup=False)
    for problem in table.problems:
        console.print(f"not in the table: {problem}", markup=False)
    for note in table.notes:
        console.print(f"note: {note}", markup=False)


def _styled(text: str, mark: str) -> str:
    text = text.replace("[", "\\[")
    return {"best": f"[bold]{text} *[/bold]", "noise": f"{text} ≈"}.get(mark, text)
