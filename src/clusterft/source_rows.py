"""Chosen rows as the source has them, one JSON object a line, with all their columns; nothing but a row is held in memory.

In: examples and the load report. Out: lines without their ending, in the order of the examples.

    JSON lines, list elements on one line     the source's own bytes
    list elements over several lines          the source's own bytes, its line breaks turned into spaces
    CSV, Parquet, UTF-16 and UTF-32           read again; columns under their own names

What JSON lacks is written so: dates, times, durations and decimals as text, bytes as base64 text, vectors as lists, maps as lists
of pairs, NaN and infinities as null.
"""

from __future__ import annotations

import base64
import datetime
import json
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from clusterft.export_rows import messages
from clusterft.load_report import LineIndex, LoadReport
from clusterft.records import Example
from clusterft.sources import DataError, read_rows

_BREAK = re.compile(rb"[ \t]*[\r\n][ \t\r\n]*")
_FILE_KINDS = ("jsonl", "json_array", "csv", "parquet")


def source_lines(examples: Sequence[Example], report: LoadReport) -> Iterator[tuple[bytes, bool]]:
    """(line, whether it is the source's own bytes) of each example. Raises DataError if a file has changed since it was loaded.

    Rows that come from no file (a hub data set, the standard library) are written in the alpaca or the messages layout.
    """
    kinds = {f.source: f.kind for f in report.files}
    for run in _runs(examples, report):
        source = run[0].source
        if report.has_bytes(run[0]):
            for line in report.forward_lines(source, run):
                own = b"\n" not in line and b"\r" not in line
                yield line if own else _BREAK.sub(b" ", line), own
        elif kinds.get(source) in _FILE_KINDS:
            yield from ((line, False) for line in _read_again(source, run, report.index[source]))
        else:
            yield from ((as_json(example), False) for example in run)


def _runs(examples: Iterable[Example], report: LoadReport) -> Iterator[list[Example]]:
    """Stretches of one source in the order of the file, so that each stretch is one pass over it."""
    run: list[Example] = []
    last = (0, 0)
    for example in examples:
        index = report.index.get(example.source)
        place = index.place(example) if index else (example.line, 0)
        if run and (run[-1].source != example.source or place < last):
            yield run
            run = []
        run.append(example)
        last = place
    if run:
        yield run


def _read_again(source: str, run: Sequence[Example], index: LineIndex) -> Iterator[bytes]:
    _, rows = read_rows(Path(source))
    value: Any = None
    at, line, nth = (0, 0), 0, 0
    for example in run:
        wanted = index.place(example)
        while at < wanted:
            raw = next(rows, None)
            if raw is None:
                break
            line, nth = raw.line, nth + 1 if raw.line == line else 0
            at, value = (line, nth), raw.value
        if at != wanted or value is None:
            raise DataError(
                f"{source} line {example.line}: the row is gone, the file changed while it was used; run the command again"
            )
        yield json_line(value)


def as_json(example: Example) -> bytes:
    """A row as one line of JSON in a layout that every loader here recognises."""
    if example.turns:
        return json_line({"messages": messages(example)})
    return json_line({"instruction": example.prompt, "input": example.input, "output": example.response})


def json_line(row: Any) -> bytes:
    """A row as one line of JSON, its columns in their order."""
    try:
        text = json.dumps(row, ensure_ascii=False, allow_nan=False, default=_text)
    except ValueError:  # NaN or an infinity somewhere
        row = json.loads(json.dumps(row, default=_text), parse_constant=lambda _: None)
        text = json.dumps(row, ensure_ascii=False)
    try:
        return text.encode()
    except UnicodeEncodeError:  # half of a UTF-16 pair in a column that training does not use
        return json.dumps(row, default=_text).encode()


def _text(value: Any) -> Any:
    """A value that JSON lacks, as text or as a list."""
    if isinstance(value, bytes | bytearray | memoryview):
        return base64.b64encode(value).decode("ascii")
    if isinstance(value, datetime.date | datetime.time):
        return value.isoformat()
    return value.tolist() if hasattr(value, "tolist") else str(value)
