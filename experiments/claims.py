"""The paper's claims against our tables, claim by claim: what the difference is, with its interval, and what that allows to say.

In come tables by id; out come `Finding`s (`experiments.pages` makes docs/findings.md of them). Nothing is tuned: a claim that our numbers
contradict is reported as such, and a claim whose runs are not there as not measured.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from experiments.cells import difference_number, heading, number, value_text
from experiments.compare import difference_of
from experiments.spec import ExperimentConfig
from experiments.statistics import has_no_width
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


def superior(difference: Difference, column: Column) -> str:
    """Ours is better than the other: judged against zero, without a margin. Seeds that agree to the last bit are no certainty."""
    if difference.interval is None or has_no_width(difference.interval):
        return OPEN
    low, high = difference.interval if column.better == "higher" else (-difference.interval[1], -difference.interval[0])
    return HOLDS if low > 0 else FAILS if high < 0 else OPEN


def not_inferior(difference: Difference, column: Column) -> str:
    """Ours is no worse than the other by more than the margin."""
    return {"better": HOLDS, "no worse": HOLDS, "worse": FAILS}.get(difference.verdict, OPEN)


Judge = Callable[[Difference, Column], str]


def _compare(tables: Tables, ids: tuple[str, ...], ours: str, other: str, judge: Judge, key: str = "") -> Rows:
    """A comparison that several tables make of the very same runs is one piece of evidence, with all their names."""
    found: dict[object, tuple[list[str], tuple[str, str, str]]] = {}
    for table in (tables[i] for i in ids if i in tables):
        columns = [c for c in table.columns if c.key == key] if key else _scores(table)
        for line, rival in _pairs(table, ours, other):
            for column in columns:
                difference = _difference(line, rival, column)
                if difference is not None:
                    what = f"{heading(column)}, {column.better} is better: {line.name} against {rival.name}"
                    says = what, difference_number(difference, column.unit), judge(difference, column)
                    runs = [sorted(one.values[column.key].run_ids.items()) for one in (line, rival)]
                    same = (column.key, str(runs)) if all(runs) else (column.key, table.id, what)
                    found.setdefault(same, ([], says))[0].append(table.id)
    for names, says in found.values():
        yield ", ".join(names), *says


def kept_little(tables: Tables) -> Rows:
    for table in (tables[i] for i in ("table2", "table3") if i in tables):
        for line in table.lines:
            value = line.values.get("data_usage")
            if line.row == "CluSTER" and value is not None and value.has_mean:
                verdict = HOLDS if max(value.by_seed.values()) < 100 * float(line.column.removeprefix("r=")) else FAILS
                yield table.id, f"data used, {line.name}", f"{value_text(value, PERCENT)} %", verdict


def no_worse_than_full(tables: Tables) -> Rows:
    return _compare(tables, ("table2", "table3", "table16"), "CluSTER", "Full data", not_inferior)


def better_than_random(tables: Tables) -> Rows:
    return _compare(tables, ("table2", "table3", "table5", "table12", "table15", "table16"), "CluSTER", "Random", superior)


TIME_RATIOS = {
    "time_per_data": "training time saved per data saved",
    "cpu_per_data": "the same of processor time, which other work on the machine lengthens less",
}


def time_follows_data(tables: Tables) -> Rows:
    """Training time saved over data saved, both against full data in the same runs: 1 would be exactly as much."""
    for line in tables["table4"].lines if "table4" in tables else ():
        for key, what in TIME_RATIOS.items():
            value = line.values.get(key)
            if line.row == "CluSTER" and value is not None and value.has_mean:
                yield "table4", f"{what}, {line.name}", value_text(value, RATIO), _above_zero(value.interval)


RATIO, PERCENT = Column("ratio", "ratio", "ratio", "higher"), Column("percent", "percent", "percent")


def _above_zero(interval: tuple[float, float] | None) -> str:
    if interval is None or has_no_width(interval) or interval[0] <= 0 <= interval[1]:
        return OPEN
    return HOLDS if interval[0] > 0 else FAILS


def selects_fastest(tables: Tables) -> Rows:
    """One measurement of each method: seeds share the model work, so that their interval would be that of choosing alone."""
    if "table4" not in tables:
        return
    for rival in SELECTORS:
        for line, other in _pairs(tables["table4"], "CluSTER", rival):
            ours, theirs = line.values["selection_seconds"], other.values["selection_seconds"]
            if ours.has_mean and theirs.has_mean:
                low, high = max(ours.by_seed.values()), min(theirs.by_seed.values())
                verdict = HOLDS if low < high else FAILS if min(ours.by_seed.values()) > max(theirs.by_seed.values()) else OPEN
                text = f"{number(ours.mean, 'seconds')} s against {number(theirs.mean, 'seconds')} s"
                yield "table4", f"selection time, {line.name} against {rival}", text, verdict


def weights_help(tables: Tables) -> Rows:
    return _compare(tables, ("table7",), "With weights", "Without weights", superior)


def peripheral_first(tables: Tables) -> Rows:
    for ours, other in (("Peripheral", "Random within"), ("Random within", "Core")):
        yield from _compare(tables, ("table8", "table14"), ours, other, superior)


def diversity_order(tables: Tables) -> Rows:
    for ours, other in (("Peripheral", "Random within"), ("Random within", "Core")):
        yield from _compare(tables, ("table8",), ours, other, superior, "gradient_diversity.diversity")


def workers_less_alike(tables: Tables) -> Rows:
    return _compare(tables, ("figure6",), "CluSTER", "Random", superior, "worker_similarity.steps")


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


def allocation_lowers_variance(tables: Tables) -> Rows:
    """Equal shares of a batch with weights (the paper's allocation) against plain random draws, on the pool's own gradients."""
    for line in tables["variance"].lines if "variance" in tables else ():
        value = line.values.get("against_random")
        if line.row == "weighted" and line.column.startswith("true gradients") and value is not None and value.has_mean:
            share = max(value.by_seed.values())
            yield "variance", f"variance, {line.column}", f"{share:.1f} % of random's", HOLDS if share < 100.0 else FAILS


REMARKS: dict[str, str] = {
    "CluSTER selects fastest": "Model work is done once for all seeds: this compares one measurement of each method.",
    "less data saves training time": "1 would mean that a row less saves as much time as it took.",
    "the paper's allocation lowers the variance of a batch's gradient": "Closed form over all rows of the pool, true gradients: exact for "
    "this pool and this clustering, so that there is no interval.",
    "gradients within a cluster are more alike than between": "Labels are permuted 10,000 times, cluster sizes kept.",
}
"""What a reader has to know of a claim's evidence."""

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
    "the paper's allocation lowers the variance of a batch's gradient": allocation_lowers_variance,
}
