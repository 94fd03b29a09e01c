"""How one value reads: numbers with deviation, interval and n, or the reason why there is none. Shared by all outputs."""

from __future__ import annotations

from experiments.reported import NOT_AVAILABLE, Reported
from experiments.spec import AVERAGE
from experiments.table import INCOMPLETE, NOT_APPLICABLE, Column, Difference, Line, Table, Value

DECIMALS = {"percent": 1, "nats": 4, "seconds": 1, "count": 0, "ratio": 2, "GiB": 2, "text": 0, "cosine": 5}
SUFFIX = {"percent": " (%)", "nats": " (nats)", "seconds": " (s)", "GiB": " (GiB)"}
NOTHING = "–"


def number(value: float, unit: str) -> str:
    """A number in the decimals of its unit; unit `number` keeps four significant digits. Never "-0.0"."""
    text = f"{value:.4g}" if unit == "number" else f"{value:.{DECIMALS[unit]}f}"
    return text[1:] if text.startswith("-") and not text.strip("-0.") else text


def bounds(interval: tuple[float, float], unit: str) -> str:
    return f"[{number(interval[0], unit)}, {number(interval[1], unit)}]"


def heading(column: Column) -> str:
    return column.label + SUFFIX.get(column.unit, "")


def value_text(value: Value, column: Column, interval: bool = True) -> str:
    """ "56.5 ± 0.4 [55.6, 57.4]", "56.5 ± 0.4 (n 2 of 3)", "failed", ... without marks."""
    if value.text is not None:
        return value.text
    if value.state == NOT_APPLICABLE:
        return NOTHING
    if not value.has_mean:
        return value.state
    text = number(value.mean, column.unit)
    if value.sd is not None:
        text += f" ± {number(value.sd, column.unit)}"
    if interval and column.better is not None and value.interval is not None:
        text += f" {bounds(value.interval, column.unit)}"
    if value.state == INCOMPLETE:
        text += f" (n {value.n} of {value.planned})"
    return text


def difference_text(difference: Difference | None, unit: str) -> str:
    """ "+0.1 [-1.1, 1.4], cannot tell", "-8.8, too few seeds (n 2 of 3)"."""
    if difference is None:
        return NOTHING
    absent = f" (n {difference.n} of {difference.planned})" if difference.n < difference.planned else ""
    return f"{difference_number(difference, unit)}, {difference.verdict}{absent}"


def difference_number(difference: Difference, unit: str) -> str:
    """ "+0.1 [-1.1, 1.4]"."""
    sign = "+" if difference.mean >= 0 else ""
    text = f"{sign}{number(difference.mean, unit)}"
    return text if difference.interval is None else f"{text} {bounds(difference.interval, unit)}"


def n_text(line: Line) -> str:
    """Seeds behind a line: "3", or "2 of 3"."""
    values = list(line.values.values())
    n, planned = max((v.n for v in values), default=0), max((v.planned for v in values), default=0)
    if planned == 0:
        return NOTHING
    return str(planned) if n == planned else f"{n} of {planned}"


def reported_keys(table: Table) -> list[str]:
    """Columns that get a column of the paper's values beside them, in the table's order."""
    if table.reported is None:
        return []
    known = {v.key for v in table.reported.values}
    return [c.key for c in table.columns if c.key in known or c.key == AVERAGE]


def reported_text(reported: Reported, line: Line, key: str, unit: str) -> str:
    value = reported.find(line.row, line.column, key)
    return NOT_AVAILABLE if value is None else number(value, unit)


def text_rows(table: Table, interval: bool = True) -> tuple[list[str], list[list[tuple[str, str]]]]:
    """(headings, rows of (text, mark)), mark "" | "best" | "noise": what every grid-like output prints."""
    keys = reported_keys(table)
    counted = any(n_text(line) != NOTHING for line in table.lines)
    headings = [table.row_title, *([table.column_title] if _two(table) else []), *(["n"] if counted else [])]
    for column in table.columns:
        headings.append(heading(column))
        if column.key in keys:
            headings.append(f"paper: {column.label}" + SUFFIX.get(column.unit, ""))
    rows = [_row(table, line, keys, interval) for line in table.lines] + _apart_rows(table, keys)
    place = 2 if _two(table) else 1
    return headings, rows if counted else [row[:place] + row[place + 1 :] for row in rows]


def _two(table: Table) -> bool:
    return table.has_columns


def _row(table: Table, line: Line, keys: list[str], interval: bool) -> list[tuple[str, str]]:
    row = [(line.row, "")] + ([(line.column or NOTHING, "")] if _two(table) else []) + [(n_text(line), "")]
    for column in table.columns:
        value = line.values[column.key]
        row.append((value_text(value, column, interval), "best" if value.best else "noise" if value.within_noise else ""))
        if column.key in keys:
            assert table.reported is not None
            row.append((reported_text(table.reported, line, column.key, column.unit), ""))
    return row


def _apart_rows(table: Table, keys: list[str]) -> list[list[tuple[str, str]]]:
    """Lines for the paper's values whose place in our grid is not known, one for each (row, words)."""
    rows = []
    apart = [] if table.reported is None else [v for v in table.reported.apart if v.key in keys]
    for row, at in dict.fromkeys((v.row, v.at or "") for v in apart):
        found = {v.key: v.value for v in apart if (v.row, v.at) == (row, at)}
        name = [(row, ""), (at, "")] if _two(table) else [(f"{row}, {at}", "")]
        cells = [(NOTHING, "")]
        for column in table.columns:
            cells.append((NOTHING, ""))
            if column.key in keys:
                cells.append((number(found[column.key], column.unit) if column.key in found else NOT_AVAILABLE, ""))
        rows.append([*name, *cells])
    return rows
