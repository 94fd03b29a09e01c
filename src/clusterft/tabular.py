"""CSV, TSV and Parquet to raw rows.

In: a path. Out: `RawRow`s; `line` is the physical line of a CSV row, the row number in Parquet.

Cells of a CSV file are always text: nothing is turned into numbers, dates or nulls. Columns are separated by what the name says
(.tsv: a tab, else a comma), unless the header line makes sense with another of comma, semicolon, tab and vertical bar only.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator
from itertools import chain
from pathlib import Path

from clusterft.conversation import Refusal
from clusterft.formats import FORMATS, recognise
from clusterft.sources import DataError, RawRow, encoding_of, not_utf8, open_bytes

FIELD_CHARS = 1 << 30
"""The csv module refuses cells above 128 KiB by default; rows of several MB do occur."""


SEPARATORS = {",": "a comma", ";": "a semicolon", "\t": "a tab", "|": "a vertical bar"}
_KNOWN = frozenset(column for layout in FORMATS.values() for column in layout.columns)


def iterate_csv(path: Path) -> Iterator[RawRow]:
    """Rows of a CSV or TSV file with a header line. Raises DataError for a bad header or undecodable text."""
    with open_text(path) as text:
        reader = None
        try:
            first = text.readline()
            reader = csv.reader(chain([first], text) if first else text, delimiter=separator_of(path, first), strict=True)
            header = next(reader, None)
            if not header:
                raise DataError(f"{path}: the file is empty; expected a header line")
            if len(set(header)) != len(header):
                raise DataError(f"{path}: line 1: a column name occurs twice")
            yield from _csv_rows(reader, header)
        except UnicodeDecodeError as error:
            encoding = str(text.encoding)
            line = reader.line_num if reader else 0
            other = f"after line {line}: not valid {encoding}; convert it to UTF-8 with iconv"
            raise DataError(f"{path}: {not_utf8(path) if encoding == 'utf-8-sig' else other}") from error
        except csv.Error as error:
            raise DataError(f"{path}: line 1: the header line cannot be read ({error}); check its quotes") from error


def separator_notes(path: Path) -> list[str]:
    """A note if the header line of a CSV file shows another separator than the file's name."""
    with open_text(path) as text:
        try:
            found = separator_of(path, text.readline())
        except UnicodeDecodeError:
            return []  # reading the rows says where
    return [] if found == _usual(path) else [f"{path}: columns are separated by {SEPARATORS[found]}, as its header line shows"]


def open_text(path: Path) -> io.TextIOWrapper:
    """A CSV file as text in the encoding that its first bytes show. Raises DataError for one that cannot be read."""
    with open_bytes(path) as stream:
        encoding = encoding_of(path, stream.read(4))
    csv.field_size_limit(FIELD_CHARS)
    return io.TextIOWrapper(open_bytes(path), encoding="utf-8-sig" if encoding == "utf-8" else encoding, newline="")


def _usual(path: Path) -> str:
    return "\t" if ".tsv" in [s.lower() for s in path.suffixes] else ","


def separator_of(path: Path, line: str) -> str:
    """The separator that the name says, unless the header line makes sense with another one only."""
    usual = _usual(path)
    cells = {one: _cells(line, one) for one in SEPARATORS}
    if _KNOWN & set(cells[usual]):
        return usual
    layouts = [one for one, names in cells.items() if recognise(dict.fromkeys(names, "")) and len(names) > 1]
    if layouts:
        return layouts[0]
    several = [one for one, names in cells.items() if len(names) > 1]
    return several[0] if len(several) == 1 and len(cells[usual]) < 2 else usual


def _cells(line: str, separator: str) -> list[str]:
    try:
        return next(csv.reader([line], delimiter=separator, strict=True), [])
    except csv.Error:
        return []


def _csv_rows(reader, header: list[str]) -> Iterator[RawRow]:  # type: ignore[no-untyped-def]
    start = reader.line_num + 1
    while True:
        try:
            cells = next(reader)
        except StopIteration:
            return
        except csv.Error as error:
            cut = "unexpected end" in str(error)
            taken = reader.line_num - start + 1
            detail = f"a quoted cell has no end and takes the {taken:,} line(s) to the end of the file" if cut else str(error)
            yield RawRow(start, None, Refusal("cut_last_line" if cut else "invalid_csv", detail))
            if cut:
                return
            start = reader.line_num + 1
            continue
        if len(cells) == len(header):
            yield RawRow(start, dict(zip(header, cells, strict=True)))
        elif cells:
            yield RawRow(start, None, Refusal("wrong_column_count", f"{len(cells)} cells under {len(header)} columns"))
        start = reader.line_num + 1


def iterate_parquet(path: Path) -> Iterator[RawRow]:
    """Rows of a Parquet file in batches of 1,024; dates and times as text. Raises DataError if it is damaged or repeats a column name."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    number = 0
    try:
        with pq.ParquetFile(path) as file:
            names = file.schema_arrow.names
            if len(set(names)) != len(names):
                raise DataError(f"{path}: a column name occurs twice; rename one")
            for batch in file.iter_batches(batch_size=1024):
                for value in _plain(batch):
                    number += 1
                    yield RawRow(number, value)
    except (pa.ArrowException, OSError) as error:
        why = (str(error).splitlines() or ["unreadable"])[0]
        raise DataError(f"{path}: the Parquet file is damaged after row {number} ({why}); fetch it again") from error


def _plain(batch):  # type: ignore[no-untyped-def]
    """A batch as dictionaries. Dates and times become text: Python has no nanoseconds and no year 10,000."""
    import pyarrow as pa

    columns = [
        c.cast(pa.string()) if pa.types.is_temporal(c.type) and not pa.types.is_duration(c.type) else c for c in batch.columns
    ]
    return pa.RecordBatch.from_arrays(columns, names=batch.schema.names).to_pylist()
