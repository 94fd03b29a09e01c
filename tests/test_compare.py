"""`clusterft compare`: hand-built runs with known answers, refusals, flags, text, JSON and the command line."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from clusterft.cli import main as command
from clusterft.records import Metric, RunRecord
from eval.compare import compare_groups, compare_records, main
from eval.compare_margin import margin_notes
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


def test_a_method_is_named_with_the_share_of_all_its_seeds():
    kept = [run("cluster", s, [metric(71)], usage=u) for s, u in enumerate((0.25, 0.55, 0.4))]
    assert compare_groups(kept, seeds("full", FULL)).candidate == "cluster (25 to 55 % of the data)"


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
        (["cluster-0", "full-0", "--margin", "0"], "--margin 0.0: a margin is a finite number above 0"),
        (["nothing", "full-0", "--margin", "inf"], "--margin inf: a margin"),
        (["nothing", "full-0", "--margin-nats", "-1"], "--margin-nats -1.0: a margin"),
        (["torn", "full-0"], "not a run record"),
        (["list", "full-0"], "not a run record (it holds no record)"),
        (["text_seed", "full-0"], "not a run record (its seed is '0')"),
        (["no_metrics", "full-0"], "not a run record (its metrics is None)"),
        (["gone.csv", "full"], "gone.csv: there is no such file"),
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
    whole = run("full", 0, [metric(80)]).to_json()
    for name, data in {"list": [], "text_seed": {**whole, "seed": "0"}, "no_metrics": {**whole, "metrics": None}}.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "record.json").write_text(json.dumps(data, default=list))
    assert main([*arguments, "--runs-dir", str(tmp_path)]) == 2
    captured = capsys.readouterr()
    assert message in captured.err and captured.out == "" and captured.err.count("\n") == 1
    assert captured.err.startswith("error: ")


def test_a_metric_that_is_no_number_is_named_and_the_others_are_compared(tmp_path, capsys):
    for method, counts in (("cluster", CLUSTER), ("full", FULL)):
        for seed, count in enumerate(counts):
            data = run(method, seed, [metric(count), metric(40, 100, "medqa", "acc")]).to_json()
            if (method, seed) == ("cluster", 2):
                data["metrics"][1]["value"] = float("nan")
            (tmp_path / f"{method}-{seed}").mkdir()
            (tmp_path / f"{method}-{seed}" / "record.json").write_text(json.dumps(data, default=list))
    sides = [",".join(f"{m}-{s}" for s in range(5)) for m in ("cluster", "full")]
    assert main([*sides, "--runs-dir", str(tmp_path), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert "run cluster-2 (seed 2): medqa/acc is nan and left out" in found["notes"]
    pairs = {row["task"]: row["by_seed"]["n"] for row in found["rows"]}
    assert (pairs["humaneval"], pairs["medqa"]) == (5, 4)


@pytest.mark.parametrize(("encoding", "separator"), [("utf-8", ","), ("utf-8-sig", ";"), ("utf-16", "\t")])
def test_scores_from_a_file_are_judged_as_well(tmp_path, capsys, encoding, separator):
    rows = ["method,seed,benchmark,passed,total,score,run_id"]
    rows += [
        f"{m},{s},humaneval,{c},164,,{m}-{s}" for m, counts in (("full", FULL), ("random", RANDOM)) for s, c in enumerate(counts)
    ]
    path = tmp_path / "results.csv"
    path.write_text("\n".join(rows).replace(",", separator), encoding=encoding)
    assert main([str(path), "full", "--json"]) == 0
    cell = json.loads(capsys.readouterr().out)["table"]["humaneval/random"]
    assert (round(cell["paired"]["low"], 4), round(cell["paired"]["high"], 4)) == (-4.6533, -1.2003)
    assert cell["verdict"]["kind"] == WORSE
    assert main([str(path), "less"]) == 2
    assert "the reference 'less' has no results; methods are full, random" in capsys.readouterr().err


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


# -- the direction of a difference: three seeds, t(.975, 2) / sqrt 3 = 2.484138


def losses(method: str, values: list[float]) -> list[RunRecord]:
    return [
        run(method, s, [Metric("heldout", "nll_micro", v, 300, unit="nats", dataset_hash=HASH)]) for s, v in enumerate(values)
    ]


def of_losses(*differences: float):
    base = [5.50, 5.51, 5.52]
    return compare_groups(losses("cluster", [b + d for b, d in zip(base, differences, strict=True)]), losses("full", base))


def of_counts(*differences: int):
    side = {m: [metric(500 + d * (m == "cluster"), 1000) for d in differences] for m in ("cluster", "full")}
    return compare_groups(*([run(m, s, [x]) for s, x in enumerate(ms)] for m, ms in side.items()))


@pytest.mark.parametrize(
    ("made", "cell", "verdict", "clause"),
    [
        # mean 0.003, sd 0.001: 0.003 -+ 0.00248
        (
            of_losses(0.002, 0.003, 0.004),
            "+0.0030 [+0.0005, +0.0055]",
            "no worse than full (margin 0.01): within the margin, but measurably worse",
            "so at a margin of 0.01 nats it is no worse, though measurably worse within that margin.",
        ),
        (
            of_losses(-0.002, -0.003, -0.004),
            "-0.0030 [-0.0055, -0.0005]",
            "no worse than full (margin 0.01), and measurably better",
            "so at a margin of 0.01 nats it is no worse, and measurably better.",
        ),
        # mean 0.01, sd 0.002: 0.01 -+ 0.00497, around the margin
        (
            of_losses(0.008, 0.010, 0.012),
            "+0.0100 [+0.0050, +0.0150]",
            "cannot tell, measurably worse",
            "so it is measurably worse, but at a margin of 0.01 nats we cannot tell whether by more than that.",
        ),
        # mean 0.05, sd 0.002
        (
            of_losses(0.048, 0.050, 0.052),
            "+0.0500 [+0.0450, +0.0550]",
            "worse than full",
            "so it is worse by more than 0.01 nats.",
        ),
        # mean -0.5 points, sd 0.1: -0.5 -+ 0.248
        (
            of_counts(-4, -5, -6),
            "-0.50 [-0.75, -0.25]",
            "no worse than full (margin 1.0): within the margin, but measurably worse",
            "so at a margin of 1 point it is no worse, though measurably worse within that margin.",
        ),
        (
            of_counts(4, 5, 6),
            "+0.50 [+0.25, +0.75]",
            "no worse than full (margin 1.0), and measurably better",
            "so at a margin of 1 point it is no worse, and measurably better.",
        ),
    ],
)
def test_differences_have_their_own_sign_and_verdicts_say_worse_or_better(made, cell, verdict, clause):
    (row,), text, (data,) = made.rows, to_markdown(made), to_json(made)["rows"]
    better = "lower" if row.unit == "nats" else "higher"
    assert f"{row.title} ({row.unit}, {better} is better)" in text and cell in text
    assert f"- {row.title}: {verdict}" in text and data["verdict"]["text"].split("; ")[0] == verdict
    assert sentence(made, row).endswith(clause) and cell.replace(" [", f" {row.unit} (95% t interval [") in sentence(made, row)
    assert "measurably lower" not in text and "measurably higher" not in text
    mean, low, high = (data["by_seed"][k] for k in ("mean", "low", "high"))
    assert data["better"] == better and low < mean < high
    assert mean == pytest.approx(data["candidate"]["mean"] - data["reference"]["mean"])
    worse = mean > 0 if better == "lower" else mean < 0
    for v in (data["verdict"], data["seed_verdict"]):
        assert (v["measurably_worse"], v["measurably_better"], v["measurably_lower"]) == (worse, not worse, mean < 0)


def test_a_single_run_with_a_higher_loss_differs_by_plus_something():
    """Every row is 0.0003 nats worse, so the bootstrap interval has no width."""
    rows = {f"q{i}": 5.5577 + 0.01 * (i - 2) for i in range(5)}
    key = ("heldout", "nll_micro")
    sides = [
        run(m, 0, [Metric(*key, 5.5577 + d, 5, unit="nats", dataset_hash=HASH)]) for m, d in (("cluster", 0.0003), ("full", 0.0))
    ]
    c = compare_records(*sides, problems={"cluster-0": {key: {q: v + 0.0003 for q, v in rows.items()}}, "full-0": {key: rows}})
    text, (row,) = to_markdown(c), c.rows
    assert row.verdict.kind == NO_WORSE and row.basis == "problems"
    assert "+0.0003 none (n < 3)" in text and "+0.0003 [+0.0003, +0.0003]" in text and "-0.0003" not in text
    assert "is +0.0003 nats (95% paired bootstrap interval [+0.0003, +0.0003];" in sentence(c, row)
    assert "reaches 5.5580 and full 5.5577 nats (lower is better);" in sentence(c, row)
    data = to_json(c)
    assert data["rows"][0]["by_problem"]["mean"] == pytest.approx(0.0003) and "candidate minus reference" in data["signs"]
    assert data["rows"][0]["problem_verdict"]["measurably_worse"] is True


def costing(runs: int, a: float, b: float):
    return compare_groups(
        [run("cluster", s, [metric(70)], cost={"selection_seconds": a}) for s in range(runs)],
        [run("random", s, [metric(70 + s)], cost={"selection_seconds": b}) for s in range(runs)],
    )


def test_no_percentage_of_next_to_no_seconds_and_a_note_on_speed():
    for base, line in ((0.0007, "6.5 against 0.0"), (0.0, "6.5 against 0.0"), (0.099, "6.5 against 0.1")):
        assert (
            f"selection seconds: {line}\nSeconds are of this machine at that time; one run a side says nothing about speed.\n"
            in (to_markdown(costing(1, 6.5, base)))
        )
    text = to_markdown(costing(3, 0.2, 0.1))
    assert "selection seconds: 0.2 against 0.1 (+100.0 %)\nSeconds are of this machine at that time.\n" in text
    assert "Seconds" not in to_markdown(of_counts(4, 5, 6)) and to_json(of_counts(4, 5, 6))["costs_note"] == ""


def test_a_folder_that_is_selected_only_is_told_what_comes_next(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    on_disk(Path("other/run"), run("full", 0, [metric(80)]), outcomes(80, 8, 164)[1])
    Path("my sub/run/abc/train").mkdir(parents=True)
    for name in ("header.json", "selection.parquet"):
        Path("my sub", name).touch()
    assert command(["compare", "my sub", "other"]) == 2
    whole = "error: my sub has no evaluated run yet: clusterft train 'my sub', then clusterft eval 'my sub'\n"
    assert capsys.readouterr().err == whole
    Path("my sub/run/abc/train/result.json").touch()
    assert command(["compare", "other", "my sub"]) == 2
    assert capsys.readouterr().err == "error: my sub has no evaluated run yet: clusterft eval 'my sub'\n"


def test_several_folders_with_commas_are_the_runs_of_one_side(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for s, count in enumerate(CLUSTER[:3]):
        on_disk(Path(f"a{s}/run"), run("cluster", s, [metric(count)]), {})
        on_disk(Path(f"b{s}/run"), run("full", s, [metric(FULL[s])]), {})
    assert command(["compare", "a0,a1, a2", "b0,b1,b2", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["seeds"] == [0, 1, 2]


# -- a margin that is large against what training gained


def trained(first: float | None, last: float | None) -> list[RunRecord]:
    return [replace(r, train={"first_loss": first, "last_loss": last}) for r in losses("full", [5.50, 5.51, 5.52])]


def test_a_margin_that_is_large_against_the_gain_is_remarked_on():
    c = of_losses(0.002, 0.003, 0.004)
    assert margin_notes(c, trained(2.0, 1.98)) == [
        "the margin of 0.01 nats is 50 % of what training gained (training loss of full, first step minus last: +0.0200 nats): "
        "'no worse' says little here"
    ]
    assert margin_notes(c, trained(2.0, 1.5)) == margin_notes(c, trained(2.0, 1.96)) == []  # 2 % and 25 %
    (note,) = margin_notes(c, trained(2.0, 2.01))
    assert "gained nothing" in note and "-0.0100 nats" in note
    mixed = [*trained(2.0, 1.97)[:2], *trained(2.0, 2.0)[2:]]  # gains 0.03, 0.03 and 0: 0.02 on average
    assert "is 50 % of what" in margin_notes(c, mixed)[0]
    (open_note,) = margin_notes(of_losses(0.008, 0.010, 0.012), trained(2.0, 1.98))
    assert open_note.endswith("'no worse' would say little here")


def test_nothing_is_remarked_where_nothing_is_known_or_no_loss_is_judged():
    c = of_losses(0.002, 0.003, 0.004)
    assert margin_notes(c, losses("full", [5.5])) == margin_notes(c, trained(2.0, None)) == []
    assert margin_notes(c, trained(2.0, float("nan"))) == []
    assert margin_notes(of_losses(0.048, 0.050, 0.052), trained(2.0, 1.98)) == []  # worse even at that margin
    assert margin_notes(of_counts(4, 5, 6), trained(2.0, 1.98)) == []


def test_the_remark_on_the_margin_is_printed(tmp_path, capsys):
    for record in [*losses("cluster", [5.502, 5.513, 5.524]), *trained(2.0, 1.98)]:
        (tmp_path / record.run_id).mkdir()
        (tmp_path / record.run_id / "record.json").write_text(json.dumps(record.to_json()))
    sides = [",".join(f"{m}-{s}" for s in range(3)) for m in ("cluster", "full")]
    assert main([*sides, "--runs-dir", str(tmp_path)]) == 0
    assert capsys.readouterr().out.count("- the margin of 0.01 nats is 50 % of what training gained") == 1
    assert main([*sides, "--runs-dir", str(tmp_path), "--margin-nats", "0.004"]) == 0
    assert "what training gained" not in capsys.readouterr().out
