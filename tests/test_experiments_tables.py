"""Tables from records with one thing wrong: a table is always made, and what is wrong stands in it, by line, seed and run."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
from table_kit import GOLDEN, INFINITE, NAN, Change, no_score, put, resolve, spec, table_of, with_value, without

from experiments.aggregate import build
from experiments.artifacts import write_artifact
from experiments.compare import difference_of
from experiments.reading import read_table
from experiments.recordstore import load_records
from experiments.render import explain, outputs, write_outputs
from experiments.statistics import has_no_width, paired, t_interval, verdict
from experiments.table import Column, Table, Value


@pytest.fixture
def made(tmp_path: Path) -> Callable[..., Table]:
    """The table of the golden records, some changed: `made({run id: change})`."""
    return partial(table_of, tmp_path / "records")


def test_complete_records_give_a_final_table(made: Callable[..., Table]) -> None:
    assert made().problems == ()


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (no_score, "humaneval/pass@1 was not recorded"),
        (without("cost", "training_seconds"), "training_seconds was not recorded"),
        (with_value(None, "cost", "training_seconds"), "training_seconds was not measured"),
        (without("selection", "data_usage"), "data_usage was not recorded"),
        (with_value(NAN, "metrics", 0, "value"), "humaneval/pass@1 is not a number"),
        (with_value(True, "metrics", 0, "value"), "humaneval/pass@1 is not a number"),
        (with_value(10**400, "metrics", 0, "value"), "humaneval/pass@1 is not a number"),
        (lambda data: data["metrics"][0].pop("value"), "humaneval/pass@1 is not a number"),
        (with_value(INFINITE, "cost", "training_seconds"), "training_seconds is not a number"),
        (with_value(NAN, "cost", "training_seconds"), "training_seconds is not a number"),
        (with_value("12 s", "cost", "training_seconds"), "training_seconds is not a number"),
        (with_value(NAN, "train", "last_loss"), "last_loss is not a number"),
        (with_value(None, "selection"), "failed: cluster-1.00-1.json cannot be read: its selection is None"),
        (with_value(None, "train"), "failed: cluster-1.00-1.json cannot be read: its train is None"),
        (with_value(None, "inputs"), "failed: cluster-1.00-1.json cannot be read: its inputs is None"),
        (with_value("no", "dirty"), "failed: cluster-1.00-1.json cannot be read: its dirty is 'no'"),
        (with_value({"a": 1}, "inputs"), "failed: cluster-1.00-1.json cannot be read: its inputs are no facts about files"),
        (with_value(1, "colour"), "failed: cluster-1.00-1.json cannot be read: no RunRecord has colour"),
        (with_value(1, "metrics", 0, "colour"), "failed: cluster-1.00-1.json cannot be read: no Metric has colour"),
        (with_value(2, "schema"), "failed: cluster-1.00-1.json cannot be read: record schema 2 is not 1"),
        (with_value([5], "metrics"), "failed: cluster-1.00-1.json cannot be read: its metrics are no list of objects"),
        (with_value(None, "metrics", 0, "dataset_hash"), "of its metric humaneval/pass@1 dataset_hash is None"),
        (with_value("40", "metrics", 0, "n"), "of its metric humaneval/pass@1 n is '40'"),
        (lambda data: data["metrics"].append(data["metrics"][0]), "its metric humaneval/pass@1 stands there 2 times"),
        (lambda data: b"\xff\xfe", "failed: cluster-1.00-1.json cannot be read: it is not UTF-8"),
        (lambda data: "[" * 100_000, "failed: cluster-1.00-1.json cannot be read: "),
        (lambda data: data.update(status="failed", error=" \n"), "failed: status failed"),
        (lambda data: data.update(status="failed", error="\nTypeError: x\ny"), "failed: TypeError: x (run"),
    ],
)
def test_one_seed_without_a_value_is_one_problem_with_its_reason(made: Callable[..., Table], change: Change, reason: str) -> None:
    table = made({"cluster-1.00-1": change}, show=[*spec().show, "last_loss"])
    (problem,) = table.problems
    assert problem.startswith("CluSTER r=1.00 seed=1: ") and reason in problem and problem.endswith("(run cluster-1.00-1)")
    assert not table.final and outputs(table)


def test_all_that_a_seed_lacks_is_named(made: Callable[..., Table]) -> None:
    changes = {f"cluster-1.00-{seed}": without("cost", "training_seconds") for seed in (0, 2)}
    changes["cluster-1.00-1"] = no_score
    assert made(changes).problems == (
        "CluSTER r=1.00 seeds 0, 2: training_seconds was not recorded (runs cluster-1.00-0, cluster-1.00-2)",
        "CluSTER r=1.00 seed=1: humaneval/pass@1 was not recorded (run cluster-1.00-1)",
    )


def test_a_metric_that_no_record_has_is_a_problem_of_every_line(made: Callable[..., Table]) -> None:
    problems = made(metrics=["mbpp/pass@1"]).problems
    assert len(problems) == 3 and all("seeds 0, 1, 2: mbpp/pass@1 was not recorded" in p for p in problems)


def test_an_artifact_that_is_absent_or_broken_is_named(tmp_path: Path) -> None:
    records = tmp_path / "records"
    records.mkdir()
    for seed in range(3):
        put(records, f"full-{seed}", lambda data: None)
    for seed, steps in ((0, [0.5, 0.7]), (1, [])):
        run = tmp_path / f"run-{seed}"
        write_artifact(run, "worker_similarity", f"full-{seed}", {"steps": steps, "workers": 2, "gradient": "all"})
        (tmp_path / "artifacts").mkdir(exist_ok=True)
        (run / "artifacts").rename(tmp_path / f"artifacts/full-{seed}")
    shown = {"show": [], "values": ["worker_similarity.steps"], "artifacts": {"worker_similarity": []}, "reference": None}
    one = spec(rows={"Full data": ["selector=full"]}, **shown)
    table = build(one, resolve, load_records([records]))
    assert table.problems == (
        "Full data seed=1: artifact worker_similarity cannot be read (run full-1)",
        "Full data seed=2: artifact worker_similarity was not made (run full-2)",
    )
    assert table.line("Full data").values["worker_similarity.steps"].by_seed == {0: pytest.approx(0.6)}


# Times against the reference


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (with_value(0, "cost", "training_seconds"), "training_seconds is 0: no time can be compared with it"),
        (without("cost", "training_seconds"), "training_seconds was not recorded"),
    ],
)
def test_a_reference_without_time_is_named_once_and_not_for_every_line(
    made: Callable[..., Table], change: Change, reason: str
) -> None:
    table = made({"full-0": change})
    assert table.problems == (f"Full data seed=0: {reason} (run full-0)",)
    value = table.line("CluSTER r=1.00").values["time_per_data"]
    assert (value.state, value.n) == ("incomplete", 2)
    assert f"seed 0: run cluster-1.00-0: no Full data: {reason.split(':')[0]}" in explain(
        table, "CluSTER r=1.00", "time_per_data"
    )


def test_a_reference_in_conflict_gives_nothing_to_compare_with(made: Callable[..., Table], tmp_path: Path) -> None:
    made()
    other = tmp_path / "other"
    other.mkdir()
    put(other, "full-0", with_value(0.1, "metrics", 0, "value"))
    table = build(spec(), resolve, load_records([tmp_path / "records", other]))
    value = table.line("Random r=1.00").values["time_saved"]
    assert (value.state, value.n) == ("no Full data", 0) and len(table.problems) == 1


def test_time_per_data_of_a_run_that_keeps_all_data_is_a_note_and_no_problem(made: Callable[..., Table]) -> None:
    table = made({"cluster-1.00-2": with_value(1.0, "selection", "data_usage")})
    value = table.line("CluSTER r=1.00").values["time_per_data"]
    assert (value.state, value.n, table.problems) == ("incomplete", 2, ())
    assert "CluSTER r=1.00 seed=2 keeps all data: there is no share saved to divide by" in table.notes
    table = made({f"cluster-1.00-{seed}": with_value(1.0, "selection", "data_usage") for seed in range(3)})
    assert (table.line("CluSTER r=1.00").values["time_per_data"].state, table.problems) == ("not applicable", ())


# Problem sets


def test_two_sets_of_problems_under_one_name_are_a_problem_and_the_average_stays_with_the_usual_one(
    made: Callable[..., Table],
) -> None:
    table = made({"cluster-1.00-1": with_value("", "metrics", 0, "dataset_hash")})
    assert table.problems == (
        "humaneval/pass@1 was not scored on the same problems everywhere: aaaa1111, "
        "but problems that are not named for CluSTER r=1.00 seed=1",
    )
    assert [c.label for c in table.columns][:2] == ["humaneval pass@1 (problems not named)", "humaneval pass@1 (aaaa1111)"]
    random, cluster = table.line("Random r=1.00").values, table.line("CluSTER r=1.00").values
    assert random["average"].by_seed == random["humaneval/pass@1#aaaa1111"].by_seed
    assert (cluster["average"].state, cluster["average"].n) == ("incomplete", 2)
    assert random["humaneval/pass@1#unnamed"].state == "other problems"


def test_a_metric_that_is_not_shown_may_have_several_sets_of_problems(made: Callable[..., Table]) -> None:
    assert made({"cluster-1.00-1": with_value("", "metrics", 0, "dataset_hash")}, show=["steps"]).problems == ()


def test_the_table_says_what_the_average_is_the_mean_of(made: Callable[..., Table]) -> None:
    assert "average is humaneval pass@1 alone" in made().notes
    both = made(average_of=["humaneval/pass@1", "mbpp/pass@1"], metrics=["heldout/loss_macro"])
    assert "average is the mean of humaneval pass@1, mbpp pass@1" in both.notes
    assert not any("average" in note for note in made(show=["scores"]).notes)


# Differences


def test_differences_that_are_equal_up_to_rounding_say_no_more_than_equal_ones() -> None:
    score = Column("s", "s", "percent", "higher")
    for a, b in (
        ((52.5 + 7.2e-15, 52.5, 52.5), (52.5,) * 3),
        ((0.1 + 0.2, 0.3, 0.3), (0.3,) * 3),
        ((1.3, 1.3, 1.3), (0.1 + 0.2, 0.3, 0.3)),
    ):
        ours, theirs = dict(enumerate(a)), dict(enumerate(b))
        assert len(set(paired(ours, theirs))) == 1
        difference = difference_of(Value(3, ours), Value(3, theirs), score, spec())
        assert difference is not None and difference.verdict == "cannot tell"
        assert difference.interval is not None and has_no_width(difference.interval)
    assert verdict(t_interval([7e-15, 0.0, 0.0]), 1.0) == verdict(t_interval([0.0, 0.0, 0.0]), 1.0) == "cannot tell"
    assert paired({0: 1.0, 1: 2.0}, {0: 0.5, 2: 1.0}) == [0.5] and paired({}, {}) == []
    assert verdict(t_interval([1e-3, 1.1e-3, 1.2e-3]), 0.02) == "better"  # small is not the same as rounded


def test_a_difference_over_fewer_seeds_than_planned_is_shown_with_its_number(made: Callable[..., Table], tmp_path: Path) -> None:
    made()
    for seed, was in ((3, 0), (4, 1)):
        for name in ("full", "random-1.00"):
            (tmp_path / f"records/{name}-{seed}.json").write_text(
                (GOLDEN / f"machine_a/{name}-{was}.json").read_text().replace(f'"{name}-{was}"', f'"{name}-{seed}"')
            )
    table = build(spec(seeds=[0, 1, 2, 3, 4]), resolve, load_records([tmp_path / "records"]))
    difference = table.line("CluSTER r=1.00").values["humaneval/pass@1"].difference
    assert difference is not None and (difference.n, difference.planned) == (3, 5)
    text = outputs(table)["tiny.md"]
    assert "| CluSTER | r=1.00 | +0.0 [-6.2, 6.2], cannot tell (n 3 of 5) |" in text
    (random,) = [line for line in text.split("## Difference")[1].splitlines() if line.startswith("| Random")]
    assert "(n " not in random
    write_outputs(table, tmp_path)
    assert outputs(read_table(tmp_path / "tiny.json")) == outputs(table)
