"""What loading found: rows read, kept, set aside by reason with file and line, duplicates, layouts, where each row's bytes lie.

In: counts from `clusterft.data`. Out: a table for a terminal (one line a reason, never one a row), a JSON-able dictionary, and
`source_line_bytes`, which gives an exporter the source line of an example byte for byte.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from clusterft.records import Example, Rejection
from clusterft.sources import DataError, open_bytes
from clusterft.text_rules import printable

SHOWN = 3
"""Examples shown behind each count."""

SHOWN_REASONS = 20
"""Reasons shown on a terminal: names of roles come from the data, and there may be thousands."""


class LineIndex:
    """Line number -> (offset, size) in the decompressed bytes of one file: 20 bytes a row.

    A JSON list may stand on one line: `nth` holds, by id, how many rows start on a row's line before it, where any do.
    """

    def __init__(self) -> None:
        self.lines, self.offsets, self.sizes = array("L"), array("Q"), array("I")
        self.nth: dict[str, int] = {}

    def add(self, line: int, offset: int, size: int) -> None:
        self.lines.append(line)
        self.offsets.append(offset)
        self.sizes.append(size)

    def place(self, example: Example) -> tuple[int, int]:
        """(line, rows that start on that line before it): the order of the file."""
        return example.line, self.nth.get(example.id, 0)

    def find(self, example: Example) -> tuple[int, int] | None:
        """(offset, size) of an example's row, None where its format has no bytes."""
        line, nth = self.place(example)
        at = bisect_left(self.lines, line) + nth
        if at >= len(self.lines) or self.lines[at] != line:
            return None
        return self.offsets[at], self.sizes[at]


