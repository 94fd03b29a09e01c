"""What an experiment file may say, and the cells that follow from it.

In comes the `experiment:` node of a composed configuration (conf/experiment/ID.yaml) and the name of the scale; out comes an
`ExperimentConfig` that has been checked, and from it the list of `Cell`s: row x column x seed, in that order of nesting.

A row or column is a label with a list of Hydra overrides. Overrides of `common`, of the row and of the column must not name the
same key twice: Hydra would silently keep the last.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from omegaconf import MISSING, OmegaConf

from experiments.artifacts import SCHEMAS, VALUE_COLUMNS

NOT_BUILT = "not built yet"
KINDS = ("grid", "analysis", "generated", "all")

RECORD_VALUES: dict[str, tuple[str, str]] = {
    "data_usage": ("data used", "percent"),
    "budget_rows": ("rows kept", "count"),
    "feature_seconds": ("model work for selection", "seconds"),
    "choose_seconds": ("choosing", "seconds"),
    "selection_seconds": ("selection time", "seconds"),
    "selection_cpu_seconds": ("selection processor time", "seconds"),
    "training_seconds": ("training time", "seconds"),
    "training_cpu_seconds": ("training processor time", "seconds"),
    "total_seconds": ("total time", "seconds"),
    "time_saved": ("total time saved", "percent"),
    "training_time_saved": ("training time saved", "percent"),
    "time_per_data": ("time saved per data saved", "ratio"),
    "training_cpu_saved": ("training processor time saved", "percent"),
    "cpu_per_data": ("processor time saved per data saved", "ratio"),
    "steps": ("steps", "count"),
    "tokens": ("tokens", "count"),
    "target_tokens": ("response tokens", "count"),
    "last_loss": ("last training loss", "nats"),
    "peak_memory_gib": ("peak memory", "GiB"),
}
"""What `show` may name beside metrics: key -> (heading, unit)."""

SCORES, AVERAGE = "scores", "average"
"""Two more names for `show`: every metric of the records, and the mean of those that are fractions (or of `average_of`)."""


@dataclass
class ScalePatch:
    """What another scale replaces in an experiment; a field that is left out stays as it is."""

    title: str | None = None
    rows: dict[str, list[str]] | None = None
    columns: dict[str, list[str]] | None = None
    common: list[str] | None = None
    once: list[str] | None = None
    metrics: list[str] | None = None
    average_of: list[str] | None = None
    seeds: list[int] | None = None


@dataclass
class ExperimentConfig:
    """The node `experiment:`. One table or figure of the paper.

    id         file name without .yaml; also the name of the results
    kind       grid (a table of runs) | analysis (artifacts of runs) | generated (from code and data) | all (members)
    rows       label -> Hydra overrides, in the order of the table; the same for columns
    common     overrides of every cell; they win over the scale, unlike values written into the file itself
    once       rows that do not depend on the column (full data): one cell a seed, without the column's overrides
    metrics    task/name of the metrics to show, in order; empty for all that the records hold
    average_of task/name of the fractions that `average` is the mean of; empty for all that are shown
    show       columns after the score: names of RECORD_VALUES, `scores`, `average`
    reference  the row that differences and saved time are taken against
    artifacts  file that runs must have beside their record (experiments.artifacts) -> rows whose runs need it, [] for all rows
    not_built  rows whose option does not exist yet -> what is missing; shown, never run
    values     numbers out of artifacts to show, as artifact.key
    reported   key in reported.yaml
    margin_*   how much worse than the reference still counts as no worse
    by_scale   scale -> replacements (sizes that a laptop cannot take)
    """

    id: str = MISSING
    title: str = MISSING
    kind: str = MISSING
    row_title: str = "Method"
    column_title: str = "Ratio"
    common: list[str] = field(default_factory=list)
    rows: dict[str, list[str]] = field(default_factory=dict)
    columns: dict[str, list[str]] = field(default_factory=dict)
    once: list[str] = field(default_factory=list)
    seeds: list[int] = field(default_factory=list)
    metrics: list[str] = field(default_factory=list)
    average_of: list[str] = field(default_factory=list)
    show: list[str] = field(default_factory=list)
    reference: str | None = None
    artifacts: dict[str, list[str]] = field(default_factory=dict)
    values: list[str] = field(default_factory=list)
    reported: str | None = None
    expected: str = ""
    figure: str | None = None
    margin_points: float = 1.0
    margin_nats: float = 0.02
    members: list[str] = field(default_factory=list)
    not_built: dict[str, str] = field(default_factory=dict)
    by_scale: dict[str, ScalePatch] = field(default_factory=dict)


@dataclass(frozen=True)
class Cell:
    """One run that a table asks for. `index` is the position that `cell=` and array jobs use; `overrides` end in the seed."""

    index: int
    row: str
    column: str
    seed: int
    overrides: tuple[str, ...]

    @property
    def line(self) -> tuple[str, str]:
        """The table line that this cell belongs to."""
        return self.row, self.column

    @property
    def name(self) -> str:
        return " ".join(part for part in (self.row, self.column, f"seed={self.seed}") if part)

    @property
    def selector(self) -> str | None:
        """The selector that the overrides choose, or None when they leave it to the configuration."""
        chosen = [o.split("=", 1)[1] for o in self.overrides if override_key(o) == "selector"]
        return chosen[-1] if chosen else None


def override_key(override: str) -> str:
    """The key that a Hydra override sets: `+a.b=1` -> `a.b`. Raises ValueError when there is no equals sign and no `~`."""
    if override.startswith("~"):
        return override[1:].split("=", 1)[0]
    if "=" not in override:
        raise ValueError(f"override {override!r} has no '='; write key=value")
    return override.split("=", 1)[0].lstrip("+")


def artifacts_of(spec: ExperimentConfig, row: str) -> tuple[str, ...]:
    """The artifacts that a row's runs need."""
    return tuple(name for name, rows in spec.artifacts.items() if not rows or row in rows)


