"""Records behind tables: several of one run, exports, and what a table says of where its runs were made."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from composed import ROOT
from table_kit import GOLDEN, INFINITE, NAN, Change, no_score, put, resolve, spec, table_of, with_value

from clusterft.provenance import commit_of
from clusterft.records import is_number, parse_record
from experiments.aggregate import build
from experiments.plan import plan
from experiments.recordstore import comparable, export_records, load_records
from experiments.render import outputs
from experiments.table import Table


@pytest.fixture
def made(tmp_path: Path) -> Callable[..., Table]:
    """The table of the golden records, some changed: `made({run id: change})`."""
    return partial(table_of, tmp_path / "records")


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (with_value(0.7, "selection", "data_usage"), "data_usage is 0.6 and 0.7"),
        (with_value(241, "selection", "budget"), "budget is 240 and 241"),
        (with_value("dddd", "metrics", 0, "dataset_hash"), "humaneval/pass@1, problems is aaaa1111bbbb2222 and dddd"),
        (with_value(41, "metrics", 0, "n"), "humaneval/pass@1, n is 40 and 41"),
        (with_value(16, "train", "steps"), "steps is 15 and 16"),
        (with_value(0.55 + 1e-12, "metrics", 0, "value"), "humaneval/pass@1 is 0.55 and 0.550000000001"),
        (no_score, "humaneval/pass@1 is 0.55 and absent"),
    ],
)
def test_records_of_one_run_that_differ_in_what_is_shown_are_a_conflict(tmp_path: Path, change: Change, reason: str) -> None:
    put(tmp_path, "cluster-1.00-1", change)
    run = load_records([GOLDEN / "machine_a", tmp_path]).run("cluster-1.00-1")
    assert (run.state, run.reason) == ("conflict", f"two records disagree: {reason}")


def test_times_may_differ_and_a_copy_that_cannot_be_read_is_a_note(tmp_path: Path) -> None:
    put(tmp_path, "cluster-1.00-1", with_value(99.0, "cost", "training_seconds"))
    put(tmp_path, "cluster-1.00-0", lambda data: "{")
    records = load_records([GOLDEN / "machine_a", tmp_path])
    assert records.run("cluster-1.00-1").state == records.run("cluster-1.00-0").state == "complete"
    assert "of another copy cluster-1.00-0.json cannot be read" in records.run("cluster-1.00-0").notes[0]


@pytest.mark.parametrize(
    "change",
    [
        with_value(NAN, "metrics", 0, "value"),
        with_value(NAN, "metrics", 0, "stderr"),
        with_value(INFINITE, "cost", "training_seconds"),
        with_value(-INFINITE, "train", "last_loss"),
        with_value("12 s", "cost", "training_seconds"),
        with_value(True, "metrics", 0, "value"),
        lambda data: json.dumps(data).replace("60.0", "1e999"),
    ],
)
def test_an_export_gives_the_same_table_as_the_records_themselves(
    made: Callable[..., Table], tmp_path: Path, change: Change
) -> None:
    shown = {"show": [*spec().show, "last_loss"]}
    table = made({"cluster-1.00-1": change}, **shown)
    records = load_records([tmp_path / "records"])
    export_records(records, [run.run_id for run in records.runs()], tmp_path / "export")
    exported = load_records([tmp_path / "export"])
    assert outputs(build(spec(**shown), resolve, exported)) == outputs(table)
    for path in (tmp_path / "export").iterdir():
        json.loads(path.read_text(), parse_constant=lambda word: pytest.fail(f"an export has {word}, which is no JSON"))
    assert plan(spec(), resolve, exported).complete


@pytest.mark.parametrize("scale", ["laptop", "overnight"])
def test_an_export_of_the_committed_records_changes_nothing(scale: str, tmp_path: Path) -> None:
    committed = ROOT / "results" / scale / "records"
    records = load_records([committed])
    assert not records.unreadable
    for path in export_records(records, records.found, tmp_path):
        assert path.read_bytes() == (committed / path.name).read_bytes()
    assert len(list(tmp_path.iterdir())) == len(list(committed.iterdir()))


def test_metrics_set_apart_are_checked_like_the_others() -> None:
    data = json.loads((GOLDEN / "machine_a/cluster-1.00-1.json").read_text())
    data["metrics"][0]["value"] = True
    record, bad = parse_record(data)
    assert [m.task for m in record.metrics] == ["heldout"] and bad == {"humaneval/pass@1": True}
    data["metrics"][0]["unit"] = "points"
    with pytest.raises(ValueError, match="unit 'points' is not one of"):
        parse_record(data)
    assert [is_number(x) for x in (1, 0.5, True, "1", None, NAN, INFINITE, 10**400)] == [True, True, *[False] * 6]
    assert "runtime" not in comparable(data)["config"]


# Where numbers come from


def test_the_table_says_what_was_made_from_changed_sources_or_at_several_commits(made: Callable[..., Table]) -> None:
    def dirty(data: dict[str, Any]) -> None:
        data["dirty"] = True

    def elsewhere(data: dict[str, Any]) -> None:
        data["commit"] = "1111111"

    assert not any("commit" in note for note in made().notes)
    notes = made({"cluster-1.00-0": dirty, "cluster-1.00-2": dirty, "random-1.00-1": elsewhere}).notes
    assert "made from a working tree with uncommitted changes: CluSTER r=1.00 seeds 0, 2" in notes
    assert "seeds made at different commits: Random r=1.00" in notes
    everything = {f"{name}-{seed}": dirty for name in ("full", "random-1.00", "cluster-1.00") for seed in range(3)}
    assert "made from a working tree with uncommitted changes: all runs" in made(everything).notes
    lines = {run: change for run, change in everything.items() if not run.startswith("random")}
    assert "made from a working tree with uncommitted changes: Full data; CluSTER r=1.00" in made(lines).notes


def test_results_that_a_table_wrote_do_not_make_the_next_run_one_of_changed_sources(tmp_path: Path) -> None:
    def git(*arguments: str) -> None:
        given = ["git", "-c", "user.name=a", "-c", "user.email=a@b", *arguments]
        subprocess.run(given, cwd=tmp_path, check=True, capture_output=True)

    assert commit_of(tmp_path) == ("unknown", True)
    files = [tmp_path / name for name in ("src/a.py", "results/laptop/table2.md", "docs/findings.md", "docs/other.md")]
    for path in files:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("1")
    git("init")
    git("add", ".")
    git("commit", "-m", "first")
    head, dirty = commit_of(tmp_path)
    assert len(head) == 40 and not dirty
    for path, counts in zip(files, (True, False, False, True), strict=True):
        path.write_text("2")
        assert commit_of(tmp_path) == (head, counts), path
        path.write_text("1")


def test_lines_with_the_mean_budget_of_the_reference_but_other_seeds_are_told_apart(made: Callable[..., Table]) -> None:
    changes = {f"cluster-1.00-{s}": with_value(0.6 + d, "selection", "data_usage") for s, d in enumerate((-0.02, 0.02, 0.0))}
    table = made(changes, rows={"Random": ["selector=random"], "CluSTER": ["selector=cluster"]}, once=[], reference="Random")
    (note,) = [note for note in table.notes if "budget" in note]
    assert note == (
        "CluSTER r=1.00 and Random kept 60.0 % of the data, but not an equal budget on every seed (seed 0: 58.0 % and 60.0 %)"
    )
