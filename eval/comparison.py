"""Candidate against reference, metric by metric: differences by seed and by problem, the verdict, and the sentence about it.

    RunRecords of two methods (+ per-problem scores) ► compare_groups ► Comparison ► eval.compare_text

Seeds answer "would it come out like this again?", problems answer "is it the benchmark's choice of questions?". Three paired
seeds or more: the verdict is by seed. Fewer: it can only be about the very models at hand, over problems, and says so. Values are
in points for fractions and in nats for losses; differences are signed so that higher is better. Runs that were not scored on the
same problems are refused. No torch, no disk.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from clusterft.records import Metric, RunRecord
from clusterft.seeding import generator
from eval.per_problem import Problems
from eval.run_groups import Group, check_same_problems, compare_costs, is_average
from eval.settle import Flag, Observation, settle
from eval.statistics import (
    MIN_SEEDS,
    Difference,
    McNemar,
    Summary,
    iqm_difference,
    mcnemar_exact,
    paired_bootstrap,
    paired_by_seed,
    summarise,
)
from eval.verdict import NO_VERDICT, Verdict, judge_problems, judge_seeds

RESAMPLES = 10_000


@dataclass(frozen=True)
class Row:
    """One metric, or the average over tasks of one metric name (`task` is "average", then `tasks` says over what).

    candidate, reference  over the seeds of each side, in `unit`
    by_seed, by_problem   candidate minus reference in `unit`, higher is better; None where there is nothing to pair
    verdict, basis        the verdict that counts and what it rests on
    iqm                   (difference, low, high) of interquartile means over runs and tasks; averages only
    """

    task: str
    name: str
    unit: str
    margin: float
    problems: int
    candidate: Summary
    reference: Summary
    by_seed: Summary | None
    seed_verdict: Verdict
    by_problem: Difference | None
    problem_verdict: Verdict | None
    mcnemar: McNemar | None
    verdict: Verdict
    basis: str
    tasks: tuple[str, ...] = ()
    iqm: tuple[float, float, float] | None = None

    @property
    def title(self) -> str:
        return f"{self.task}/{self.name}"


@dataclass(frozen=True)
class Comparison:
    """Everything that was found out about two methods. costs: name -> mean seconds of candidate and reference."""

    candidate: str
    reference: str
    seeds: tuple[int, ...]
    rows: tuple[Row, ...]
    flags: tuple[Flag, ...]
    notes: tuple[str, ...]
    costs: Mapping[str, tuple[float, float]] = field(default_factory=dict)

    @property
    def final(self) -> bool:
        return not any(f.open for f in self.flags)


def compare_records(
    run_a: RunRecord,
    run_b: RunRecord,
    margin: float = 1.0,
    margin_nats: float = 0.01,
    problems: Mapping[str, Problems] | None = None,
) -> Comparison:
    """`compare_groups` of one run each: run_a is the candidate (the subset), run_b the reference (all data)."""
    return compare_groups([run_a], [run_b], margin, margin_nats, problems)


def compare_groups(
    runs_a: Sequence[RunRecord],
    runs_b: Sequence[RunRecord],
    margin: float = 1.0,
    margin_nats: float = 0.01,
    problems: Mapping[str, Problems] | None = None,
    choices: Sequence[str] = (),
) -> Comparison:
    """Compares the candidate's runs with the reference's, paired by seed and by problem.

    margin       largest acceptable loss in points; margin_nats the same for losses
    problems     run id -> per-problem scores (`eval.per_problem.read_problems`)
    choices      run ids that win where two runs of one seed contradict each other

    Raises ValueError if a side has no complete run, a side mixes configurations, the sides were scored on different problems, or
    they share no metric.
    """
    a, b = Group.of(runs_a, "candidate"), Group.of(runs_b, "reference")
    if a.name == b.name:
        a, b = replace(a, name=f"{a.name} [A]"), replace(b, name=f"{b.name} [B]")
    shared, only = check_same_problems(a, b)
    context = _Context(a, b, margin, margin_nats, problems or {}, *_settled(a, b, shared, choices))
    rows = [_row(context, key, metric) for key, metric in shared.items()]
    rows += _averages(context, rows)
    seeds = tuple(sorted(set(a.seeds) & set(b.seeds)))
    notes = (*a.notes, *b.notes, *only, *a.differences(b))
    return Comparison(a.name, b.name, seeds, tuple(rows), tuple(context.flags), notes, compare_costs(a, b))


@dataclass(frozen=True)
class _Context:
    a: Group
    b: Group
    margin: float
    margin_nats: float
    problems: Mapping[str, Problems]
    kept: Mapping[tuple[str, str], Mapping[int, Observation]]
    flags: Sequence[Flag]

    def scores(self, key: tuple[str, str], group: Group) -> dict[int, float]:
        return {s: o.value for s, o in self.kept["/".join(key), group.name].items()}

    def outcomes(self, key: tuple[str, str], group: Group, seeds: Sequence[int]) -> dict[str, float] | None:
        """Problem -> mean score over `seeds`; None if a run has no per-problem results."""
        tables = [self.problems.get(self.kept["/".join(key), group.name][s].run_id, {}).get(key) for s in seeds]
        if not tables or any(t is None for t in tables):
            return None
        whole = [t for t in tables if t is not None]
        for seed, table in zip(seeds, whole, strict=True):
            self._check_table(key, group, seed, table)
        if any(t.keys() != whole[0].keys() for t in whole):
            raise ValueError(f"{'/'.join(key)}: the runs of {group.name} list different problems; evaluate them again")
        return {p: float(np.mean([t[p] for t in whole])) for p in sorted(whole[0])}

    def _check_table(self, key: tuple[str, str], group: Group, seed: int, table: Mapping[str, float]) -> None:
        """The problems of a run must average to what its record says; else they are of another evaluation."""
        kept = self.kept["/".join(key), group.name][seed]
        metric = next(m for r in group.runs if r.run_id == kept.run_id for m in [group.metric(r, key)] if m is not None)
        mean = float(np.mean(list(table.values())))
        if len(table) != metric.n or abs(mean - metric.value) > 1e-6 * max(1.0, abs(mean)):
            raise ValueError(
                f"{'/'.join(key)} of run {kept.run_id}: {len(table)} problems average {mean:.6f}, "
                f"its record says {metric.value:.6f} over {metric.n}; "
                "the per-problem file is of another evaluation, evaluate again"
            )


def _settled(
    a: Group, b: Group, shared: Mapping[tuple[str, str], Metric], choices: Sequence[str]
) -> tuple[Mapping[tuple[str, str], Mapping[int, Observation]], Sequence[Flag]]:
    observations = [
        Observation(g.name, r.seed, "/".join(key), m.value * (100 if m.unit == "fraction" else 1), r.run_id)
        for g in (a, b)
        for r in g.runs
        for key, m in ((k, g.metric(r, k)) for k in shared)
        if m is not None
    ]
    return settle(observations, sorted({*a.all_seeds, *b.all_seeds}), choices)


def _row(context: _Context, key: tuple[str, str], metric: Metric) -> Row:
    """One metric: summaries, differences by seed and by problem, verdicts."""
    fraction = metric.unit == "fraction"
    scale, sign = (100.0, 1.0) if fraction else (1.0, -1.0)
    unit, margin = ("points", context.margin) if fraction else ("nats", context.margin_nats)
    a, b = context.scores(key, context.a), context.scores(key, context.b)
    if not a or not b:
        empty = context.b if a else context.a
        raise ValueError(f"{'/'.join(key)}: {empty.name} has no usable score; {'; '.join(f.sentence() for f in context.flags)}")
    pairs = paired_by_seed({s: sign * v for s, v in a.items()}, {s: sign * v for s, v in b.items()})
    difference, test = _by_problem(context, key, fraction, scale, sign)
    contradicted = any(f.open and f.benchmark == "/".join(key) for f in context.flags)
    return _judged(
        Row(
            *key, unit, margin, metric.n, summarise(list(a.values())), summarise(list(b.values())), pairs,
            judge_seeds(pairs, margin), difference, None if difference is None else judge_problems(difference, margin), test,
            Verdict(NO_VERDICT, margin), "",
        ),
        contradicted,
    )  # fmt: skip


def _judged(row: Row, contradicted: bool) -> Row:
    """Fills in the verdict that counts: by seed from MIN_SEEDS pairs on, else by problem, else none."""
    if contradicted:
        return replace(row, verdict=Verdict(NO_VERDICT, row.margin, reason="results contradict each other"), basis="nothing")
    if row.by_seed is not None and (row.by_seed.n >= MIN_SEEDS or row.problem_verdict is None):
        reason = row.seed_verdict.reason
        verdict = (
            row.seed_verdict
            if row.by_seed.n >= MIN_SEEDS
            else replace(row.seed_verdict, reason=f"{reason}, no per-problem results")
        )
        return replace(row, verdict=verdict, basis="paired seeds")
    if row.problem_verdict is not None:
        return replace(row, verdict=row.problem_verdict, basis="problems")
    return replace(row, verdict=row.seed_verdict, basis="nothing")


def _by_problem(
    context: _Context, key: tuple[str, str], fraction: bool, scale: float, sign: float
) -> tuple[Difference | None, McNemar | None]:
    seeds = sorted(set(context.scores(key, context.a)) & set(context.scores(key, context.b)))
    a, b = context.outcomes(key, context.a, seeds), context.outcomes(key, context.b, seeds)
    if a is None or b is None or len(a) < MIN_SEEDS:
        return None, None
    if a.keys() != b.keys():
        raise ValueError(f"{'/'.join(key)}: {len(a.keys() ^ b.keys())} problems were answered by one side only; evaluate again")
    x, y = np.array([a[p] for p in a]), np.array([b[p] for p in a])
    rng = generator(0, "compare", *key)
    found = paired_bootstrap(
        sign * x, sign * y, rng, resamples=RESAMPLES, **({} if fraction else {"pseudo": 0.0, "expand": True})
    )
    binary = len(seeds) == 1 and bool(np.isin([x, y], (0, 1)).all())
    return found.scaled(scale), mcnemar_exact(x, y) if binary else None


def _averages(context: _Context, rows: Sequence[Row]) -> list[Row]:
    """For every metric name that several tasks have: the plain mean over tasks, paired by seed, and stratified over problems."""
    out = []
    for name in dict.fromkeys(r.name for r in rows if r.unit == "points"):
        members = [r for r in rows if r.name == name and r.unit == "points" and not is_average(r.task)]
        if len(members) > 1:
            out.append(_average(context, name, members))
    return out


def _mean_over_tasks(context: _Context, keys: Sequence[tuple[str, str]], group: Group) -> dict[int, float]:
    """Seed -> mean over tasks, for the seeds that have every task."""
    tables = [context.scores(k, group) for k in keys]
    seeds = set.intersection(*(set(t) for t in tables))
    return {s: float(np.mean([t[s] for t in tables])) for s in sorted(seeds)}


def _average(context: _Context, name: str, members: Sequence[Row]) -> Row:
    keys, margin = [(r.task, r.name) for r in members], context.margin
    a, b = _mean_over_tasks(context, keys, context.a), _mean_over_tasks(context, keys, context.b)
    if not a or not b:
        raise ValueError(f"average/{name}: no seed of {(context.b if a else context.a).name} has every task")
    pairs, difference = paired_by_seed(a, b), _average_by_problem(context, keys, sorted(set(a) & set(b)))
    row = Row(
        "average", name, "points", margin, sum(r.problems for r in members), summarise(list(a.values())),
        summarise(list(b.values())), pairs, judge_seeds(pairs, margin), difference,
        None if difference is None else judge_problems(difference, margin), None, Verdict(NO_VERDICT, margin), "",
        tuple(r.task for r in members), _iqm(context, keys, sorted(set(a) & set(b))),
    )  # fmt: skip
    titles = {r.title for r in members}
    return _judged(row, any(f.open and f.benchmark in titles for f in context.flags))


def _iqm(context: _Context, keys: Sequence[tuple[str, str]], seeds: Sequence[int]) -> tuple[float, float, float] | None:
    if len(seeds) < MIN_SEEDS:
        return None
    x, y = (np.array([[context.scores(k, g)[s] for k in keys] for s in seeds]) for g in (context.a, context.b))
    return iqm_difference(x, y, generator(0, "compare", "iqm"), RESAMPLES)


def _average_by_problem(context: _Context, keys: Sequence[tuple[str, str]], seeds: Sequence[int]) -> Difference | None:
    x, y, strata = [], [], []
    for key in keys:
        a, b = context.outcomes(key, context.a, seeds), context.outcomes(key, context.b, seeds)
        if a is None or b is None:
            return None
        x += list(a.values())
        y += [b[p] for p in a]
        strata += [key[0]] * len(a)
    found = paired_bootstrap(np.array(x), np.array(y), generator(0, "compare", "average"), strata, resamples=RESAMPLES)
    return found.scaled(100.0)
