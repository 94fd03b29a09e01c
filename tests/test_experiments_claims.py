"""Claims are judged by their intervals; results are written and checked as a whole."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from experiments.analysis import empty_table
from experiments.claims import ABSENT, CLAIMS, FAILS, HOLDS, OPEN, findings
from experiments.results import check_results, write_results
from experiments.spec import ExperimentConfig
from experiments.table import Column, Line, Table, Value

SPEC = ExperimentConfig(id="table7", title="t", kind="grid")
LOSS = Column("heldout/loss", "held-out loss", "nats", "lower")


def table(id: str, columns: list[Column], lines: dict[tuple[str, str], dict[str, tuple[float, ...]]]) -> Table:
    made = [
        Line(row, column, {key: Value(len(v), dict(enumerate(v))) for key, v in values.items()})
        for (row, column), values in lines.items()
    ]
    return replace(empty_table(SPEC, "test", "", columns, made), id=id)


def judged(tables: dict[str, Table], claim: str) -> list[str]:
    return [f.verdict for f in findings(tables) if f.claim == claim]


def test_nothing_measured_is_said_for_every_claim() -> None:
    assert [f.verdict for f in findings({})] == [ABSENT] * len(CLAIMS)


def test_a_claim_holds_fails_or_stays_open_by_its_interval() -> None:
    for without, verdict in (((1.3, 1.312, 1.32), HOLDS), ((1.1, 1.112, 1.12), FAILS), ((1.1, 1.3, 1.2), OPEN)):
        lines = {
            ("With weights", "r=1.00"): {LOSS.key: (1.2, 1.21, 1.22)},
            ("Without weights", "r=1.00"): {LOSS.key: without},
        }
        assert judged({"table7": table("table7", [LOSS], lines)}, "weights help") == [verdict]


def test_seeds_that_all_differ_by_the_same_are_no_certainty() -> None:
    """One problem in 64 more for every seed, also where rounding leaves the interval a width."""
    for without in ((1.25, 1.26, 1.27), (1.2 + 1 / 64, 1.21 + 1 / 64, 1.22 + 1 / 64)):
        lines = {("With weights", "r=1.00"): {LOSS.key: (1.2, 1.21, 1.22)}, ("Without weights", "r=1.00"): {LOSS.key: without}}
        assert judged({"table7": table("table7", [LOSS], lines)}, "weights help") == [OPEN]


def test_better_is_judged_against_zero_and_no_worse_against_the_margin() -> None:
    lines = {("CluSTER", "r=1.00"): {LOSS.key: (1.216, 1.215, 1.217)}, ("Random", "r=1.00"): {LOSS.key: (1.2, 1.2, 1.2)}}
    lines[("Full data", "")] = {LOSS.key: (1.2, 1.2, 1.2)}
    tables = {"table2": table("table2", [LOSS], lines)}
    # 0.016 nats more, within the margin of 0.02 and yet certainly not better
    assert judged(tables, "CluSTER is better than random choice of as many rows") == [FAILS]
    assert judged(tables, "CluSTER is no worse than full data") == [HOLDS]


def test_time_is_compared_with_data_by_the_clock_and_by_the_processor() -> None:
    columns = [Column("time_per_data", "t", "ratio"), Column("cpu_per_data", "c", "ratio")]
    lines = {("CluSTER", "r=1.00"): {"time_per_data": (0.9, -0.9, 0.2), "cpu_per_data": (0.9, 0.91, 0.92)}}
    assert judged({"table4": table("table4", columns, lines)}, "less data saves training time") == [OPEN, HOLDS]


def test_full_data_is_met_once_by_every_ratio() -> None:
    lines = {("Full data", ""): {LOSS.key: (1.2, 1.21, 1.22)}}
    lines |= {("CluSTER", r): {LOSS.key: v} for r, v in (("r=1.00", (1.21, 1.221, 1.23)), ("r=0.50", (1.4, 1.411, 1.42)))}
    # 0.01 above is within the margin of 0.02 nats, 0.2 is not
    assert judged({"table2": table("table2", [LOSS], lines)}, "CluSTER is no worse than full data") == [HOLDS, FAILS]


def test_selection_time_is_compared_with_every_rival() -> None:
    seconds = Column("selection_seconds", "selection time", "seconds")
    lines = {(row, "r=1.00"): {seconds.key: v} for row, v in {"CluSTER": (1.0, 1.1, 1.2), "IFD": (2.0, 2.2, 2.1)}.items()}
    lines[("LESS", "r=1.00")] = {seconds.key: (0.5, 0.6, 0.7)}
    assert judged({"table4": table("table4", [seconds], lines)}, "CluSTER selects fastest") == [FAILS, HOLDS]


def test_centroids_are_judged_by_the_smallest() -> None:
    cosine = Column("cosine", "cosine", "cosine")
    lines = {
        ("all, smallest cosine", "r=1.00"): {"cosine": (0.9995, 0.9992)},
        ("all, smallest cosine", "r=0.50"): {"cosine": (0.9995, 0.98)},
    }
    assert judged({"table10": table("table10", [cosine], lines)}, "centroids keep their direction (cosine above 0.999)") == [
        HOLDS,
        FAILS,
    ]


def test_the_table_of_findings_names_numbers() -> None:
    usage = Column("data_usage", "data used", "percent")
    made = table("table2", [usage], {("CluSTER", "r=0.50"): {"data_usage": (30.0, 31.0, 32.0)}})
    first = findings({"table2": made})[0]
    assert (first.where, first.what, first.evidence, first.verdict) == (
        "table2",
        "data used, CluSTER r=0.50",
        "31.0 ± 1.0 %",
        HOLDS,
    )


def test_results_are_written_and_checked_with_their_figure(tmp_path: Path) -> None:
    spec = replace(SPEC, id="figure4", figure="sensitivity")
    lines = {(f"r={r}", "CluSTER"): {LOSS.key: v} for r, v in (("0.5", (1.3, 1.31, 1.32)), ("1.0", (1.2, 1.21, 1.22)))}
    made = table("figure4", [LOSS], lines)
    assert len(check_results(made, spec, tmp_path)) == 6
    assert [p.suffix for p in write_results(made, spec, tmp_path)] == [".md", ".csv", ".tex", ".json", ".svg", ".png"]
    assert check_results(made, spec, tmp_path) == []
    (tmp_path / "figure4.svg").unlink()
    assert check_results(made, spec, tmp_path) == [f"{tmp_path / 'figure4.svg'} does not exist"]


def test_the_variance_of_the_papers_allocation_is_judged_on_true_gradients_only() -> None:
    column = Column("against_random", "against random", "percent")
    shares = {("weighted", "true gradients, seed 0, B=8"): 102.9, ("weighted", "true gradients, seed 0, B=16"): 97.0}
    shares |= {("weighted", "unequal clusters, B=8"): 300.0, ("neyman", "true gradients, seed 0, B=8"): 99.0}
    tables = {"variance": table("variance", [column], {place: {column.key: (share,)} for place, share in shares.items()})}
    assert judged(tables, "the paper's allocation lowers the variance of a batch's gradient") == [FAILS, HOLDS]
