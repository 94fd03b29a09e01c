"""Best, within noise, and the difference to the reference row: everything paired by seed.

Lines compete within one column of the experiment (one ratio, say). A line whose seeds are not all there, or with fewer than three
seeds, is never called best. A difference is taken over the seeds that both lines have and shown with their number where some are
absent; fewer than three give no verdict.
"""

from __future__ import annotations

from dataclasses import replace

from experiments.spec import ExperimentConfig
from experiments.statistics import MIN_SEEDS, has_no_width, mean_sd, paired, t_interval, verdict
from experiments.table import OK, Column, Difference, Line, Table, Value


def add_comparisons(table: Table, spec: ExperimentConfig) -> Table:
    """The table with best, within-noise marks and differences filled in."""
    lines = list(table.lines)
    for column in table.columns:
        if column.better is None:
            continue
        lines = _mark_best(lines, column, spec)
        if spec.reference is not None:
            lines = _differences(lines, column, spec)
    return replace(table, lines=tuple(lines))


def _with(line: Line, key: str, value: Value) -> Line:
    return replace(line, values={**line.values, key: value})


def _mark_best(lines: list[Line], column: Column, spec: ExperimentConfig) -> list[Line]:
    marked = list(lines)
    sign = 1.0 if column.better == "higher" else -1.0
    for group in dict.fromkeys(line.column for line in lines):
        places = [i for i, x in enumerate(lines) if x.column == group and x.row not in spec.once and _competes(x, column.key)]
        if len(places) < 2:
            continue
        best = max(places, key=lambda i: (sign * lines[i].values[column.key].mean, -i))
        for i in places:
            value = lines[i].values[column.key]
            if i == best:
                marked[i] = _with(marked[i], column.key, replace(value, best=True))
            elif _is_within_noise(value, lines[best].values[column.key]):
                marked[i] = _with(marked[i], column.key, replace(value, within_noise=True))
    return marked


def _competes(line: Line, key: str) -> bool:
    value = line.values[key]
    return value.state == OK and value.n >= MIN_SEEDS


def _is_within_noise(value: Value, best: Value) -> bool:
    interval = t_interval(paired(value.by_seed, best.by_seed))
    return interval is not None and (has_no_width(interval) or interval[0] <= 0.0 <= interval[1])


def _differences(lines: list[Line], column: Column, spec: ExperimentConfig) -> list[Line]:
    places = {(x.row, x.column): x for x in lines}
    done = []
    for line in lines:
        base = places.get((spec.reference or "", "" if spec.reference in spec.once else line.column))
        if base is None or line.row == spec.reference:
            done.append(line)
            continue
        difference = difference_of(line.values[column.key], base.values[column.key], column, spec)
        done.append(_with(line, column.key, replace(line.values[column.key], difference=difference)))
    return done


def difference_of(ours: Value, reference: Value, column: Column, spec: ExperimentConfig) -> Difference | None:
    """Paired difference with its interval and verdict; None where either side has no value or no seed is common."""
    if not ours.has_mean or not reference.has_mean:
        return None
    differences = paired(ours.by_seed, reference.by_seed)
    if not differences:
        return None
    interval = t_interval(differences)
    margin = {"nats": spec.margin_nats, "percent": spec.margin_points}.get(column.unit, 0.0)
    upward = interval if column.better == "higher" or interval is None else (-interval[1], -interval[0])
    return Difference(mean_sd(differences)[0], interval, len(differences), verdict(upward, margin))