@dataclass(frozen=True)
class FileReport:
    """One source: its kind (jsonl, json_array, csv, parquet, hub, stdlib), rows read and how many rows had each layout."""

    source: str
    kind: str
    rows_read: int
    rows_kept: int
    formats: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class LoadReport:
    """Facts of one load. rows_read = rows_kept + rejected; rows_kept = train_rows + heldout_rows + rows_over_max.

    duplicates       rows whose content occurred before (kept, their ids end in -2, -3, ...)
    duplicate_lines  up to 20 pairs ((source, line), (source, line) of the first)
    noted            reason -> rows that are kept yet worth a look (placeholder answers)
    """

    name: str
    files: tuple[FileReport, ...]
    rejected: tuple[Rejection, ...]
    rows_kept: int
    duplicates: int
    duplicate_groups: int
    duplicate_lines: tuple[tuple[tuple[str, int], tuple[str, int]], ...]
    supervised_turns: int
    noted: Mapping[str, tuple[tuple[str, int], ...]]
    train_rows: int
    heldout_rows: int
    rows_over_max: int
    detected: bool
    notes: tuple[str, ...] = ()
    index: Mapping[str, LineIndex] = field(default_factory=dict, repr=False, compare=False)

    @property
    def rows_read(self) -> int:
        return sum(f.rows_read for f in self.files)

    @property
    def formats(self) -> dict[str, int]:
        total: dict[str, int] = {}
        for file in self.files:
            for name, count in file.formats.items():
                total[name] = total.get(name, 0) + count
        return total

    @property
    def rejected_by_reason(self) -> dict[str, int]:
        return {reason: len(rows) for reason, rows in _by_reason(self.rejected).items()}

    def lines(self) -> list[str]:
        """The summary for a terminal."""
        layouts = ", ".join(f"{name} ({count:,} rows)" for name, count in self.formats.items())
        how = "detected" if self.detected else "as configured"
        out = [
            f"{self.name}: {self.rows_read:,} rows read from {len(self.files)} source(s), {self.rows_kept:,} kept, "
            f"{len(self.rejected):,} set aside, {self.supervised_turns:,} supervised turns",
            f"  layout ({how}; override with data.file_format or data.fields): {layouts}",
            f"  split: {self.train_rows:,} to choose from, {self.heldout_rows:,} held out, "
            f"{self.rows_over_max:,} over data.max_rows",
        ]
        out += [
            f"  {reason}: {_shown(len(rows), [(r.source, r.line) for r in rows])}"
            for reason, rows in list(_by_reason(self.rejected).items())[:SHOWN_REASONS]
        ]
        others = len(_by_reason(self.rejected)) - SHOWN_REASONS
        if others > 0:
            out.append(f"  ... and {others:,} more reasons, see the rejected rows")
        if self.duplicates:
            out.append(f"  duplicates: {self.duplicates:,} rows repeat one of {self.duplicate_groups:,} earlier ones (kept)")
        out += [f"  {reason} (kept): {_shown(len(places), places)}" for reason, places in self.noted.items()]
        return out + [f"  note: {note}" for note in self.notes]

    def to_json(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "files": [{**vars(f), "formats": dict(f.formats)} for f in self.files],
            "rows_read": self.rows_read,
            "rows_kept": self.rows_kept,
            "rejected": self.rejected_by_reason,
            "rejected_examples": {
                k: [[r.source, r.line, r.detail] for r in v[:SHOWN]] for k, v in _by_reason(self.rejected).items()
            },
            "duplicates": self.duplicates,
            "duplicate_groups": self.duplicate_groups,
            "noted": {k: len(v) for k, v in self.noted.items()},
            "supervised_turns": self.supervised_turns,
            "train_rows": self.train_rows,
            "heldout_rows": self.heldout_rows,
            "rows_over_max": self.rows_over_max,
            "detected": self.detected,
            "notes": list(self.notes),
        }

    def source_line_bytes(self, example: Example) -> bytes:
        """The example's source line without its line ending, byte for byte. Raises DataError where the format has none."""
        return self.source_lines([example])[0]

    def source_lines(self, examples: Iterable[Example]) -> list[bytes]:
        """Source lines of several examples, in their order; each file is opened once and read forwards.

        Raises DataError for CSV, Parquet and hub rows, which have no bytes of their own.
        """
        wanted = list(examples)
        by_source: dict[str, list[int]] = {}
        for i, example in enumerate(wanted):
            by_source.setdefault(example.source, []).append(i)
        found: dict[int, bytes] = {}
        for source, positions in by_source.items():
            ordered = sorted(positions, key=lambda i: self._place(wanted[i]))
            found.update(zip(ordered, self.forward_lines(source, [wanted[i] for i in ordered]), strict=True))
        return [found[i] for i in range(len(wanted))]

    def forward_lines(self, source: str, examples: Iterable[Example]) -> Iterator[bytes]:
        """Source lines of examples of one source that come in the order of the file, one at a time. Raises DataError."""
        with open_bytes(Path(source)) as stream:
            at, last, line = 0, -1, b""
            for example in examples:
                offset, size = self._place(example)
                if offset != last:
                    _skip(stream, offset - at)
                    last, line, at = offset, stream.read(size), offset + size
                    if len(line) < size:
                        raise DataError(f"{source}: the file became shorter while it was used; run the command again")
                yield line

    def has_bytes(self, example: Example) -> bool:
        """True if the example's source keeps bytes of its own for it."""
        index = self.index.get(example.source)
        return index is not None and index.find(example) is not None

    def _place(self, example: Example) -> tuple[int, int]:
        index = self.index.get(example.source)
        place = index.find(example) if index else None
        if place is None:
            raise DataError(f"{example.source} line {example.line}: no source bytes; only UTF-8 JSON files keep them")
        return place


def _skip(stream: Any, count: int) -> None:
    """Reads on by `count` bytes, or to the end: a compressed stream cannot seek."""
    while count > 0:
        block = stream.read(min(1 << 20, count))
        if not block:
            return
        count -= len(block)


def _by_reason(rejected: Iterable[Rejection]) -> dict[str, list[Rejection]]:
    groups: dict[str, list[Rejection]] = {}
    for rejection in rejected:
        groups.setdefault(rejection.reason, []).append(rejection)
    return dict(sorted(groups.items(), key=lambda item: (-len(item[1]), item[0])))


def _shown(count: int, places: Iterable[tuple[str, int]]) -> str:
    some = [f"{printable(Path(source).name)} line {line}" for source, line in list(places)[:SHOWN]]
    return f"{count:,} ({', '.join(some)}{', ...' if count > len(some) else ''})"
