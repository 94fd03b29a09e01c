"""table = required and complete: from an experiment and the records to a `Table`.

Every seed that has no value is named with the reason; a value from fewer seeds than planned is marked incomplete, shown with its
n and never called best; two records that contradict each other give no value at all.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any

from clusterft.records import Metric
from experiments.artifacts import VALUE_COLUMNS, read_artifact, value_at
from experiments.cellruns import CellRun, by_line, cell_runs
from experiments.compare import add_comparisons
from experiments.plan import Resolve
from experiments.recordstore import Records, Run
from experiments.remarks import describe_notes, describe_problems, shared_model_work, unequal_budgets
from experiments.reported import reported
from experiments.spec import AVERAGE, NOT_BUILT, RECORD_VALUES, SCORES, ExperimentConfig, artifacts_of
from experiments.table import INCOMPLETE, NOT_APPLICABLE, OK, Column, Line, Table, Value

BETTER = {"fraction": "higher", "nats": "lower"}
UNIT = {"fraction": "percent", "nats": "nats"}
COST_KEYS = (
    *("feature_seconds", "choose_seconds", "selection_seconds", "training_seconds", "total_seconds", "peak_memory_gib"),
    *("selection_cpu_seconds", "training_cpu_seconds"),
)
RELATIVE = {
    "time_saved": "total_seconds",
    "training_time_saved": "training_seconds",
    "time_per_data": "training_seconds",
    "training_cpu_saved": "training_cpu_seconds",
    "cpu_per_data": "training_cpu_seconds",
}
"""Columns that compare with the reference row -> the seconds that they compare."""
PER_DATA = ("time_per_data", "cpu_per_data")


def build(
    spec: ExperimentConfig,
    resolve: Resolve,
    records: Records,
    available: Collection[str] | None = None,
    scale: str = "paper",
    scale_note: str = "",
) -> Table:
    """The table of an experiment of kind grid or analysis."""
    runs = cell_runs(spec, resolve, records, available)
    metrics = metric_columns(spec.metrics, runs)
    averaged = metric_columns(spec.average_of, runs) if spec.average_of else metrics
    columns = table_columns(spec, metrics)
    lines = []
    for group in by_line(runs):
        cell = group[0].cell
        values = {c.key: line_value(group, reader(c, metrics, averaged)) for c in columns if c.key not in RELATIVE}
        unneeded = [v for v in spec.values if v.split(".", 1)[0] not in artifacts_of(spec, cell.row)]
        values |= {v: Value(len(group), state=NOT_APPLICABLE) for v in unneeded}
        lines.append(Line(cell.row, cell.column, values))
    lines = add_relative(spec, columns, lines)
    table = Table(
        id=spec.id,
        title=spec.title,
        scale=scale,
        scale_note=scale_note,
        row_title=spec.row_title,
        column_title=spec.column_title,
        columns=tuple(columns),
        lines=tuple(lines),
        reference=spec.reference,
        reported=reported(spec.reported),
        expected=spec.expected,
        problems=tuple(describe_problems(runs)),
        notes=(*describe_notes(runs), *unequal_budgets(spec, lines), *shared_model_work(spec, runs)),
    )
    return add_comparisons(table, spec)


def metric_key(metric: Metric) -> str:
    return f"{metric.task}/{metric.name}"


def metric_columns(names: list[str], runs: list[CellRun]) -> dict[str, tuple[Column, str]]:
    """Column key -> (column, hash of the problems), of some metrics or of all. Two problem sets under one name become two columns."""
    seen: dict[str, dict[str, Metric]] = {}
    for one in runs:
        if one.run.state == "complete" and one.run.stored is not None:
            for metric in one.run.stored.record.metrics:
                seen.setdefault(metric_key(metric), {}).setdefault(metric.dataset_hash, metric)
    wanted = names or list(seen)
    columns: dict[str, tuple[Column, str]] = {}
    for name in wanted:
        for digest, metric in sorted(seen.get(name, {}).items()):
            key = name if len(seen[name]) == 1 else f"{name}#{digest[:8]}"
            label = f"{metric.task} {metric.name}" + ("" if key == name else f" ({digest[:8]})")
            columns[key] = (Column(key, label, UNIT[metric.unit], BETTER[metric.unit]), digest)
        if name not in seen:
            kind = "nats" if "/nll" in name else "fraction"  # no record says it yet
            columns[name] = (Column(name, name.replace("/", " "), UNIT[kind], BETTER[kind]), "")
    return columns


def table_columns(spec: ExperimentConfig, metrics: Mapping[str, tuple[Column, str]]) -> list[Column]:
    """The columns in the order of `show`, then the values out of artifacts."""
    columns: list[Column] = []
    for name in spec.show:
        if name == SCORES:
            columns += [column for column, _ in metrics.values()]
        elif name == AVERAGE:
            columns.append(Column(AVERAGE, "average", "percent", "higher"))
        else:
            label, unit = RECORD_VALUES[name]
            columns.append(Column(name, label, unit))
    columns += [Column(v, *VALUE_COLUMNS[v]) for v in spec.values]
    return columns


Reader = Callable[[Run], float | str]


def reader(column: Column, metrics: Mapping[str, tuple[Column, str]], averaged: Mapping[str, tuple[Column, str]]) -> Reader:
    """A function that takes a complete run to the column's value, or to a sentence part that says why there is none.

    averaged: the metrics whose fractions `average` is the mean of."""
    if column.key in metrics:
        name, digest = column.key.split("#", 1)[0], metrics[column.key][1]
        return lambda run: _metric_value(run, name, digest)
    if column.key == AVERAGE:
        names = [(key.split("#", 1)[0], digest) for key, (c, digest) in averaged.items() if c.unit == "percent"]
        return lambda run: _average(run, names)
    if column.key in RECORD_VALUES:
        return lambda run: record_value(run, column.key)
    artifact, key = column.key.split(".", 1)
    return lambda run: _artifact_value(run, artifact, key)


def _metric_value(run: Run, name: str, digest: str) -> float | str:
    assert run.stored is not None
    if name in run.stored.bad_metrics:
        return f"{name} is not a number"
    for metric in run.stored.record.metrics:
        if metric_key(metric) == name and metric.dataset_hash == digest:
            return metric.value * (100 if metric.unit == "fraction" else 1)
    return f"{name} was not recorded"


def _average(run: Run, names: list[tuple[str, str]]) -> float | str:
    if not names:
        return "no metric is a fraction"
    values = [_metric_value(run, name, digest) for name, digest in names]
    words = [v for v in values if isinstance(v, str)]
    return words[0] if words else sum(v for v in values if isinstance(v, float)) / len(values)


def record_value(run: Run, key: str) -> float | str:
    """A number of RECORD_VALUES out of a complete record, in the unit that is shown."""
    assert run.stored is not None
    record = run.stored.record
    sources: dict[str, tuple[Mapping[str, Any], str, float]] = {
        "data_usage": (record.selection, "data_usage", 100.0),
        "budget_rows": (record.selection, "budget", 1.0),
        **{k: (record.cost, k, 1.0) for k in COST_KEYS},
        **{k: (record.train, k, 1.0) for k in ("steps", "tokens", "target_tokens", "last_loss")},
    }
    mapping, name, factor = sources[key]
    value = mapping.get(name)
    return f"{name} was not recorded" if value is None else float(value) * factor


def _artifact_value(run: Run, artifact: str, key: str) -> float | str:
    values = read_artifact(run.artifacts, artifact)
    return f"artifact {artifact} was not made" if values is None else value_at(values, key.split("."))


def line_value(group: list[CellRun], read: Reader) -> Value:
    """One value over the seeds of a line."""
    by_seed: dict[int, float] = {}
    problems: dict[int, str] = {}
    for one in group:
        got = read(one.run) if one.run.state == "complete" else f"{one.run.state}, {one.run.reason}"
        if isinstance(got, str):
            problems[one.cell.seed] = got
        else:
            by_seed[one.cell.seed] = got
    run_ids = {one.cell.seed: one.run.run_id for one in group if one.run.run_id}
    return Value(len(group), by_seed, run_ids, problems, _state(group, by_seed, problems))


def _state(group: list[CellRun], by_seed: Mapping[int, float], problems: Mapping[int, str]) -> str:
    states = [one.run.state for one in group]
    for state in (NOT_BUILT, "conflict"):
        if state in states:
            return state
    if by_seed:
        return INCOMPLETE if problems else OK
    for state in ("failed", "missing"):
        if state in states:
            return state
    return "not recorded"


def add_relative(spec: ExperimentConfig, columns: list[Column], lines: list[Line]) -> list[Line]:
    """Fills the columns that compare a line's time with the reference row's, seed by seed."""
    wanted = [c.key for c in columns if c.key in RELATIVE]
    if not wanted:
        return lines
    if spec.reference is None:
        raise ValueError(f"experiment {spec.id!r}: {', '.join(wanted)} needs a reference row")
    places = {(line.row, line.column): line for line in lines}
    column_of = {line: ("" if spec.reference in spec.once else line) for line in [x.column for x in lines]}
    done = []
    for line in lines:
        base = places.get((spec.reference, column_of[line.column]))
        extra = {key: _relative(key, line, base, spec.reference) for key in wanted}
        done.append(Line(line.row, line.column, {c.key: {**line.values, **extra}[c.key] for c in columns}))
    return done


def _relative(key: str, line: Line, base: Line | None, reference: str) -> Value:
    seconds = RELATIVE[key]
    needed = [seconds, *(["data_usage"] if key in PER_DATA else [])]
    if any(name not in line.values for name in needed):
        raise ValueError(f"{key} needs {' and '.join(needed)} in `show`")
    own = line.values[seconds]
    if line.row == reference:
        return Value(own.planned, state=NOT_APPLICABLE)
    if base is None or not own.has_mean or not base.values[seconds].has_mean:
        state = own.state if not own.has_mean else f"no {reference}"
        return Value(own.planned, {}, own.run_ids, own.problems, state)
    theirs = base.values[seconds].by_seed
    saved = {s: 100 * (1 - own.by_seed[s] / theirs[s]) for s in sorted(own.by_seed.keys() & theirs.keys())}
    if key in PER_DATA:
        used = line.values["data_usage"].by_seed
        saved = {s: v / (100 - used[s]) for s, v in saved.items() if s in used and used[s] < 100}
    problems = {**base.values[seconds].problems, **own.problems}
    state = OK if len(saved) == own.planned else (INCOMPLETE if saved else "not recorded")
    return Value(own.planned, saved, own.run_ids, problems, state)
