"""The paper's claims against our tables, claim by claim: what the difference is, with its interval, and what that allows to say.

In come tables by id; out come `Finding`s, and as text the table of docs/findings.md. Nothing is tuned: a claim that our numbers
contradict is reported as such, and a claim whose runs are not there as not measured.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from experiments.cells import difference_text, number
from experiments.compare import difference_of
from experiments.spec import ExperimentConfig
from experiments.table import Column, Difference, Line, Table

HOLDS, FAILS, OPEN, ABSENT = "holds", "does not hold", "cannot tell", "not measured"
SELECTORS = ("LESS", "S2L", "IFD")
Tables = Mapping[str, Table]


@dataclass(frozen=True)
class Finding:
    """One claim seen through one number of one table."""

    claim: str
    where: str
    what: str
    evidence: str
    verdict: str


def findings(tables: Tables) -> list[Finding]:
    """All findings, in the order of the claims. A claim without any measured line gives one finding `not measured`."""
    made: list[Finding] = []
    for claim, look in CLAIMS.items():
        found = [Finding(claim, *rest) for rest in look(tables)]
        made += found or [Finding(claim, "–", "–", "–", ABSENT)]
    return made


def findings_markdown(tables: Tables) -> str:
    rows = ["| Claim of the paper | Where | Number | Ours | Says |", "|---|---|---|---|---|"]
    rows += [f"| {f.claim} | {f.where} | {f.what} | {f.evidence} | {f.verdict} |" for f in findings(tables)]
    return "\n".join(rows) + "\n"


Rows = Iterator[tuple[str, str, str, str]]


def _scores(table: Table) -> list[Column]:
    scores = [c for c in table.columns if c.better is not None and c.key != "average" and "." not in c.key]
    return scores


def _pairs(table: Table, ours: str, other: str) -> Iterator[tuple[Line, Line]]:
    """Lines of two rows in the same column; a row that is there once meets every column."""
    for line in table.lines:
        if line.row == ours:
            for rival in table.lines:
                if rival.row == other and rival.column in ("", line.column):
                    yield line, rival


def _difference(line: Line, rival: Line, column: Column) -> Difference | None:
    return difference_of(line.values[column.key], rival.values[column.key], column, ExperimentConfig())


def _says(verdict: str, enough: tuple[str, ...]) -> str:
    """What a verdict says on a claim that needs one of `enough`."""
    if verdict in enough:
        return HOLDS
    return FAILS if verdict == "worse" else OPEN


def _compare(tables: Tables, ids: tuple[str, ...], ours: str, other: str, enough: tuple[str, ...], keys: str = "") -> Rows:
    for table in (tables[i] for i in ids if i in tables):
        columns = [c for c in table.columns if c.key == keys] if keys else _scores(table)
        for line, rival in _pairs(table, ours, other):
            for column in columns:
                difference = _difference(line, rival, column)
                if difference is not None:
                    what = f"{column.label}, {line.name} against {rival.name}"
                    yield table.id, what, difference_text(difference, column.unit), _says(difference.verdict, enough)


def kept_little(tables: Tables) -> Rows:
    for table in (tables[i] for i in ("table2", "table3") if i in tables):
        for line in table.lines:
            value = line.values.get("data_usage")
            if line.row == "CluSTER" and value is not None and value.has_mean:
                verdict = HOLDS if max(value.by_seed.values()) < 100 * float(line.column.removeprefix("r=")) else FAILS
                yield table.id, f"data used, {line.name}", f"{number(value.mean, 'percent')} %", verdict


def no_worse_than_full(tables: Tables) -> Rows:
    return _compare(tables, ("table2", "table3", "table16"), "CluSTER", "Full data", ("better", "no worse"))


def better_than_random(tables: Tables) -> Rows:
    return _compare(tables, ("table2", "table3", "table5", "table12", "table15", "table16"), "CluSTER", "Random", ("better",))


def time_follows_data(tables: Tables) -> Rows:
    """Training time saved over data saved, both against full data in the same runs: 1 would be exactly as much."""
    for line in tables["table4"].lines if "table4" in tables else ():
        value = line.values.get("time_per_data")
        if line.row == "CluSTER" and value is not None and value.has_mean:
            verdict = OPEN if value.interval is None else HOLDS if value.interval[0] > 0 else FAILS
            text = f"{number(value.mean, 'ratio')}" + (f" ± {number(value.sd, 'ratio')}" if value.sd is not None else "")
            yield "table4", f"training time saved per data saved, {line.name}", text, verdict


def selects_fastest(tables: Tables) -> Rows:
    if "table4" not in tables:
        return
    column = Column("selection_seconds", "selection time", "seconds", "lower")
    for rival in SELECTORS:
        for line, other in _pairs(tables["table4"], "CluSTER", rival):
            difference = _difference(line, other, column)
            if difference is not None:
                what = f"selection time, {line.name} against {rival}"
                yield "table4", what, difference_text(difference, "seconds"), _says(difference.verdict, ("better",))


def weights_help(tables: Tables) -> Rows:
    return _compare(tables, ("table7",), "With weights", "Without weights", ("better",))


def peripheral_first(tables: Tables) -> Rows:
    for ours, other in (("Peripheral", "Random within"), ("Random within", "Core")):
        yield from _compare(tables, ("table8", "table14"), ours, other, ("better",))


def diversity_order(tables: Tables) -> Rows:
    for ours, other in (("Peripheral", "Random within"), ("Random within", "Core")):
        yield from _compare(tables, ("table8",), ours, other, ("better",), "gradient_diversity.diversity")


def workers_less_alike(tables: Tables) -> Rows:
    return _compare(tables, ("figure6",), "CluSTER", "Random", ("better",), "worker_similarity.steps")


def clusters_are_real(tables: Tables) -> Rows:
    for line in tables["figure6"].lines if "figure6" in tables else ():
        value = line.values["cluster_similarity.p_value"]
        if value.has_mean:
            worst = max(value.by_seed.values())
            yield "figure6", "largest permutation p of the seeds", number(worst, "number"), HOLDS if worst < 0.05 else OPEN


def centroids_kept(tables: Tables) -> Rows:
    for line in tables["table10"].lines if "table10" in tables else ():
        value = line.values["cosine"]
        if line.row.startswith("all") and value.has_mean:
            lowest = min(value.by_seed.values())
            yield "table10", f"smallest cosine, {line.column}", number(lowest, "cosine"), HOLDS if lowest > 0.999 else FAILS


CLAIMS: dict[str, Callable[[Tables], Rows]] = {
    "CluSTER uses less of the data than the ratio says": kept_little,
    "CluSTER is no worse than full data": no_worse_than_full,
    "CluSTER is better than random choice of as many rows": better_than_random,
    "less data saves training time": time_follows_data,
    "CluSTER selects fastest": selects_fastest,
    "weights help": weights_help,
    "peripheral > random > core in score": peripheral_first,
    "peripheral > random > core in gradient diversity": diversity_order,
    "gradients of workers are less alike under CluSTER": workers_less_alike,
    "gradients within a cluster are more alike than between": clusters_are_real,
    "centroids keep their direction (cosine above 0.999)": centroids_kept,
}
