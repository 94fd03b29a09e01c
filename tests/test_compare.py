"""`clusterft compare`: hand-built runs with known answers, refusals, flags, text, JSON and the command line."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from clusterft.records import Metric, RunRecord
from eval.compare import compare_groups, compare_records, main
from eval.compare_text import sentence, to_json, to_markdown
from eval.per_problem import read_problems, write_problems
from eval.verdict import CANNOT_TELL, NO_VERDICT, NO_WORSE, WORSE

HASH = "0123456789abcdef"


def run(method: str, seed: int, metrics: list[Metric], usage: float = 1.0, name: str = "", **extra) -> RunRecord:
    fields = {
        "status": "complete",
        "config": {"selector": {"name": method}, "seed": seed, "trainer": {"lr": 1e-5}},
        "cost": {},
        **extra,
    }
    return RunRecord(
        run_id=name or f"{method}-{seed}", seed=seed, commit="", dirty=False, packages={}, hardware={}, train={},
        selection={"method": method, "data_usage": usage}, metrics=tuple(metrics), **fields,
    )  # fmt: skip


def metric(passed: int, total: int = 164, task: str = "humaneval", name: str = "pass@1", **extra) -> Metric:
    return Metric(task, name, passed / total, total, **{"dataset_hash": HASH, **extra})


def seeds(method: str, counts: list[int], **extra) -> list[RunRecord]:
    return [run(method, s, [metric(c)], **extra) for s, c in enumerate(counts)]


FULL, RANDOM, CLUSTER = [70, 72, 71, 69, 73], [66, 64, 69, 65, 67], [71, 70, 73, 70, 72]  # the counts of case 20


def test_groups_of_seeds_give_case_20s_numbers():
    row = compare_groups(seeds("random", RANDOM), seeds("full", FULL)).rows[0]
    assert (round(row.by_seed.mean, 4), round(row.by_seed.low, 4), round(row.by_seed.high, 4)) == (-2.9268, -4.6533, -1.2003)
    assert (row.verdict.kind, row.basis, row.unit) == (WORSE, "paired seeds", "points")
    row = compare_groups(seeds("cluster", CLUSTER, usage=0.59), seeds("full", FULL)).rows[0]
    assert (round(row.by_seed.low, 4), round(row.by_seed.high, 4)) == (-1.1221, 1.366)
    assert row.verdict.kind == CANNOT_TELL and row.verdict.needed > 5


def test_the_sentence_for_a_paper():
    c = compare_groups(seeds("cluster", CLUSTER, usage=0.59), seeds("full", FULL))
    assert sentence(c, c.rows[0]) == (
        "On humaneval/pass@1 (164 problems; mean ± sample deviation over 5 seeds), cluster (59 % of the data) reaches "
        "43.41 ± 0.80 and full 43.29 ± 0.96 points; paired by seed the difference is +0.12 points (95% t interval "
        "[-1.12, +1.37]), so at a margin of 1 point we cannot tell whether it is worse (about 9 seeds would settle it)."
    )
    c = compare_groups(seeds("random", RANDOM), seeds("full", FULL))
    assert sentence(c, c.rows[0]).endswith("[-4.65, -1.20]), so it is worse by more than 1 point.")


def outcomes(solved: int, lost: int, total: int) -> tuple[dict[str, float], dict[str, float]]:
    """Reference solves the first `solved` problems; the candidate loses the first `lost` of them."""
    reference = {f"q{i:04d}": float(i < solved) for i in range(total)}
    return {q: 0.0 if i < lost else v for i, (q, v) in enumerate(reference.items())}, reference


def single(lost: int, total: int):
    a, b = outcomes(total // 2, lost, total)
    runs = [run("cluster", 0, [metric(total // 2 - lost, total)]), run("full", 0, [metric(total // 2, total)])]
    key = ("humaneval", "pass@1")
    return compare_records(*runs, problems={"cluster-0": {key: a}, "full-0": {key: b}})


def test_single_runs_are_judged_over_problems_and_say_so():
    c = single(lost=120, total=1200)
    row = c.rows[0]
    assert (row.mcnemar.gained, row.mcnemar.lost) == (0, 120) and row.mcnemar.p_value == pytest.approx(2 * 0.5**120)
    assert (row.verdict.kind, row.basis) == (WORSE, "problems") and row.seed_verdict.kind == NO_VERDICT
    assert row.by_problem.mean == pytest.approx(-10.0)
    assert "these trained models is -10.00 points" in sentence(c, row) and "nothing is said about other seeds" in sentence(c, row)
    assert single(lost=0, total=2000).rows[0].verdict.kind == NO_WORSE
    small = single(lost=0, total=20).rows[0].verdict
    assert small.kind == CANNOT_TELL and small.needed > 20


def test_single_runs_without_per_problem_results_have_no_verdict():
    c = compare_records(run("cluster", 0, [metric(70)]), run("full", 0, [metric(70)]))
    assert c.rows[0].verdict.kind == NO_VERDICT
    assert "no verdict can be given (n < 3, no per-problem results)" in to_markdown(c)


def test_losses_are_judged_with_the_sign_turned():
    loss = lambda v: [Metric("heldout", "loss", v, 300, unit="nats", dataset_hash=HASH)]  # noqa: E731
    base = [2.000, 2.010, 2.020]
    full = [run("full", s, loss(v)) for s, v in enumerate(base)]
    worse = [run("cluster", s, loss(v + d)) for s, (v, d) in enumerate(zip(base, [0.050, 0.052, 0.048], strict=True))]
    better = [run("cluster", s, loss(v - d)) for s, (v, d) in enumerate(zip(base, [0.050, 0.052, 0.048], strict=True))]
    row = compare_groups(worse, full).rows[0]
    assert row.by_seed.mean == pytest.approx(-0.05) and row.verdict.kind == WORSE and row.margin == 0.01 and row.unit == "nats"
    assert row.candidate.mean == pytest.approx(2.06)
    assert compare_groups(better, full).rows[0].verdict.kind == NO_WORSE


@pytest.mark.parametrize("other", [{"dataset_hash": "f" * 16}, {"total": 163}])
def test_other_problems_are_refused(other):
    with pytest.raises(
        ValueError, match=r"humaneval/pass@1: measured on \d+ problems .* different benchmarks and are not compared"
    ):
        compare_records(run("cluster", 0, [metric(60, **other)]), run("full", 0, [metric(60)]))
    with pytest.raises(ValueError, match="different benchmarks"):  # also within one side
        compare_groups([run("cluster", 0, [metric(60)]), run("cluster", 1, [metric(60, **other)])], seeds("full", FULL))


def test_missing_failed_and_contradicting_runs_are_flagged():
    a = seeds("cluster", CLUSTER)
    a[3] = run("cluster", 3, [], status="failed", error="out of memory")
    a.append(run("cluster", 1, [metric(55)], name="cluster-1-old"))
    c = compare_groups(a, seeds("full", FULL))
    assert [(f.kind, f.seed) for f in c.flags] == [("conflicting_runs", 1), ("missing_run", 3)]
    assert not c.final and c.rows[0].verdict.kind == NO_VERDICT and c.rows[0].by_seed.n == 3
    assert "run cluster-3 (seed 3) is failed and left out" in c.notes and "NOT FINAL" in to_markdown(c)
    settled = compare_groups(a, seeds("full", FULL), choices=["cluster-1"])
    assert settled.final and settled.rows[0].by_seed.n == 4 and settled.rows[0].verdict.kind != NO_VERDICT


def test_a_side_that_mixes_settings_is_refused_and_other_differences_are_noted():
    tuned = {"selector": {"name": "cluster"}, "seed": 1, "trainer": {"lr": 3e-5}}
    with pytest.raises(ValueError, match=r"cluster-0 and cluster-1 differ in trainer\.lr"):
        compare_groups([run("cluster", 0, [metric(70)]), run("cluster", 1, [metric(70)], config=tuned)], seeds("full", FULL))
    c = compare_records(run("cluster", 0, [metric(70)], config=tuned), run("full", 0, [metric(70)]))
    assert any("also differ in trainer.lr" in n for n in c.notes)


def test_nothing_to_compare_is_said_in_a_sentence():
    with pytest.raises(ValueError, match="no metric in common"):
        compare_records(run("cluster", 0, [metric(1)]), run("full", 0, [metric(1, task="mbpp")]))
    with pytest.raises(ValueError, match="the reference has no complete run"):
        compare_records(run("cluster", 0, [metric(1)]), run("full", 0, [], status="failed"))


def test_average_over_tasks_with_iqm():
    def side(method: str, shift: float) -> list[RunRecord]:
        noise = np.random.default_rng(1).normal(0, 0.002, (4, 3))
        jitter = np.random.default_rng(2).normal(0, 0.0005, (4, 3)) * (shift != 0)
        tasks = ("anatomy", "genetics", "medicine")
        values = 0.5 + 0.1 * np.arange(3) + noise + jitter + shift
        return [
            run(method, s, [Metric(t, "acc", float(v), 100, dataset_hash=t) for t, v in zip(tasks, row, strict=True)])
            for s, row in enumerate(values)
        ]

    c = compare_groups(side("cluster", -0.03), side("full", 0.0))
    row = c.rows[-1]
    assert row.title == "average/acc" and row.tasks == ("anatomy", "genetics", "medicine") and row.problems == 300
    assert row.by_seed.mean == pytest.approx(-3, abs=0.1) and row.verdict.kind == WORSE
    assert row.iqm[0] == pytest.approx(-3, abs=0.2) and row.iqm[1] < row.iqm[0] < row.iqm[2]
    assert "On acc averaged over anatomy, genetics, medicine (300 problems;" in to_markdown(c)
    assert to_markdown(c).count("For a paper\n- On acc averaged") == 1


def on_disk(root: Path, record: RunRecord, solved: dict[str, float]) -> None:
    folder = root / record.run_id
    rows = [{"task": "humaneval", "problem": q, "scores": {"pass@1": v}} for q, v in solved.items()]
    write_problems(folder / "eval" / "code", rows)
    (folder / "record.json").write_text(json.dumps(record.to_json()))


def test_command_line(tmp_path, capsys):
    a, b = outcomes(80, 8, 164)
    on_disk(tmp_path, run("cluster", 0, [metric(72)]), a)
    on_disk(tmp_path, run("full", 0, [metric(80)]), b)
    assert main(["cluster-0", str(tmp_path / "full-0"), "--runs-dir", str(tmp_path)]) == 0
    text = capsys.readouterr().out
    assert "0 gained, 8 lost, McNemar p = 0.00781" in text and "Verdict\n- humaneval/pass@1: worse than full" in text  # 2 / 2^8
    assert main(["cluster-0", "full-0", "--runs-dir", str(tmp_path), "--json", "--margin", "20"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["rows"][0]["verdict"]["label"] == "no worse than full (margin 20.0)" and data["final"] is True
    assert data["rows"][0]["by_problem"]["mean"] == pytest.approx(-100 * 8 / 164)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nothing", "full-0"], "nothing: no record.json in"),
        (["full-0", "full-0"], "run full-0 stands on both sides"),
        (["cluster-0", "full-0", "--margin", "0"], "margin 0.0 must be above 0"),
        (["torn", "full-0"], "not a run record"),
        ([",", "full-0"], "names no run"),
        (["cluster-0", "full-0", "--choose", "x"], "chosen run x is not among the results"),
    ],
)
def test_command_line_refuses_in_one_sentence(tmp_path, capsys, arguments, message):
    a, b = outcomes(80, 8, 164)
    on_disk(tmp_path, run("cluster", 0, [metric(72)]), a)
    on_disk(tmp_path, run("full", 0, [metric(80)]), b)
    (tmp_path / "torn").mkdir()
    (tmp_path / "torn" / "record.json").write_text('{"schema": 1')
    assert main([*arguments, "--runs-dir", str(tmp_path)]) == 2
    captured = capsys.readouterr()
    assert message in captured.err and captured.out == "" and captured.err.count("\n") == 1


def test_costs_are_set_side_by_side_where_all_runs_have_them():
    a = [run("cluster", s, [metric(70)], cost={"training_seconds": 30.4, "selection_seconds": 5.0}) for s in range(3)]
    b = [run("full", s, [metric(70 + s)], cost={"training_seconds": 100.0}) for s in range(3)]
    c = compare_groups(a, b)
    assert c.costs == {"training_seconds": (pytest.approx(30.4), 100.0)}
    assert "training seconds: 30.4 against 100.0 (-69.6 %)" in to_markdown(c)


def test_comparing_imports_no_torch():
    code = "import sys, eval.compare; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=Path(__file__).parent.parent, check=False).returncode == 0


def test_json_survives_a_round_trip():
    data = to_json(compare_groups(seeds("cluster", CLUSTER), seeds("full", FULL)))
    assert json.loads(json.dumps(data, allow_nan=False)) == json.loads(json.dumps(data))


def test_problem_files_of_another_evaluation_are_refused():
    a, b = outcomes(80, 8, 164)
    key = ("humaneval", "pass@1")
    with pytest.raises(ValueError, match=r"average 0\.439024, its record says 0\.426829 over 164; the per-problem file is"):
        compare_records(
            run("cluster", 0, [metric(70)]), run("full", 0, [metric(80)]), problems={"cluster-0": {key: a}, "full-0": {key: b}}
        )


def test_code_and_loss_files_are_read_too(tmp_path):
    (tmp_path / "humaneval").mkdir()
    (tmp_path / "humaneval" / "per_problem.jsonl").write_text('{"id": "a", "value": 1, "value_plus": 0, "reason": ""}\n')
    rows = [("a", "x", 6.0, 2), ("b", "x", 2.0, 2), ("c", "y", 6.0, 6)]
    text = "".join(json.dumps({"id": i, "family": f, "value": v / n, "nats": v, "n_tokens": n}) + "\n" for i, f, v, n in rows)
    (tmp_path / "per_row.jsonl").write_text(text)
    found = read_problems(tmp_path)
    assert found["humaneval", "pass@1"] == {"a": 1.0} and found["humaneval_plus", "pass@1"] == {"a": 0.0}
    mean = {name: np.mean(list(found["heldout", name].values())) for name in ("nll_micro", "nll_macro")}
    assert mean["nll_micro"] == pytest.approx(14 / 10)  # all nats over all tokens
    assert mean["nll_macro"] == pytest.approx((8 / 4 + 6 / 6) / 2)  # mean over the two families


def test_problem_files_are_checked(tmp_path):
    row = {"task": "t", "problem": "q", "scores": {"acc": 1.0}}
    with pytest.raises(ValueError, match="'q' occurs twice"):
        write_problems(tmp_path, [row, row])
    path = write_problems(tmp_path, [row])
    assert read_problems(tmp_path) == {("t", "acc"): {"q": 1.0}}
    for text, message in (
        ("{", "not a per-problem result"),
        (json.dumps({**row, "scores": {"acc": float("nan")}}), "acc of q is nan"),
    ):
        path.write_text(text + "\n")
        with pytest.raises(ValueError, match=r"problems\.jsonl:1: " + message):
            read_problems(tmp_path)
