"""The table over seeds that hides nothing: n, mean, spread, interval, paired difference and verdict of every method.

    Observations ► eval.settle ► lost_nothing_table ► SeedTable ► JSON, Markdown

Two results that contradict each other keep the table from being final until one of them is chosen. Values are in points,
higher is better. No torch, no disk.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from eval.settle import Flag, Observation, settle, unique
from eval.statistics import Summary, binomial_stderr, paired_by_seed, summarise
from eval.verdict import NO_VERDICT, Verdict, judge_seeds


@dataclass(frozen=True)
class Cell:
    """One method on one benchmark. `binomial` is the standard error of one run in points, apart from the spread over seeds."""

    method: str
    benchmark: str
    summary: Summary | None
    binomial: float | None = None
    paired: Summary | None = None
    verdict: Verdict | None = None
    bold: bool = False
    open_conflict: bool = False


@dataclass(frozen=True)
class SeedTable:
    """Cells by (benchmark, method), flags, and whether the table may be printed as final."""

    reference: str
    margin: float
    cells: Mapping[tuple[str, str], Cell]
    flags: tuple[Flag, ...] = ()
    scores: Mapping[tuple[str, str], Mapping[int, float]] = field(default_factory=dict)

    @property
    def final(self) -> bool:
        return not any(f.open for f in self.flags)

    def to_json(self) -> dict[str, Any]:
        cells = {f"{b}/{m}": _cell_json(c, self.reference) for (b, m), c in self.cells.items()}
        flags = [{**asdict(f), "sentence": f.sentence()} for f in self.flags]
        return {"final": self.final, "reference": self.reference, "margin_points": self.margin, "table": cells, "flags": flags}

    def to_text(self) -> str:
        """A Markdown table, then the flags. Bold: the best mean of a benchmark, only where its interval excludes the others."""
        head = "" if self.final else "NOT FINAL: results contradict each other, see below.\n\n"
        lines = ["| benchmark | method | n | mean | sd over seeds | 95 % interval | stderr of one run | difference | verdict |"]
        lines.append("|---|---|---|---|---|---|---|---|---|")
        lines += [_cell_line(c, self.reference) for c in self.cells.values()]
        flags = [f"- {f.sentence()}" for f in self.flags]
        return head + "\n".join(lines) + ("\n\n" + "\n".join(flags) if flags else "") + "\n"


def _cell_json(cell: Cell, reference: str) -> dict[str, Any]:
    out = asdict(cell)
    if cell.verdict is not None:
        out["verdict"] |= {"label": cell.verdict.label(reference), "text": cell.verdict.text(reference)}
    return out


def number(value: float | None, sign: bool = False) -> str:
    """Two decimals, or a dash where there is nothing to say."""
    return "-" if value is None else f"{value:+.2f}" if sign else f"{value:.2f}"


def interval(summary: Summary | None, sign: bool = False) -> str:
    """ "[low, high]", or the reason why there is none."""
    if summary is None:
        return "-"
    return (
        f"[{number(summary.low, sign)}, {number(summary.high, sign)}]" if summary.low is not None else f"none ({summary.reason})"
    )


def _cell_line(c: Cell, reference: str) -> str:
    s, mark = c.summary, "**" if c.bold else ""
    mean = "not available" if s is None else f"{mark}{number(s.mean)}{mark}" + (" (conflict left out)" if c.open_conflict else "")
    difference = "-" if c.paired is None else f"{number(c.paired.mean, True)} {interval(c.paired, True)} (n {c.paired.n})"
    verdict = "-" if c.verdict is None else c.verdict.text(reference)
    parts = [c.benchmark, c.method, str(s.n if s else 0), mean, number(s.sd if s else None), interval(s), number(c.binomial)]
    return "| " + " | ".join([*parts, difference, verdict]) + " |"


def lost_nothing_table(
    observations: Sequence[Observation],
    reference: str,
    margin: float = 1.0,
    expected_seeds: Sequence[int] | None = None,
    choices: Sequence[str] = (),
) -> SeedTable:
    """Every method on every benchmark, with differences to `reference` paired by seed and the verdict at `margin` points.

    Raises ValueError if the reference has no results.
    """
    kept, flags = settle(observations, expected_seeds, choices)
    if not any(m == reference for _, m in kept):
        raise ValueError(f"the reference {reference!r} has no results; methods are {', '.join(unique(m for _, m in kept))}")
    still_open = {(f.benchmark, f.method) for f in flags if f.open}
    cells: dict[tuple[str, str], Cell] = {}
    for (b, m), by_seed in kept.items():
        values = {s: o.value for s, o in by_seed.items()}
        paired, verdict = None, None
        if m != reference:
            paired = paired_by_seed(values, {s: o.value for s, o in kept[b, reference].items()})
            verdict = judge_seeds(paired, margin)
            if still_open & {(b, m), (b, reference)}:
                verdict = Verdict(NO_VERDICT, margin, reason="results contradict each other")
        summary = summarise(list(values.values())) if values else None
        cells[b, m] = Cell(
            m, b, summary, _binomial(by_seed.values(), summary), paired, verdict, open_conflict=(b, m) in still_open
        )
    bold = _bold(list(cells.values()))
    cells = {k: Cell(**{**vars(c), "bold": c in bold}) for k, c in cells.items()}
    scores = {k: {s: o.value for s, o in v.items()} for k, v in kept.items()}
    return SeedTable(reference, margin, cells, tuple(flags), scores)


def _binomial(observations: Iterable[Observation], summary: Summary | None) -> float | None:
    totals = {o.total for o in observations}
    if summary is None or len(totals) != 1 or None in totals or not 0 <= summary.mean <= 100:
        return None
    return 100 * binomial_stderr(summary.mean / 100, int(next(iter(totals)) or 1))


def _bold(cells: Sequence[Cell]) -> list[Cell]:
    """Of each benchmark the best cell, if its interval lies wholly above the others' (their means, where they have none)."""
    out = []
    for benchmark in unique(c.benchmark for c in cells):
        row = [c for c in cells if c.benchmark == benchmark and c.summary is not None]
        best = max(row, key=lambda c: c.summary.mean, default=None)
        if best is None or best.summary.low is None or len(row) < 2:
            continue
        tops = [c.summary.high if c.summary.high is not None else c.summary.mean for c in row if c is not best]
        out += [best] if best.summary.low > max(tops) else []
    return out
