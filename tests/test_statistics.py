"""Statistics and verdict: hand-computed values, scipy and statsmodels as twins, case 20 in full, and a small simulation."""

from __future__ import annotations

import importlib.util
import json
import math
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from scipy import stats
from statsmodels.stats.contingency_tables import mcnemar
from statsmodels.stats.power import TTestPower
from statsmodels.stats.weightstats import DescrStatsW

from clusterft.seeding import generator
from eval import power
from eval import statistics as st
from eval.seed_table import lost_nothing_table
from eval.settle import Observation, read_results_csv, settle
from eval.verdict import CANNOT_TELL, NO_VERDICT, NO_WORSE, WORSE, judge, judge_problems, judge_seeds

ROOT = Path(__file__).parent.parent
CASE = Path(__file__).parent / "golden" / "cases" / "20-lost-nothing-table"


@pytest.fixture(scope="module")
def expected() -> dict:
    return json.loads((CASE / "expected.json").read_text())


@pytest.fixture(scope="module")
def table():
    return lost_nothing_table(read_results_csv(CASE / "results.csv"), "full", 1.0, choices=["run-cluster-1"])


# -- means and intervals


def test_summary_by_hand():
    s = st.summarise([1.0, 2.0, 3.0])  # sd 1; t(.975, 2) = 4.302653; half width 4.302653 / sqrt 3 = 2.484138
    assert (s.n, s.mean, s.sd) == (3, 2.0, 1.0)
    assert (s.low, s.high) == pytest.approx((2 - 2.484138, 2 + 2.484138), abs=1e-6)


@pytest.mark.parametrize("n", [3, 4, 5, 10])
def test_interval_agrees_with_scipy_and_statsmodels(n):
    values = np.random.default_rng(n).normal(40, 2, n)
    s = st.summarise(values)
    assert (s.low, s.high) == pytest.approx(stats.t.interval(0.95, n - 1, values.mean(), stats.sem(values)), abs=1e-10)
    assert (s.low, s.high) == pytest.approx(DescrStatsW(values).tconfint_mean(), abs=1e-10)


def test_two_values_have_a_deviation_but_no_interval_and_one_has_neither():
    two, one = st.summarise([1.0, 2.0]), st.summarise([1.0])
    assert two.sd == pytest.approx(math.sqrt(0.5)) and two.low is None and two.reason == "n < 3"
    assert one.sd is None and one.low is None


def test_equal_values_give_no_interval():
    s = st.summarise([0.1 + 0.2, 0.3, 0.3])
    assert s.sd == 0 and s.low is None and s.reason == "no spread over seeds"


@pytest.mark.parametrize("bad", [[], [1.0, math.nan, 2.0], [1.0, math.inf, 2.0]])
def test_values_that_are_no_numbers_are_refused(bad):
    with pytest.raises(ValueError, match=r"no values|not finite"):
        st.summarise(bad)


def test_pairs_use_shared_seeds_only():
    s = st.paired_by_seed({0: 5.0, 1: 7.0, 2: 9.0, 7: 100.0}, {2: 6.0, 1: 5.0, 0: 4.0, 8: -100.0})
    assert s is not None and (s.n, s.mean, s.sd) == (3, 2.0, 1.0)
    assert st.paired_by_seed({0: 1.0}, {1: 1.0}) is None


def test_paired_interval_agrees_with_scipys_paired_test():
    a, b = np.random.default_rng(0).normal(50, 2, (2, 6))
    s = st.paired_by_seed(dict(enumerate(a)), dict(enumerate(b)))
    twin = stats.ttest_rel(a, b).confidence_interval(0.95)
    assert (s.low, s.high) == pytest.approx((twin.low, twin.high), abs=1e-10)


def test_binomial_stderr_by_hand():
    assert st.binomial_stderr(0.2, 100) == pytest.approx(0.04)
    with pytest.raises(ValueError, match="not an accuracy"):
        st.binomial_stderr(43.3, 164)


# -- problems


