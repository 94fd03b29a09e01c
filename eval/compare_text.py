"""A comparison in words: the table, the verdict, and the sentence to put in a paper; or all of it as JSON.

eval.comparison.Comparison ► to_markdown (aligned, so that it reads as plain text too) | to_json | sentence
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from eval.comparison import Comparison, Row
from eval.seed_table import interval, number
from eval.statistics import MIN_SEEDS, Summary
from eval.verdict import CANNOT_TELL, NO_VERDICT, NO_WORSE, Verdict

HEAD = (
    "metric",
    "problems",
    "seeds",
    "candidate",
    "reference",
    "difference by seed",
    "difference by problem",
    "verdict",
    "rests on",
)


def _digits(row: Row) -> int:
    return 2 if row.unit == "points" else 4


def _num(value: float | None, row: Row, sign: bool = False) -> str:
    if value is None or _digits(row) == 2:
        return number(value, sign)
    return f"{value:+.4f}" if sign else f"{value:.4f}"


def _spread(s: Summary, row: Row) -> str:
    return _num(s.mean, row) + (f" ± {_num(s.sd, row)}" if s.sd is not None else "")


def _seed_cell(row: Row) -> str:
    s = row.by_seed
    if s is None:
        return "no seed in common"
    return f"{_num(s.mean, row, True)} " + (
        f"[{_num(s.low, row, True)}, {_num(s.high, row, True)}]" if s.low is not None else interval(s)
    )


def _problem_cell(row: Row) -> str:
    d = row.by_problem
    if d is None:
        return "no per-problem results"
    test = row.mcnemar
    tail = f", {test.gained} gained, {test.lost} lost, McNemar p = {test.p_value:.3g}" if test else ""
    return f"{_num(d.mean, row, True)} [{_num(d.low, row, True)}, {_num(d.high, row, True)}]{tail}"


def _cells(c: Comparison, row: Row) -> list[str]:
    seeds = str(row.by_seed.n if row.by_seed else 0)
    if row.candidate.n != row.reference.n or str(row.candidate.n) != seeds:
        seeds += f" paired ({row.candidate.n} and {row.reference.n})"
    both = [_spread(row.candidate, row), _spread(row.reference, row)]
    return [
        row.title,
        f"{row.problems:,}",
        seeds,
        *both,
        _seed_cell(row),
        _problem_cell(row),
        row.verdict.text(c.reference),
        row.basis,
    ]


def aligned(rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table whose columns are padded to one width; the first row is the head."""
    widths = [max(len(r[i]) for r in rows) for i in range(len(rows[0]))]
    lines = ["| " + " | ".join(cell.ljust(w) for cell, w in zip(r, widths, strict=True)) + " |" for r in rows]
    return "\n".join([lines[0], "|" + "|".join("-" * (w + 2) for w in widths) + "|", *lines[1:]])


def to_markdown(c: Comparison) -> str:
    """Title, table, what was flagged, the verdict and the sentence."""
    head = [h if h not in ("candidate", "reference") else getattr(c, h) for h in HEAD]
    parts = [] if c.final else ["NOT FINAL: results contradict each other, see below."]
    parts.append(f"{c.candidate} against {c.reference}; differences are {c.candidate} minus {c.reference}, higher is better")
    parts.append(aligned([head, *(_cells(c, r) for r in c.rows)]))
    parts += ["\n".join(map(_cost_line, c.costs.items()))] if c.costs else []
    remarks = [f.sentence() for f in c.flags] + list(c.notes) + [_iqm_remark(r) for r in c.rows if r.iqm]
    if remarks:
        parts.append("\n".join(f"- {r}" for r in remarks))
    parts.append("Verdict\n" + "\n".join(f"- {r.title}: {r.verdict.text(c.reference)}" for r in headline(c)))
    parts.append("For a paper\n" + "\n".join(f"- {sentence(c, r)}" for r in headline(c)))
    return "\n\n".join(parts) + "\n"


