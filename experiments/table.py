"""A table before it is text: columns, lines, values with their seeds and run ids, the paper's numbers, what is wrong.

`aggregate` and `analysis` make it, `render` and `figures` read it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace

from experiments.reported import Reported
from experiments.statistics import mean_sd, t_interval

OK, INCOMPLETE, NOT_APPLICABLE = "ok", "incomplete", "not applicable"


class Told(str):
    """Why a seed has no value where nothing is wrong with its run, or where another line of the table is named for it."""


@dataclass(frozen=True)
class Column:
    """One column of values.

    unit    percent | nats | seconds | count | ratio | GiB | number | cosine | text
    better  higher | lower | None (no better and worse)
    """

    key: str
    label: str
    unit: str
    better: str | None = None


@dataclass(frozen=True)
class Difference:
    """Ours minus the reference, paired by seed, in the unit of the column. `verdict` counts better as up, whatever the unit.

    n: seeds that both have; planned: seeds that both should have, 0 where the value that it belongs to says so
    """

    mean: float
    interval: tuple[float, float] | None
    n: int
    verdict: str
    planned: int = 0


@dataclass(frozen=True)
class Value:
    """One cell. state: ok | incomplete (seeds are absent) | not applicable (the reference against itself) | why there is none.

    by_seed  seed -> value, only those that exist; run_ids: seed -> run
    problems seed -> why it has no value; a reason that is `Told` is no problem of the table
    """

    planned: int
    by_seed: Mapping[int, float] = field(default_factory=dict)
    run_ids: Mapping[int, str] = field(default_factory=dict)
    problems: Mapping[int, str] = field(default_factory=dict)
    state: str = OK
    best: bool = False
    within_noise: bool = False
    difference: Difference | None = None
    text: str | None = None  # for columns of unit text

    def __post_init__(self) -> None:
        if self.difference is not None and self.difference.planned != self.planned:
            object.__setattr__(self, "difference", replace(self.difference, planned=self.planned))

    @property
    def n(self) -> int:
        return len(self.by_seed)

    @property
    def has_mean(self) -> bool:
        return self.state in (OK, INCOMPLETE) and self.n > 0

    @property
    def mean(self) -> float:
        return mean_sd([self.by_seed[s] for s in sorted(self.by_seed)])[0]

    @property
    def sd(self) -> float | None:
        return mean_sd([self.by_seed[s] for s in sorted(self.by_seed)])[1]

    @property
    def interval(self) -> tuple[float, float] | None:
        return t_interval([self.by_seed[s] for s in sorted(self.by_seed)])


@dataclass(frozen=True)
class Line:
    """One row of the printed table."""

    row: str
    column: str
    values: Mapping[str, Value]

    @property
    def name(self) -> str:
        """The name that --explain takes: "CluSTER r=1.00"."""
        return f"{self.row} {self.column}".rstrip()


@dataclass(frozen=True)
class Table:
    """A table with everything that its outputs show."""

    id: str
    title: str
    scale: str
    scale_note: str
    row_title: str
    column_title: str
    columns: tuple[Column, ...]
    lines: tuple[Line, ...]
    reference: str | None = None
    reported: Reported | None = None
    expected: str = ""
    problems: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def final(self) -> bool:
        """Nothing is missing, failed or in conflict."""
        return not self.problems

    @property
    def has_columns(self) -> bool:
        """Whether lines carry a column label at all."""
        return any(line.column for line in self.lines)

    def column(self, key: str) -> Column:
        for column in self.columns:
            if column.key == key:
                return column
        raise KeyError(f"{self.id} has no column {key!r}; it has {', '.join(c.key for c in self.columns)}")

    def line(self, name: str) -> Line:
        for line in self.lines:
            if line.name == name:
                return line
        raise KeyError(f"{self.id} has no line {name!r}; it has {', '.join(repr(x.name) for x in self.lines)}")

    def cells(self) -> Iterator[tuple[Line, Column, Value]]:
        for line in self.lines:
            for column in self.columns:
                if column.key in line.values:
                    yield line, column, line.values[column.key]
