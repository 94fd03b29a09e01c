"""table = required and complete: from an experiment and the records to a `Table`.

Every seed that has no value is named with the reason, as a problem of the table or, where no run could have had one, as a note; a
value from fewer seeds than planned is marked incomplete, shown with its n and never called best; two records that contradict each
other give no value at all.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping

from clusterft.records import Metric, is_number
from experiments.artifacts import VALUE_COLUMNS, read_artifact, value_at
from experiments.cellruns import CellRun, by_line, cell_runs
from experiments.compare import add_comparisons
from experiments.plan import Resolve
from experiments.recordstore import Records, Run
from experiments.remarks import (
    KEEPS_ALL,
    describe_notes,
    describe_problems,
    mixed_problems,
    problem_sets,
    provenance_notes,
    shared_model_work,
    unequal_budgets,
    without_saving,
)
from experiments.reported import reported
from experiments.spec import AVERAGE, NOT_BUILT, RECORD_VALUES, SCORES, ExperimentConfig, artifacts_of
from experiments.table import INCOMPLETE, NOT_APPLICABLE, OK, Column, Line, Table, Told, Value

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
    averaged = averaged_metrics(metric_columns(spec.average_of, runs) if spec.average_of else metrics, runs)
    columns = table_columns(spec, metrics)
    lines = []
    for group in by_line(runs):
        cell = group[0].cell
        values = {c.key: line_value(group, reader(c, metrics, averaged)) for c in columns if c.key not in RELATIVE}
        unneeded = [v for v in spec.values if v.split(".", 1)[0] not in artifacts_of(spec, cell.row)]
        values |= {v: Value(len(group), state=NOT_APPLICABLE) for v in unneeded}
        lines.append(Line(cell.row, cell.column, values))
    lines = add_relative(spec, columns, lines)
    scored = [*(_names(metrics) if SCORES in spec.show else []), *(averaged if AVERAGE in spec.show else [])]
    notes = [*_average_note(spec, averaged), *describe_notes(runs), *unequal_budgets(spec, lines), *shared_model_work(spec, runs)]
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
        problems=(*describe_problems(runs, lines), *mixed_problems(runs, dict.fromkeys(scored))),
        notes=(*notes, *without_saving(lines), *provenance_notes(runs)),
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
            key = name if len(seen[name]) == 1 else f"{name}#{digest[:8] or 'unnamed'}"
            label = f"{metric.task} {metric.name}" + ("" if key == name else f" ({digest[:8] or 'problems not named'})")
            columns[key] = (Column(key, label, UNIT[metric.unit], BETTER[metric.unit]), digest)
        if name not in seen:
            kind = "nats" if "/nll" in name else "fraction"  # no record says it yet
            columns[name] = (Column(name, name.replace("/", " "), UNIT[kind], BETTER[kind]), "")
    return columns


def _names(columns: Mapping[str, tuple[Column, str]]) -> list[str]:
    return list(dict.fromkeys(key.split("#", 1)[0] for key in columns))


def averaged_metrics(columns: Mapping[str, tuple[Column, str]], runs: list[CellRun]) -> dict[str, list[str]]:
    """Name -> hashes of the problems, of the fractions that `average` is the mean of.

    Of several sets of problems under one name it takes the one that most runs have: a mean over different problems compares nothing.
    """
    names = _names({key: given for key, given in columns.items() if given[0].unit == "percent"})
    return {name: sorted(next(iter(problem_sets(runs, name)), {""})) for name in names}


def _average_note(spec: ExperimentConfig, averaged: Mapping[str, list[str]]) -> list[str]:
    names = [name.replace("/", " ", 1) for name in averaged]
    if AVERAGE not in spec.show or not names:
        return []
    return [f"average is the mean of {', '.join(names)}" if len(names) > 1 else f"average is {names[0]} alone"]


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


def reader(column: Column, metrics: Mapping[str, tuple[Column, str]], averaged: Mapping[str, list[str]]) -> Reader:
    """A function that takes a complete run to the column's value, or to a sentence part that says why there is none.

    averaged: see `averaged_metrics`."""
    if column.key in metrics:
        name, digest = column.key.split("#", 1)[0], metrics[column.key][1]
        return lambda run: _metric_value(run, name, digest)
    if column.key == AVERAGE:
        return lambda run: _average(run, [(name, digest) for name, hashes in averaged.items() for digest in hashes])
    if column.key in RECORD_VALUES:
        return lambda run: record_value(run, column.key)
    artifact, key = column.key.split(".", 1)
    return lambda run: _artifact_value(run, artifact, key)


def _metric_value(run: Run, name: str, digest: str) -> float | str:
    assert run.stored is not None
    found = {m.dataset_hash: m for m in run.stored.record.metrics if metric_key(m) == name}
    if digest in found:
        return found[digest].value * (100 if found[digest].unit == "fraction" else 1)
    if name in run.stored.bad_metrics:
        return f"{name} is not a number"
    return Told(f"{name} was scored on other problems") if found else f"{name} was not recorded"


def _average(run: Run, names: list[tuple[str, str]]) -> float | str:
    if not names:
        return "no metric is a fraction"
    values = [_metric_value(run, name, digest) for name, digest in names]
    words = sorted((v for v in values if isinstance(v, str)), key=lambda reason: isinstance(reason, Told))
    return words[0] if words else sum(v for v in values if isinstance(v, float)) / len(values)


def record_value(run: Run, key: str) -> float | str:
    """A number of RECORD_VALUES out of a complete record, in the unit that is shown."""
    assert run.stored is not None
    sources = {
        "data_usage": ("selection", "data_usage", 100.0),
        "budget_rows": ("selection", "budget", 1.0),
        **{k: ("cost", k, 1.0) for k in COST_KEYS},
        **{k: ("train", k, 1.0) for k in ("steps", "tokens", "target_tokens", "last_loss")},
    }
    node, name, factor = sources[key]
    found = run.stored.data[node]
    if found.get(name) is None:
        return f"{name} was not {'measured' if name in found else 'recorded'}"
    return float(found[name]) * factor if is_number(found[name]) else f"{name} is not a number"


def _artifact_value(run: Run, artifact: str, key: str) -> float | str:
    try:
        values = read_artifact(run.artifacts, artifact)
        found = None if values is None else value_at(values, key.split("."))
    except (OSError, ArithmeticError, AttributeError, LookupError, TypeError, ValueError):
        return f"artifact {artifact} cannot be read"
    if found is None:
        return f"artifact {artifact} was not made"
    return found if is_number(found) else f"{key} of artifact {artifact} is not a number"


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
    if problems and all(isinstance(reason, Told) for reason in problems.values()):
        return "other problems"
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
        nothing = {seed: f"{seconds} is 0: no time can be compared with it" for seed, took in own.by_seed.items() if took <= 0}
        return Value(own.planned, problems=nothing, state=NOT_APPLICABLE)
    if not own.has_mean:
        return Value(own.planned, {}, own.run_ids, own.problems, own.state)
    theirs = Value(own.planned, state="no such line") if base is None else base.values[seconds]
    known = theirs.by_seed if theirs.has_mean else {}
    used = line.values["data_usage"] if key in PER_DATA else None
    saved: dict[int, float] = {}
    problems = dict(own.problems)
    for seed, took in sorted(own.by_seed.items()):
        if known.get(seed, 0.0) <= 0:
            reason = f"{seconds} is 0" if seed in known else theirs.problems.get(seed, theirs.state)
            problems[seed] = Told(f"no {reference}: {reason}")
        elif used is not None and seed not in used.by_seed:
            problems[seed] = used.problems[seed]
        elif used is not None and used.by_seed[seed] >= 100:
            problems[seed] = KEEPS_ALL
        else:
            percent = 100 * (1 - took / known[seed])
            saved[seed] = percent if used is None else percent / (100 - used.by_seed[seed])
    return Value(own.planned, saved, own.run_ids, problems, _relative_state(saved, problems, reference))


def _relative_state(saved: Mapping[int, float], problems: Mapping[int, str], reference: str) -> str:
    if saved:
        return INCOMPLETE if problems else OK
    reasons = set(problems.values())
    if reasons == {KEEPS_ALL}:
        return NOT_APPLICABLE
    return f"no {reference}" if all(isinstance(reason, Told) for reason in reasons) else "not recorded"