def test_mcnemar_by_hand_and_against_statsmodels():
    a, b = np.array([1] * 8 + [0] * 2 + [1] * 20), np.array([0] * 8 + [1] * 2 + [1] * 20)
    result = st.mcnemar_exact(a, b)
    assert (result.gained, result.lost) == (8, 2)
    assert result.p_value == pytest.approx(2 * (1 + 10 + 45) / 1024)  # P(X <= 2) twice, X ~ Binomial(10, 1/2)
    assert result.p_value == pytest.approx(mcnemar([[20, 8], [2, 0]], exact=True).pvalue)
    assert st.mcnemar_exact([1, 0], [1, 0]).p_value == 1.0
    with pytest.raises(ValueError, match="0 or 1"):
        st.mcnemar_exact([0.5], [1])


def test_textbook_bootstrap_agrees_with_scipy():
    rng = np.random.default_rng(3)
    a, b = (rng.random(300) < 0.5).astype(float), (rng.random(300) < 0.45).astype(float)
    ours = st.paired_bootstrap(a, b, generator(0, "t"), pseudo=0, resamples=20_000)
    twin = stats.bootstrap((a - b,), np.mean, n_resamples=20_000, method="percentile", rng=rng, batch=2000)
    assert ours.mean == pytest.approx((a - b).mean(), abs=1e-12)
    assert (ours.low, ours.high) == pytest.approx(tuple(twin.confidence_interval), abs=0.004)
    assert ours.stderr == pytest.approx(twin.standard_error, rel=0.03)


def test_bootstrap_on_values_that_are_not_outcomes_agrees_with_scipy():
    a, b = np.random.default_rng(4).gamma(2, 1, (2, 80))
    ours = st.paired_bootstrap(a, b, generator(0, "t"), pseudo=0, resamples=20_000)
    twin = stats.bootstrap((a - b,), np.mean, n_resamples=20_000, method="percentile", rng=np.random.default_rng(0))
    assert (ours.low, ours.high) == pytest.approx(tuple(twin.confidence_interval), abs=0.02)
    with pytest.raises(ValueError, match="pseudo=0"):
        st.paired_bootstrap(a, b, generator(0, "t"))


def test_stratified_bootstrap_by_hand():
    """Task x: all 10 problems gained; task y: 90 unchanged. Nothing varies within a task: the textbook interval has no width."""
    a, b = np.array([1.0] * 10 + [0.0] * 90), np.zeros(100)
    strata = ["x"] * 10 + ["y"] * 90
    macro = st.paired_bootstrap(a, b, generator(0, "t"), strata, pseudo=0, resamples=200)
    micro = st.paired_bootstrap(a, b, generator(0, "t"), strata, "micro", pseudo=0, resamples=200)
    assert (macro.mean, macro.low, macro.high) == pytest.approx((0.5, 0.5, 0.5))
    assert (micro.mean, micro.low, micro.high) == pytest.approx((0.1, 0.1, 0.1))
    whole = st.paired_bootstrap(a, b, generator(0, "t"), pseudo=0, resamples=200)
    assert whole.mean == pytest.approx(0.1) and whole.high - whole.low > 0.05


def test_bootstrap_does_not_depend_on_the_order_of_problems():
    a, b = np.random.default_rng(5).integers(0, 2, (2, 60)).astype(float)
    strata = np.array(list("xyz") * 20)
    order = np.random.default_rng(6).permutation(60)
    one = st.paired_bootstrap(a, b, generator(1, "t"), list(strata), resamples=500)
    two = st.paired_bootstrap(a[order], b[order], generator(1, "t"), list(strata[order]), resamples=500)
    assert (one.low, one.high, one.mean) == pytest.approx((two.low, two.high, two.mean), abs=1e-12)


def test_no_discordant_problem_is_no_proof_on_a_small_benchmark():
    same = np.ones(20)
    assert st.paired_bootstrap(same, same, generator(0, "t"), pseudo=0).low == 0  # the textbook bootstrap is blind
    small = st.paired_bootstrap(same, same, generator(0, "t"))
    assert small.mean == 0 and small.low < -0.01 < 0.01 < small.high
    large = st.paired_bootstrap(np.ones(2000), np.ones(2000), generator(0, "t"))
    assert large.low > -0.01


# -- several tasks


def test_iqm_by_hand():
    assert st.iqm([0, 1, 2, 3, 4, 5, 6, 700]) == 3.5  # two of eight cut off at either end: 2, 3, 4, 5
    assert st.iqm(np.array([[9.0, 1.0], [2.0, 3.0]])) == 2.5


