"""Which results count: loose scores of many runs, sorted by method, seed and benchmark, with everything doubtful flagged.

    results.csv or records ► Observation ► settle ► what counts + Flag

A missing run, a score that is not a number and two results for one run are flagged, left out and never averaged; of two results
that contradict each other one can be chosen by its run id. Values are in points, higher is better. No torch; the only disk access
is `read_results_csv`.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

from clusterft.tabular import open_text, separator_of


@dataclass(frozen=True)
class Observation:
    """One score of one run, in points. passed and total where the score is a share of problems; nan where there is no number."""

    method: str
    seed: int
    benchmark: str
    value: float
    run_id: str
    passed: int | None = None
    total: int | None = None


@dataclass(frozen=True)
class Flag:
    """Something that keeps a number out of the table.

    kind is missing_run, missing_score, nan_score, conflicting_runs or duplicate_runs (the same value twice: counted once).
    """

    kind: str
    method: str
    seed: int
    benchmark: str = ""
    values: tuple[float, ...] = ()
    run_ids: tuple[str, ...] = ()
    settled_by: str = ""

    @property
    def open(self) -> bool:
        """True for a conflict that nobody has settled."""
        return self.kind == "conflicting_runs" and not self.settled_by

    def sentence(self) -> str:
        where = f"{self.method}, seed {self.seed}" + (f", {self.benchmark}" if self.benchmark else "")
        if self.kind == "conflicting_runs":
            pairs = ", ".join(f"{r} has {v:g}" for r, v in zip(self.run_ids, self.values, strict=True))
            return f"{where}: results contradict each other ({pairs}); " + (
                f"{self.settled_by} was chosen" if self.settled_by else "left out, choose one by its run id"
            )
        what = {
            "missing_run": "no run",
            "missing_score": "the run has no score here",
            "nan_score": f"the score is not a number (run {', '.join(self.run_ids)})",
            "duplicate_runs": f"the same score from several runs ({', '.join(self.run_ids)}), counted once",
        }
        return f"{where}: {what[self.kind]}"


def unique(items: Iterable[Any]) -> list[Any]:
    return list(dict.fromkeys(items))


def _settle_one(rows: Sequence[Observation], choices: Sequence[str]) -> tuple[Observation | None, Flag | None]:
    """One (method, seed, benchmark): the observation that counts, if any, and a flag, if any."""
    first = rows[0]
    run_ids = tuple(r.run_id for r in rows)
    shown = tuple(float(r.passed) if r.passed is not None else r.value for r in rows)
    place = (first.method, first.seed, first.benchmark)
    if len({"nan" if math.isnan(r.value) else repr(r.value) for r in rows}) > 1:
        chosen = [r for r in rows if r.run_id in choices]
        if len({r.run_id for r in chosen}) > 1:
            raise ValueError(f"{place}: both {chosen[0].run_id} and {chosen[1].run_id} were chosen; choose one")
        if len(chosen) > 1:
            raise ValueError(f"{place}: run {chosen[0].run_id} itself holds several values, so choosing it settles nothing")
        flag = Flag("conflicting_runs", *place, shown, run_ids, chosen[0].run_id if chosen else "")
        kept = chosen[0] if chosen and not math.isnan(chosen[0].value) else None
        return kept, flag
    if math.isnan(first.value):
        return None, Flag("nan_score", *place, run_ids=run_ids)
    return first, Flag("duplicate_runs", *place, run_ids=run_ids) if len(rows) > 1 else None


def settle(
    observations: Sequence[Observation], expected_seeds: Sequence[int] | None = None, choices: Sequence[str] = ()
) -> tuple[dict[tuple[str, str], dict[int, Observation]], list[Flag]]:
    """What counts, as (benchmark, method) -> seed -> observation, and the flags.

    expected_seeds  seeds that every method should have; by default every seed that any method has
    choices         run ids that win where results contradict each other

    Raises ValueError if there are no observations, totals differ within a benchmark, a value is infinite, or
    a chosen run does not exist.
    """
    if not observations:
        raise ValueError("no results at all")
    methods, benchmarks = unique(o.method for o in observations), unique(o.benchmark for o in observations)
    seeds = sorted(set(expected_seeds) if expected_seeds is not None else {o.seed for o in observations})
    _check_totals(observations)
    unknown = set(choices) - {o.run_id for o in observations}
    if unknown:
        raise ValueError(f"chosen run {min(unknown)} is not among the results")
    grouped: dict[tuple[str, int, str], list[Observation]] = {}
    for o in observations:
        grouped.setdefault((o.method, o.seed, o.benchmark), []).append(o)
    cells: dict[tuple[str, str], dict[int, Observation]] = {(b, m): {} for b in benchmarks for m in methods}
    flags: list[Flag] = []
    for method in methods:
        for seed in sorted({*seeds, *(o.seed for o in observations if o.method == method)}):
            present = [b for b in benchmarks if (method, seed, b) in grouped]
            if not present:
                flags.append(Flag("missing_run", method, seed))
                continue
            for b in benchmarks:
                if b not in present:
                    flags.append(Flag("missing_score", method, seed, b))
                    continue
                kept, flag = _settle_one(grouped[method, seed, b], choices)
                flags += [flag] if flag else []
                if kept is not None:
                    cells[b, method][seed] = kept
    return cells, flags


def _check_totals(observations: Sequence[Observation]) -> None:
    totals: dict[str, int] = {}
    for o in observations:
        if math.isinf(o.value):
            raise ValueError(f"{o.method}, seed {o.seed}, {o.benchmark}: the score is infinite (run {o.run_id})")
        if o.total is not None and totals.setdefault(o.benchmark, o.total) != o.total:
            raise ValueError(
                f"{o.benchmark}: run {o.run_id} was scored on {o.total} problems, others on {totals[o.benchmark]}; "
                "these are different benchmarks and cannot share a column"
            )


def read_results_csv(path: Path) -> list[Observation]:
    """Reads method, seed, benchmark, passed, total, score (points), run_id. Counts win over the rounded score.

    Separated by commas, semicolons or tabs, in UTF-8 or UTF-16 with a mark, as spreadsheets write them. Raises ValueError naming the
    line where a column is missing, a number cannot be read or score and counts disagree; FileNotFoundError.
    """
    if not path.is_file():
        raise FileNotFoundError(f"{path}: there is no such file")
    with open_text(path) as text:
        try:
            first = text.readline()
            reader = csv.DictReader(chain([first], text), delimiter=separator_of(path, first))
            missing = {"method", "seed", "benchmark", "passed", "total", "score", "run_id"} - set(reader.fieldnames or ())
            if missing:
                raise ValueError(f"{path}:1: columns {', '.join(sorted(missing))} are missing")
            return [_csv_row(row, f"{path}:{reader.line_num}") for row in reader]
        except UnicodeDecodeError as error:
            raise ValueError(f"{path}: it is not {text.encoding} ({error}); save it again as UTF-8") from error


def _csv_row(row: Mapping[str, str], where: str) -> Observation:
    try:
        seed, score = int(row["seed"]), float(row["score"] or "nan")
        passed, total = (int(row[k]) if row[k] else None for k in ("passed", "total"))
    except (TypeError, ValueError) as error:
        raise ValueError(f"{where}: not a number ({error}); mend the line or leave the score empty") from error
    if passed is not None and total is not None and (row["score"] == "" or not math.isnan(score)):
        exact = 100 * passed / total if total else math.nan
        if not 0 <= passed <= total or (row["score"] != "" and abs(exact - score) > 0.01):
            raise ValueError(f"{where}: {passed} of {total} is not {row['score']} points; mend the line")
        score = exact
    return Observation(row["method"], seed, row["benchmark"], score, row["run_id"], passed, total)