def _cost_line(cost: tuple[str, tuple[float, float]]) -> str:
    name, (a, b) = cost
    change = f" ({100 * (a - b) / b:+.1f} %)" if b > 0 else ""
    return f"{name.replace('_', ' ')}: {a:,.1f} against {b:,.1f}{change}"


def headline(c: Comparison) -> list[Row]:
    """The averages over tasks where there are any, with the metrics that no average covers; else every metric."""
    covered = {(t, r.name) for r in c.rows for t in r.tasks}
    return [r for r in c.rows if (r.task, r.name) not in covered]


def _iqm_remark(row: Row) -> str:
    assert row.iqm is not None
    mean, low, high = row.iqm
    return (
        f"{row.title}: interquartile mean over runs and {len(row.tasks)} tasks differs by "
        f"{mean:+.2f} points [{low:+.2f}, {high:+.2f}] (bootstrap stratified by task)"
    )


def _plural(n: int, word: str) -> str:
    return f"{n:,} {word}" + ("" if n == 1 else "s")


def _points(row: Row) -> str:
    return "point" if row.unit == "points" and row.margin == 1 else row.unit


def sentence(c: Comparison, row: Row) -> str:
    """One sentence with everything that a reader needs to judge it: n, spread, difference, interval, margin, what it rests on."""
    what = f"{row.name} averaged over {', '.join(row.tasks)}" if row.tasks else row.title
    n = row.by_seed.n if row.by_seed else 0
    spread = f"mean ± sample deviation over {_plural(n, 'seed')}" if n > 1 else "one seed"
    start = (
        f"On {what} ({_plural(row.problems, 'problem')}; {spread}), {c.candidate} reaches {_spread(row.candidate, row)} "
        f"and {c.reference} {_spread(row.reference, row)} {row.unit}"
    )
    return f"{start}; {_difference_clause(row)}{_verdict_clause(row.verdict, row)}."


def _difference_clause(row: Row) -> str:
    if row.verdict.kind == NO_VERDICT:
        return ""
    if row.basis == "paired seeds":
        s = row.by_seed
        assert s is not None
        return (
            f"paired by seed the difference is {_num(s.mean, row, True)} {row.unit} "
            f"({s.confidence:.0%} t interval [{_num(s.low, row, True)}, {_num(s.high, row, True)}]), so "
        )
    d = row.by_problem
    assert d is not None
    return (
        f"over the same problems the difference between these trained models is {_num(d.mean, row, True)} {row.unit} "
        f"({d.confidence:.0%} paired bootstrap interval [{_num(d.low, row, True)}, {_num(d.high, row, True)}]; "
        f"fewer than {MIN_SEEDS} seeds, so nothing is said about other seeds), so "
    )


def _verdict_clause(v: Verdict, row: Row) -> str:
    at = f"at a margin of {v.margin:g} {_points(row)}"
    lower = ", though measurably lower" if v.measurably_lower else ""
    if v.kind == NO_WORSE:
        return f"{at} it is no worse{lower}"
    if v.kind == NO_VERDICT:
        return f"no verdict can be given ({v.reason})"
    if v.kind != CANNOT_TELL:
        return f"it is worse by more than {v.margin:g} {_points(row)}"
    needed = f" (about {v.needed:,} {v.needed_of} would settle it)" if v.needed else ""
    return f"{at} we cannot tell whether it is worse{lower}{needed}"


def to_json(c: Comparison) -> dict[str, Any]:
    """Every number of the comparison, with verdict texts and sentences."""
    rows = []
    for row in c.rows:
        texts = {"label": row.verdict.label(c.reference), "text": row.verdict.text(c.reference)}
        rows.append({**asdict(row), "verdict": {**asdict(row.verdict), **texts}, "sentence": sentence(c, row)})
    flags = [{**asdict(f), "sentence": f.sentence()} for f in c.flags]
    both = {"candidate": c.candidate, "reference": c.reference, "seeds": list(c.seeds)}
    return {**both, "final": c.final, "rows": rows, "flags": flags, "notes": list(c.notes), "costs": dict(c.costs)}