def test_iqm_interval_is_stratified_by_task():
    scores = np.tile([10.0, 20.0, 30.0, 40.0], (5, 1))  # runs do not differ, tasks do: resampling within tasks changes nothing
    assert st.iqm_interval(scores, generator(0, "iqm"), 500) == (25.0, 25.0, 25.0)
    noisy = scores + np.random.default_rng(0).normal(0, 1, scores.shape)
    point, low, high = st.iqm_interval(noisy, generator(0, "iqm"), 2000)
    assert low < point < high and high - low < 2
    point, low, high = st.iqm_difference(noisy - 3, noisy, generator(0, "iqm"), 500)
    assert (point, low, high) == pytest.approx((-3, -3, -3))
    with pytest.raises(ValueError, match="seeds >= 3"):
        st.iqm_interval(scores[:2], generator(0, "iqm"))


# -- power


def test_power_agrees_with_statsmodels():
    twin = TTestPower().power(effect_size=0.7, nobs=12, alpha=0.025, alternative="larger")
    assert power.t_power(0.7, 1.0, 12) == pytest.approx(twin, abs=1e-6)
    for mean, sd in ((0.1, 1.0), (-0.5, 1.2), (-1.6, 0.9)):
        exact = TTestPower().solve_power(effect_size=abs(mean + 1) / sd, alpha=0.025, power=0.8, alternative="larger")
        assert power.seeds_to_settle(mean, sd, 1.0) == math.ceil(exact)


def test_nothing_settles_a_difference_at_the_margin():
    assert power.seeds_to_settle(-1.0, 1.0, 1.0) is None
    assert power.seeds_to_settle(-0.999, 1.0, 1.0) is None  # more than ten thousand seeds
    assert power.seeds_to_settle(0.0, None, 1.0) is None


def test_problems_to_settle_by_hand():
    d = st.Difference(100, 0.0, -0.05, 0.05, (st.Stratum(1.0, 100, squares=0.02**2 * 100**2),))
    assert d.stderr == pytest.approx(0.02)
    assert power.problems_to_settle(d, 0.01) == math.ceil(100 * ((1.959964 + 0.841621) * 2) ** 2)


def test_problems_to_settle_without_discordant_problems_is_what_the_bootstrap_needs():
    """Imaginary outcomes do not grow with the benchmark: a few hundred equal answers settle it, as the bootstrap itself says."""
    same = np.ones(20)
    needed = power.problems_to_settle(st.paired_bootstrap(same, same, generator(0, "t")), 0.01)
    assert 400 < needed < 600
    assert st.paired_bootstrap(np.ones(needed), np.ones(needed), generator(0, "t")).low > -0.01


def test_expanded_bootstrap_covers_like_a_t_interval_on_few_values():
    rng, covered = generator(0, "few"), 0
    for draw in rng.normal(0, 1, (600, 8)):
        d = st.paired_bootstrap(draw, np.zeros(8), rng, pseudo=0, expand=True, resamples=1000)
        covered += d.low <= 0 <= d.high
    assert 0.92 <= covered / 600 <= 0.98
    with pytest.raises(ValueError, match="2 problems give no interval"):
        st.paired_bootstrap([1.0, 2.0], [0.0, 0.0], rng, pseudo=0, expand=True)


# -- verdict


@pytest.mark.parametrize(
    ("low", "high", "kind", "lower"),
    [
        (-0.99, 0.5, NO_WORSE, False),
        (-0.9, -0.1, NO_WORSE, True),
        (-1.0, 0.5, CANNOT_TELL, False),
        (-1.5, -0.1, CANNOT_TELL, True),
        (-1.5, -1.0, CANNOT_TELL, True),
        (-2.0, -1.01, WORSE, True),
        (None, None, NO_VERDICT, False),
    ],
)
def test_verdict_on_intervals(low, high, kind, lower):
    v = judge(low, high, 1.0)
    assert (v.kind, v.measurably_lower, v.measurably_better) == (kind, lower, False)


def test_an_interval_above_zero_is_measurably_better_and_words_can_be_chosen():
    better = judge(0.1, 0.9, 1.0)
    assert (better.kind, better.measurably_lower, better.measurably_better) == (NO_WORSE, False, True)
    assert not judge(0.0, 0.9, 1.0).measurably_better and not judge(-0.9, 0.0, 1.0).measurably_lower
    assert judge(-0.9, -0.1, 1.0).text("full", lower="worse").endswith("within the margin, but measurably worse")
    assert judge(-1.5, -0.1, 1.0).text("full", lower="worse") == "cannot tell, measurably worse"