def not_built(spec: ExperimentConfig, cell: Cell, available: Collection[str] | None) -> str | None:
    """Why a cell cannot run yet: its selector has no file, or the experiment says so. None when it can."""
    if cell.row in spec.not_built:
        return f"{spec.not_built[cell.row]} is {NOT_BUILT}"
    if available is not None and cell.selector is not None and cell.selector not in available:
        return f"selector {cell.selector} is {NOT_BUILT}"
    return None


def load_spec(node: Any, scale: str | None = None) -> ExperimentConfig:
    """The checked experiment of a composed configuration's `experiment` node, as `scale` wants it.

    Raises omegaconf errors for unknown keys and wrong types, ValueError for what does not fit together.
    """
    merged = OmegaConf.merge(OmegaConf.structured(ExperimentConfig), node)
    spec = OmegaConf.to_object(merged)
    assert isinstance(spec, ExperimentConfig)
    if scale is not None and scale in spec.by_scale:
        patch = spec.by_scale[scale]
        for item in fields(ScalePatch):
            if getattr(patch, item.name) is not None:
                setattr(spec, item.name, getattr(patch, item.name))
    check_spec(spec)
    return spec


def check_spec(spec: ExperimentConfig) -> None:
    """Raises ValueError with one sentence when parts of an experiment contradict each other."""
    where = f"experiment {spec.id!r}"
    if spec.kind not in KINDS:
        raise ValueError(f"{where}: kind {spec.kind!r} is not one of {', '.join(KINDS)}")
    if spec.kind == "all" and not spec.members:
        raise ValueError(f"{where}: kind all needs members")
    if spec.kind in ("grid", "analysis") and not (spec.rows and spec.columns and spec.seeds):
        raise ValueError(f"{where}: kind {spec.kind} needs rows, columns and seeds")
    if len(set(spec.seeds)) != len(spec.seeds):
        raise ValueError(f"{where}: seeds {spec.seeds} repeat")
    in_artifacts = [row for rows in spec.artifacts.values() for row in rows]
    named = [*spec.once, *([spec.reference] if spec.reference else []), *spec.not_built, *in_artifacts]
    for name in named:
        if spec.rows and name not in spec.rows:
            raise ValueError(f"{where}: {name!r} is not a row; rows are {', '.join(spec.rows)}")
    known = {*RECORD_VALUES, SCORES, AVERAGE}
    for name in spec.show:
        if name not in known:
            raise ValueError(f"{where}: show {name!r} is unknown; known are {', '.join(sorted(known))}")
    for name in spec.artifacts:
        if name not in SCHEMAS:
            raise ValueError(f"{where}: artifact {name!r} is unknown; known are {', '.join(SCHEMAS)}")
    for value in spec.values:
        if value not in VALUE_COLUMNS:
            raise ValueError(f"{where}: value {value!r} is unknown; known are {', '.join(VALUE_COLUMNS)}")
        if value.split(".", 1)[0] not in spec.artifacts:
            raise ValueError(f"{where}: value {value!r} comes from no artifact of {list(spec.artifacts)}")


def expand(spec: ExperimentConfig) -> list[Cell]:
    """All cells, first by row, then by column, then by seed. Raises ValueError when a cell sets one key twice."""
    cells: list[Cell] = []
    for row, row_overrides in spec.rows.items():
        columns = {"": []} if row in spec.once else spec.columns
        for column, column_overrides in columns.items():
            for seed in spec.seeds:
                overrides = [*spec.common, *row_overrides, *column_overrides, f"seed={seed}"]
                _refuse_repeats(f"experiment {spec.id!r}, {row} {column}".rstrip(), overrides)
                cells.append(Cell(len(cells), row, column, seed, tuple(overrides)))
    return cells


def _refuse_repeats(where: str, overrides: Sequence[str]) -> None:
    keys = [override_key(o) for o in overrides]
    twice = sorted({k for k in keys if keys.count(k) > 1})
    if twice:
        raise ValueError(f"{where}: {', '.join(twice)} is set more than once; keep it in one of common, row, column")
