"""A comparison in words: the table, the verdict, and the sentence to put in a paper; or all of it as JSON.

eval.comparison.Comparison ► to_markdown (aligned, so that it reads as plain text too) | to_json | sentence

Verdicts are reached with the sign turned for losses. Here every difference is candidate minus reference in the metric's own
unit: of a loss, a positive difference is worse.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any, TypeVar

from eval.comparison import Comparison, Row
from eval.seed_table import interval, number
from eval.statistics import MIN_SEEDS, Difference, Summary
from eval.verdict import CANNOT_TELL, NO_VERDICT, NO_WORSE, WORSE, Verdict

Found = TypeVar("Found", Summary, Difference)

SIGNS = (
    "by_seed, by_problem and iqm are candidate minus reference in the row's unit; a positive difference is better where `better` "
    "is higher and worse where it is lower. measurably_lower is about the value itself, measurably_worse and measurably_better "
    "about the candidate."
)
MIN_BASE_SECONDS = 0.1
"""Below this a cost is no base for a percentage."""

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


def is_loss(row: Row) -> bool:
    """True where lower is better."""
    return row.unit == "nats"


def _own_sign(found: Found | None, row: Row) -> Found | None:
    """Candidate minus reference in the metric's own unit: the sign of a loss is turned back."""
    if found is None or not is_loss(row):
        return found
    low, high = (None if v is None else 0.0 - v for v in (found.high, found.low))
    return replace(found, mean=0.0 - found.mean, low=low, high=high)


def _better(row: Row) -> str:
    return "lower" if is_loss(row) else "higher"


def _digits(row: Row) -> int:
    return 2 if row.unit == "points" else 4


def _num(value: float | None, row: Row, sign: bool = False) -> str:
    if value is None or _digits(row) == 2:
        return number(value, sign)
    return f"{value:+.4f}" if sign else f"{value:.4f}"


def _spread(s: Summary, row: Row) -> str:
    return _num(s.mean, row) + (f" ± {_num(s.sd, row)}" if s.sd is not None else "")


def _seed_cell(row: Row) -> str:
    s = _own_sign(row.by_seed, row)
    if s is None:
        return "no seed in common"
    return f"{_num(s.mean, row, True)} " + (
        f"[{_num(s.low, row, True)}, {_num(s.high, row, True)}]" if s.low is not None else interval(s)
    )


def _problem_cell(row: Row) -> str:
    d = _own_sign(row.by_problem, row)
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
        f"{row.title} ({row.unit}, {_better(row)} is better)",
        f"{row.problems:,}",
        seeds,
        *both,
        _seed_cell(row),
        _problem_cell(row),
        _verdict_text(c, row),
        row.basis,
    ]


def _verdict_text(c: Comparison, row: Row) -> str:
    v = row.verdict
    if v.kind == WORSE:
        return v.label(c.reference)
    return v.text(c.reference, lower="worse") + (", and measurably better" if v.measurably_better else "")