def test_a_margin_of_nothing_is_refused():
    for margin in (0, -1, math.nan):
        with pytest.raises(ValueError, match="above 0"):
            judge(-0.1, 0.1, margin)


def test_open_verdicts_name_what_would_settle_them():
    v = judge_seeds(st.summarise([0.9, -1.2, 0.6]), 1.0)
    assert v.kind == CANNOT_TELL and v.needed == power.seeds_to_settle(0.1, float(np.std([0.9, -1.2, 0.6], ddof=1)), 1.0) > 3
    assert f"about {v.needed} seeds would settle it" in v.text("full")
    p = judge_problems(st.Difference(164, 0.0, -0.03, 0.03, (st.Stratum(1.0, 164, 0.015**2 * 164**2),)), 0.01)
    assert p.kind == CANNOT_TELL and p.needed == 2897 and p.needed_of == "problems"  # 164 * (2.801585 * 1.5) ** 2 = 2896.2
    assert judge_seeds(st.summarise([1.0, 1.0, 1.0]), 1.0).text("full") == "no verdict (no spread over seeds)"
    assert judge_seeds(None, 1.0).kind == NO_VERDICT


# -- case 20


def test_case_20_every_number(table, expected):
    for key, want in expected["table"].items():
        cell = table.cells[tuple(key.split("/"))]
        got = cell.summary
        assert (got.n, round(got.mean, 4), round(got.sd, 4)) == (want["n"], want["mean"], want["sd"]), key
        assert [round(got.low, 4), round(got.high, 4)] == want["ci95"], key
        pair = want.get("paired_difference_to_full")
        assert (pair is None) == (cell.paired is None), key
        if pair:
            assert (cell.paired.n, round(cell.paired.mean, 4)) == (pair["n"], pair["mean"]), key
            assert [round(cell.paired.low, 4), round(cell.paired.high, 4)] == pair["ci95"], key
            assert cell.verdict.label("full") == pair["verdict"], key
            assert cell.verdict.measurably_lower == pair["interval_below_zero"], key
    assert len(table.cells) == len(expected["table"])
    assert table.margin == expected["margin_points"]


def test_case_20_flags(table, expected):
    assert len(table.flags) == len(expected["flags"])
    for got, want in zip(
        sorted(table.flags, key=lambda f: f.kind), sorted(expected["flags"], key=lambda f: f["kind"]), strict=True
    ):
        assert (got.kind, got.method, got.seed, got.benchmark) == (
            want["kind"],
            want["method"],
            want["seed"],
            want.get("benchmark", ""),
        )
        assert list(got.values) == want.get("values", [])


def test_case_20_conflict_is_never_averaged_and_not_final_until_chosen(expected):
    rows = read_results_csv(CASE / "results.csv")
    for given in (rows, rows[::-1]):  # neither "last wins" nor "first wins"
        table = lost_nothing_table(given, "full", 1.0)
        cell = table.cells["humaneval", "cluster"]
        assert not table.final and cell.summary.n == 4 and cell.verdict.kind == NO_VERDICT
        assert round(cell.summary.mean, 4) != expected["wrong"]["cluster_humaneval_mean_if_all_six_rows_are_averaged"]
        assert "NOT FINAL" in table.to_text() and "run-cluster-1-old has 55" in table.to_text()
    other = lost_nothing_table(rows, "full", 1.0, choices=["run-cluster-1-old"])
    assert other.final and other.scores["humaneval", "cluster"][1] == pytest.approx(100 * 55 / 164)
    with pytest.raises(ValueError, match="not among the results"):
        lost_nothing_table(rows, "full", choices=["run-cluster-9"])


def test_case_20_deviation_has_ddof_one(table, expected):
    assert round(table.cells["humaneval", "cluster"].summary.sd, 4) != expected["wrong"]["sd_with_ddof0"]


def test_case_20_text_states_n_verdict_and_both_kinds_of_spread(table):
    text = table.to_text()
    assert table.final and "NOT FINAL" not in text and "**" not in text  # nowhere does the best interval exclude the others
    assert "| mbpp | less | 4 | 50.13 | 0.34 | [49.59, 50.68] | 2.57 | -0.53 [-0.87, -0.19] (n 4) | no worse than full" in text
    assert "no worse than full (margin 1.0): within the margin, but measurably lower" in text
    assert "less, seed 3: no run" in text and "random, seed 2, mbpp: the score is not a number" in text
    assert json.loads(json.dumps(table.to_json()))["table"]["mbpp/less"]["verdict"]["measurably_lower"] is True


