"""Committed tiny records render to exact text: complete, seed missing, failed, duplicate, conflict, NaN, unknown paper value.

`python tests/test_experiments_golden.py` writes the expected files again after a wanted change; read the difference first.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from experiments.aggregate import build
from experiments.recordstore import export_records, load_records
from experiments.remarks import unequal_budgets
from experiments.render import check_outputs, explain, outputs, write_outputs
from experiments.spec import ExperimentConfig, load_spec
from experiments.table import Table

GOLDEN = Path(__file__).parent / "golden/tables"
AVAILABLE = ("full", "random", "ifd", "cluster")


def resolve(overrides: Sequence[str]) -> tuple[str, dict[str, str]]:
    """Readable run ids in place of hashes: full-0, cluster-0.50-2."""
    given = dict(o.split("=", 1) for o in overrides)
    ratio = given.get("selector.ratio", "").strip("'")
    return "-".join(part for part in (given["selector"], ratio, given["seed"]) if part), given


def spec() -> ExperimentConfig:
    return load_spec(yaml.safe_load((GOLDEN / "spec.yaml").read_text()))


def table() -> Table:
    records = load_records([GOLDEN / "machine_a", GOLDEN / "machine_b"])
    return build(spec(), resolve, records, AVAILABLE, scale="test", scale_note="Made-up numbers.")


@pytest.mark.parametrize("name", ["tiny.md", "tiny.csv", "tiny.tex", "tiny.json"])
def test_the_committed_records_render_to_exactly_the_committed_text(name: str) -> None:
    assert outputs(table())[name] == (GOLDEN / "expected" / name).read_text(encoding="utf-8")


def test_the_order_of_folders_does_not_change_the_scores() -> None:
    turned = build(spec(), resolve, load_records([GOLDEN / "machine_b", GOLDEN / "machine_a"]), AVAILABLE)
    for (_, column, a), (_, _, b) in zip(table().cells(), turned.cells(), strict=True):
        if column.better:
            assert (a.state, a.by_seed) == (b.state, b.by_seed)


def test_values_computed_by_hand() -> None:
    made = table()
    score = made.line("CluSTER r=1.00").values["humaneval/pass@1"]
    assert score.mean == pytest.approx(52.5)
    assert score.sd == pytest.approx(2.5)
    # t(0.975, 2) = 4.30265; 4.30265 * 2.5 / sqrt(3) = 6.2103
    assert score.interval == pytest.approx((52.5 - 6.2103, 52.5 + 6.2103), abs=1e-3)
    # paired by seed: 0, 2.5, -2.5
    assert score.difference is not None
    assert (score.difference.mean, score.difference.n, score.difference.verdict) == (pytest.approx(0.0), 3, "cannot tell")
    # held-out loss: 1.25 - 1.20 = 0.05 for each seed; no spread is no certainty
    loss = made.line("CluSTER r=1.00").values["heldout/loss_macro"].difference
    assert loss is not None and loss.mean == pytest.approx(0.05) and loss.verdict == "cannot tell"


def test_times_are_saved_against_full_data() -> None:
    line = table().line("CluSTER r=1.00")
    assert line.values["time_saved"].mean == pytest.approx(30.0)  # 1 - (10 + 60) / 100
    assert line.values["training_time_saved"].mean == pytest.approx(40.0)
    assert line.values["time_per_data"].mean == pytest.approx(1.0)  # 40 % of the time for 40 % of the data


def test_best_and_within_noise() -> None:
    made = table()
    best, noisy = made.line("CluSTER r=1.00").values, made.line("Random r=1.00").values
    assert best["humaneval/pass@1"].best and not best["humaneval/pass@1"].within_noise
    # differences to the best are -5, -5, -5: no spread is no certainty, as in the verdict
    assert noisy["humaneval/pass@1"].within_noise
    assert not made.line("IFD r=1.00").values["humaneval/pass@1"].best  # a seed failed: never best


@pytest.mark.parametrize(
    ("line", "state", "n"),
    [
        ("Full data", "ok", 3),
        ("Random r=0.50", "incomplete", 2),
        ("LESS r=1.00", "not built yet", 0),
        ("IFD r=1.00", "incomplete", 2),
        ("IFD r=0.50", "incomplete", 2),
        ("CluSTER r=0.50", "conflict", 2),
    ],
)
def test_states(line: str, state: str, n: int) -> None:
    value = table().line(line).values["humaneval/pass@1"]
    assert (value.state, value.n) == (state, n)


def test_every_problem_is_named_with_its_run() -> None:
    problems = "\n".join(table().problems)
    assert "Random r=0.50 seed=2: missing: never run (run random-0.50-2)" in problems
    assert "IFD r=1.00 seed=0: failed: ValueError: 12 rows have no response tokens (run ifd-1.00-0)" in problems
    assert "IFD r=0.50 seed=2: humaneval/pass@1 is not a number (run ifd-0.50-2)" in problems
    assert "two records disagree: humaneval/pass@1 is 0.475 and 0.525 (run cluster-0.50-1)" in problems
    assert problems.count("LESS: selector less is not built yet") == 1
    assert not any("cluster-1.00-1" in p for p in table().problems)  # equal metrics twice: a note
    assert any("recorded 2 times" in note and "cluster-1.00-1" in note for note in table().notes)


def test_a_conflict_is_never_averaged() -> None:
    assert "| CluSTER | r=0.50 | 2 of 3 | conflict |" in outputs(table())["tiny.md"]


def test_an_identical_copy_is_no_second_record() -> None:
    assert not any("full-0" in note for note in table().notes)


def test_explain_names_the_runs_behind_a_cell() -> None:
    text = explain(table(), "Random r=0.50", "avg")
    assert "seed 0: run random-0.50-0: 40" in text
    assert "seed 2: run random-0.50-2: missing, never run" in text
    with pytest.raises(KeyError, match="it has 'Full data', 'Random"):
        explain(table(), "Randon", "avg")
    with pytest.raises(KeyError, match="it has humaneval/pass@1"):
        explain(table(), "Random r=0.50", "nothing")


def test_check_names_what_would_change(tmp_path: Path) -> None:
    assert len(check_outputs(table(), tmp_path)) == 4
    write_outputs(table(), tmp_path)
    assert check_outputs(table(), tmp_path) == []
    path = tmp_path / "tiny.md"
    path.write_text(path.read_text().replace("52.5 ± 2.5", "53.5 ± 2.5"))
    assert len(check_outputs(table(), tmp_path)) == 1 and "tiny.md would change from line" in check_outputs(table(), tmp_path)[0]


def test_exported_records_give_the_same_table(tmp_path: Path) -> None:
    records = load_records([GOLDEN / "machine_a"])
    export_records(records, [run.run_id for run in records.runs() if run.run_id.startswith(("full", "random"))], tmp_path)
    first = {(x.name, c.key): v.by_seed for x, c, v in build(spec(), resolve, records, AVAILABLE).cells()}
    again = {(x.name, c.key): v.by_seed for x, c, v in build(spec(), resolve, load_records([tmp_path]), AVAILABLE).cells()}
    for key in again:
        if key[0].startswith(("Full", "Random")):
            assert first[key] == again[key]
    assert "runtime" not in (tmp_path / "full-0.json").read_text()


def test_a_line_with_another_budget_than_the_reference_is_named() -> None:
    records = load_records([GOLDEN / "machine_a"])
    shown = replace(spec(), once=[], reference="Random", rows={k: v for k, v in spec().rows.items() if k != "Full data"})
    made = build(replace(shown, show=["data_usage"]), resolve, records, AVAILABLE)
    assert made.notes == ()
    other = [line.values["data_usage"] for line in made.lines if line.row == "CluSTER"]
    lines = [
        replace(x, values={"data_usage": replace(other[0], by_seed={0: 10.0})}) if x.row == "CluSTER" else x for x in made.lines
    ]
    assert [note.split(":")[0] for note in unequal_budgets(replace(shown, show=["data_usage"]), lines)][:1] == [
        "CluSTER r=1.00 kept 10.0 % of the data and Random 60.0 %"
    ]


def test_the_average_may_be_of_other_metrics_than_those_shown() -> None:
    records = load_records([GOLDEN / "machine_a", GOLDEN / "machine_b"])
    shown = replace(spec(), metrics=["heldout/loss_macro"], average_of=["humaneval/pass@1"])
    made = build(shown, resolve, records, AVAILABLE)
    line = made.line("CluSTER r=1.00").values
    assert (
        "humaneval/pass@1" not in line
        and line["average"].by_seed == table().line("CluSTER r=1.00").values["humaneval/pass@1"].by_seed
    )


if __name__ == "__main__":
    for file_name, text in outputs(table()).items():
        (GOLDEN / "expected" / file_name).write_text(text, encoding="utf-8")