def aligned(rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table whose columns are padded to one width; the first row is the head."""
    widths = [max(len(r[i]) for r in rows) for i in range(len(rows[0]))]
    lines = ["| " + " | ".join(cell.ljust(w) for cell, w in zip(r, widths, strict=True)) + " |" for r in rows]
    return "\n".join([lines[0], "|" + "|".join("-" * (w + 2) for w in widths) + "|", *lines[1:]])


def to_markdown(c: Comparison) -> str:
    """Title, table, what was flagged, the verdict and the sentence."""
    head = [h if h not in ("candidate", "reference") else getattr(c, h) for h in HEAD]
    parts = [] if c.final else ["NOT FINAL: results contradict each other, see below."]
    parts.append(
        f"{c.candidate} against {c.reference}; differences are {c.candidate} minus {c.reference}, in the metric's own unit"
    )
    parts.append(aligned([head, *(_cells(c, r) for r in c.rows)]))
    parts += ["\n".join([*map(_cost_line, c.costs.items()), _cost_note(c)])] if c.costs else []
    remarks = [f.sentence() for f in c.flags] + list(c.notes) + [_iqm_remark(r) for r in c.rows if r.iqm]
    if remarks:
        parts.append("\n".join(f"- {r}" for r in remarks))
    parts.append("Verdict\n" + "\n".join(f"- {r.title}: {_verdict_text(c, r)}" for r in headline(c)))
    parts.append("For a paper\n" + "\n".join(f"- {sentence(c, r)}" for r in headline(c)))
    return "\n\n".join(parts) + "\n"


def _cost_line(cost: tuple[str, tuple[float, float]]) -> str:
    name, (a, b) = cost
    change = f" ({100 * (a - b) / b:+.1f} %)" if b >= MIN_BASE_SECONDS else ""
    return f"{name.replace('_', ' ')}: {a:,.1f} against {b:,.1f}{change}"


def _cost_note(c: Comparison) -> str:
    note = "Seconds are of this machine at that time"
    alone = all(max(s.n for s in side) == 1 for side in ([r.candidate for r in c.rows], [r.reference for r in c.rows]))
    return note + ("; one run a side says nothing about speed." if alone else ".")


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
        f"and {c.reference} {_spread(row.reference, row)} {row.unit}{' (lower is better)' if is_loss(row) else ''}"
    )
    return f"{start}; {_difference_clause(row)}{_verdict_clause(row.verdict, row)}."


def _difference_clause(row: Row) -> str:
    if row.verdict.kind == NO_VERDICT:
        return ""
    if row.basis == "paired seeds":
        s = _own_sign(row.by_seed, row)
        assert s is not None
        return (
            f"paired by seed the difference is {_num(s.mean, row, True)} {row.unit} "
            f"({s.confidence:.0%} t interval [{_num(s.low, row, True)}, {_num(s.high, row, True)}]), so "
        )
    d = _own_sign(row.by_problem, row)
    assert d is not None
    return (
        f"over the same problems the difference between these trained models is {_num(d.mean, row, True)} {row.unit} "
        f"({d.confidence:.0%} paired bootstrap interval [{_num(d.low, row, True)}, {_num(d.high, row, True)}]; "
        f"fewer than {MIN_SEEDS} seeds, so nothing is said about other seeds), so "
    )


def _verdict_clause(v: Verdict, row: Row) -> str:
    at = f"at a margin of {v.margin:g} {_points(row)}"
    if v.kind == NO_WORSE:
        worse = ", though measurably worse within that margin" if v.measurably_lower else ""
        return f"{at} it is no worse{worse}{', and measurably better' if v.measurably_better else ''}"
    if v.kind == NO_VERDICT:
        return f"no verdict can be given ({v.reason})"
    if v.kind != CANNOT_TELL:
        return f"it is worse by more than {v.margin:g} {_points(row)}"
    needed = f" (about {v.needed:,} {v.needed_of} would settle it)" if v.needed else ""
    if v.measurably_lower:
        return f"it is measurably worse, but {at} we cannot tell whether by more than that{needed}"
    return f"{at} we cannot tell whether it is worse{needed}"


def to_json(c: Comparison) -> dict[str, Any]:
    """Every number of the comparison, with verdict texts and sentences; what the signs mean is said under "signs"."""
    rows = [_row_json(c, row) for row in c.rows]
    flags = [{**asdict(f), "sentence": f.sentence()} for f in c.flags]
    both = {"candidate": c.candidate, "reference": c.reference, "seeds": list(c.seeds)}
    costs = {"costs": dict(c.costs), "costs_note": _cost_note(c) if c.costs else ""}
    return {**both, "signs": SIGNS, "final": c.final, "rows": rows, "flags": flags, "notes": list(c.notes), **costs}


def _row_json(c: Comparison, row: Row) -> dict[str, Any]:
    own = replace(row, by_seed=_own_sign(row.by_seed, row), by_problem=_own_sign(row.by_problem, row))
    verdicts = {
        "seed_verdict": _verdict_json(row.seed_verdict, row),
        "problem_verdict": None if row.problem_verdict is None else _verdict_json(row.problem_verdict, row),
        "verdict": {
            **_verdict_json(row.verdict, row),
            "label": row.verdict.label(c.reference),
            "text": _verdict_text(c, row),
        },
    }
    return {**asdict(own), "better": _better(row), **verdicts, "sentence": sentence(c, row)}


def _verdict_json(v: Verdict, row: Row) -> dict[str, Any]:
    """measurably_lower as the name says: of a loss it is the better side."""
    lower = v.measurably_better if is_loss(row) else v.measurably_lower
    return {**asdict(v), "measurably_lower": lower, "measurably_worse": v.measurably_lower}