def _rows(method: str, values: list[float], benchmark: str = "b") -> list[Observation]:
    return [Observation(method, s, benchmark, v, f"{method}-{s}") for s, v in enumerate(values)]


def test_fewer_than_three_seeds_have_no_interval_and_no_verdict():
    table = lost_nothing_table(_rows("full", [50.0, 51.0]) + _rows("cluster", [50.0, 52.0]), "full")
    cell = table.cells["b", "cluster"]
    assert cell.summary.n == 2 and cell.summary.low is None and cell.paired.low is None and cell.verdict.kind == NO_VERDICT
    assert "none (n < 3)" in table.to_text()


def test_bold_only_where_the_interval_excludes_the_others():
    near = lost_nothing_table(_rows("full", [50, 51, 52]) + _rows("cluster", [51, 52, 53]), "full")
    far = lost_nothing_table(_rows("full", [50, 51, 52]) + _rows("cluster", [71, 72, 73.5]), "full")
    assert not any(c.bold for c in near.cells.values())
    assert [m for (_, m), c in far.cells.items() if c.bold] == ["cluster"]


def test_expected_seeds_catch_a_seed_that_nobody_has():
    rows = _rows("full", [50, 51, 52]) + _rows("cluster", [50, 51, 53])
    flags = lost_nothing_table(rows, "full", expected_seeds=range(4)).flags
    assert [(f.kind, f.method, f.seed) for f in flags] == [("missing_run", "full", 3), ("missing_run", "cluster", 3)]


def test_the_same_score_twice_counts_once_and_a_missing_benchmark_is_flagged():
    rows = [*_rows("full", [50, 51, 52]), Observation("full", 0, "b", 50, "again"), *_rows("full", [1, 2], "c")]
    kept, flags = settle(rows)
    assert len(kept["b", "full"]) == 3
    assert [(f.kind, f.seed, f.benchmark) for f in flags] == [("duplicate_runs", 0, "b"), ("missing_score", 2, "c")]


def test_a_number_and_a_nan_for_one_run_are_a_conflict():
    _, flags = settle([Observation("full", 0, "b", 50, "x"), Observation("full", 0, "b", math.nan, "y")])
    assert flags[0].kind == "conflicting_runs" and flags[0].open


def test_different_problem_counts_cannot_share_a_column():
    with pytest.raises(ValueError, match="500 problems, others on 397"):
        settle([Observation("a", 0, "mbpp", 50, "x", total=397), Observation("b", 0, "mbpp", 50, "y", total=500)])


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("full,0,humaneval,70,164,50.0,r", "results.csv:2: 70 of 164 is not 50.0 points"),
        ("full,zero,humaneval,70,164,42.68,r", "results.csv:2: not a number"),
        ("full,0,humaneval,200,164,,r", "results.csv:2: 200 of 164"),
    ],
)
def test_bad_lines_are_named(tmp_path, line, message):
    path = tmp_path / "results.csv"
    path.write_text("method,seed,benchmark,passed,total,score,run_id\n" + line + "\n")
    with pytest.raises(ValueError, match=message):
        read_results_csv(path)
    path.write_text("method,seed\n")
    with pytest.raises(ValueError, match="benchmark, passed, run_id, score, total are missing"):
        read_results_csv(path)


# -- promises


def test_simulation_in_small():
    spec = importlib.util.spec_from_file_location("verdict_simulation", ROOT / "benchmarks" / "verdict_simulation.py")
    simulation = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = simulation
    spec.loader.exec_module(simulation)
    rng = generator(0, "small simulation")
    rows = [simulation.normal_seeds(5, 1.0, 2000, rng), simulation.count_seeds(3, 164, 0.43, 1000, rng)]
    rows += [simulation.paired_problems(300, 0.02, 500, rng, 1000), simulation.paired_problems(378, 0.1, 500, rng, 1000)]
    assert all(r.kept for r in rows), rows


def test_statistics_import_no_torch():
    code = "import sys, eval.statistics, eval.verdict, eval.settle, eval.seed_table; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False).returncode == 0
