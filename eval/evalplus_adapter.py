"""Scoring with evalplus's own machinery, without its known faults, inside the sandbox.

In go a `ProblemSet` and one solution a problem; out comes one `Verdict` a problem. What is evalplus's: expected outputs from the
reference solution, comparison with its tolerances and oracles, time limits a test. What is ours around it: the sandbox, the outer
wall clock, no results file that could be stale, missing problems named and scored as failed, and two mends for version 0.3.1:

- HumanEval/32 (`find_zero`) can never pass there: its oracle leaves the list of passed tests empty. Here the same check,
  |p(root)| <= tolerance with evalplus's own polynomial, is asked as an ordinary question whose right answer is True
  (`mend_problem`).
- The smallest time limit is 4 s as in later versions, not 1 s: a busy machine must not fail a right solution.

`check_harness` runs every reference solution through all of it and refuses a harness that fails one.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from eval.errors import EvaluationError
from eval.problem_set import Problem, ProblemSet
from eval.sandbox import Sandbox

EVALPLUS_VERSION = "0.3.1"
MIN_TIME_LIMIT_SECONDS = 4.0
_UNSUPPORTED_VARIABLES = {
    "EVALPLUS_TIMEOUT_PER_TASK": "evalplus 0.3.1 crashes on it; the limits are in the evaluator's `limits`",
    "EVALPLUS_MAX_MEMORY_BYTES": "set the evaluator's limits.memory_gib instead",
    "HUMANEVAL_OVERRIDE_PATH": "name the file in the evaluator's problems_file",
    "MBPP_OVERRIDE_PATH": "name the file in the evaluator's problems_file",
}
_MENDED_ENTRY = "root_is_right_"


@dataclass(frozen=True)
class Verdict:
    """What became of one solution. base and plus are pass, fail, timeout, killed, missing; plus is None where it was not run."""

    task_id: str
    base: str
    plus: str | None
    reason: str = ""

    @property
    def passed_base(self) -> bool:
        return self.base == "pass"

    @property
    def passed_plus(self) -> bool:
        """As evalplus counts: base and extra inputs both passed."""
        return self.base == "pass" and self.plus == "pass"


def check_environment() -> None:
    """Raises EvaluationError for another evalplus, or a variable that it would read wrongly or that would be ignored here."""
    found = version("evalplus")
    if found != EVALPLUS_VERSION:
        raise EvaluationError(
            f"evalplus {found} is installed, but scores are pinned to {EVALPLUS_VERSION}: install evalplus=={EVALPLUS_VERSION}"
        )
    for name, remedy in _UNSUPPORTED_VARIABLES.items():
        if name in os.environ:
            raise EvaluationError(f"the environment sets {name}={os.environ[name]!r}, which is not supported: unset it; {remedy}")


def mend_problem(problem: Mapping[str, Any]) -> tuple[Problem, Callable[[str], str]]:
    """(the problem as it is asked, what to do with each solution): the identity, but for `find_zero`."""
    if problem["entry_point"] != "find_zero":
        return dict(problem), lambda solution: solution
    tolerance = problem["atol"] or 1e-4
    wrapper = (
        f"\n\ndef {_MENDED_ENTRY}(xs):\n"
        "    from evalplus.eval._special_oracle import _poly\n"
        f"    return bool(abs(_poly(xs, find_zero(list(xs)))) <= {tolerance!r})\n"
    )
    mended = {**problem, "entry_point": _MENDED_ENTRY, "canonical_solution": problem["canonical_solution"] + wrapper}
    return mended, lambda solution: solution + wrapper


def score(
    problems: ProblemSet, solutions: Mapping[str, str], sandbox: Sandbox, progress: Callable[[str], None] = lambda task_id: None
) -> list[Verdict]:
    """One verdict a problem, in the set's order. A problem without a solution is `missing` and failed.

    solutions: task id -> complete programme (prompt included). Raises EvaluationError when a solution's id is unknown or a
    reference solution fails on its own inputs.
    """
    unknown = sorted(set(solutions) - {p["task_id"] for p in problems.problems})
    if unknown:
        raise EvaluationError(f"solutions name {len(unknown)} problems that the set lacks, for example {unknown[0]}")
    verdicts: dict[str, Verdict] = {}
    for task_id, result in sandbox.run(_jobs(problems, solutions)):
        verdicts[task_id] = _verdict(task_id, result)
        progress(task_id)
    return [verdicts.get(p["task_id"]) or Verdict(p["task_id"], "missing", None, "no solution given") for p in problems.problems]


def _jobs(problems: ProblemSet, solutions: Mapping[str, str]) -> Iterator[dict[str, Any]]:
    for problem in problems.problems:
        if problem["task_id"] not in solutions:
            continue
        asked, dress = mend_problem(problem)
        yield {
            "id": problem["task_id"],
            "kind": "check",
            "dataset": problems.dataset,
            "problem": asked,
            "solution": dress(solutions[problem["task_id"]]),
            "with_plus": problems.has_plus,
            "min_time_limit": MIN_TIME_LIMIT_SECONDS,
        }


def _verdict(task_id: str, result: Mapping[str, Any]) -> Verdict:
    if "error" in result:
        raise EvaluationError(
            f"{task_id}: the reference solution could not be run ({result['error']}); the problem file is damaged"
        )
    if "killed" in result:
        return Verdict(task_id, "killed", None, result["killed"])
    reason = "" if result["failed_input"] is None else f"input {result['failed_input']}"
    return Verdict(task_id, result["base"], result["plus"], reason)


def check_harness(problems: ProblemSet, sandbox: Sandbox, cache_dir: Path) -> str:
    """Every reference solution must pass. Remembered by hash of problems and harness. Returns a note for metrics.

    Raises EvaluationError that names the failing ones.
    """
    key = hashlib.sha256(json.dumps([problems.hash, _harness(sandbox)]).encode()).hexdigest()[:16]
    marker = cache_dir / f"harness-{problems.dataset}-{key}.json"
    if not marker.is_file():
        references = {p["task_id"]: p["prompt"] + p["canonical_solution"] for p in problems.problems}
        verdicts = score(problems, references, sandbox)
        failed = [v for v in verdicts if not (v.passed_plus if problems.has_plus else v.passed_base)]
        if failed:
            named = ", ".join(f"{v.task_id} ({v.base}/{v.plus} {v.reason})" for v in failed[:5])
            raise EvaluationError(
                f"the harness fails {len(failed)} of {len(verdicts)} reference solutions: {named}; with such a harness no "
                "score can be believed: lower `parallel` if the machine is busy, or raise limits"
            )
        cache_dir.mkdir(parents=True, exist_ok=True)
        marker.write_text(
            json.dumps({"problems": problems.hash, "n": len(verdicts), "harness": _harness(sandbox)}), encoding="utf-8"
        )
    mended = any(p["entry_point"] == "find_zero" for p in problems.problems)
    return f"evalplus {EVALPLUS_VERSION}, min time limit {MIN_TIME_LIMIT_SECONDS:g} s" + (
        ", HumanEval/32 oracle mended" if mended else ""
    )


def _harness(sandbox: Sandbox) -> list[Any]:
    """What may change a reference's verdict."""
    python = ".".join(map(str, sys.version_info[:3]))
    return [EVALPLUS_VERSION, version("numpy"), python, MIN_TIME_LIMIT_SECONDS, sandbox.note, repr(sandbox.limits), "mend-1"]


def samples_of(problems: ProblemSet, rows: Sequence[Mapping[str, Any]], source: str) -> dict[str, str]:
    """Solutions from rows in evalplus's sample form: task_id with `solution` (complete) or `completion` (after the prompt).

    Raises EvaluationError for a row of neither form, an unknown problem, or two rows of one problem (greedy pass@1 has one).
    """
    prompts = {p["task_id"]: p["prompt"] for p in problems.problems}
    solutions: dict[str, str] = {}
    for number, row in enumerate(rows, 1):
        task_id = row.get("task_id")
        if not isinstance(task_id, str) or task_id not in prompts:
            raise EvaluationError(
                f"{source}, line {number}: problem {task_id!r} is not one of the {len(prompts)} that are scored"
            )
        if task_id in solutions:
            raise EvaluationError(f"{source}, line {number}: a second sample for {task_id}; greedy pass@1 takes one")
        if not isinstance(row.get("solution", row.get("completion")), str):
            raise EvaluationError(f"{source}, line {number}: neither a text `solution` nor a text `completion`")
        solutions[task_id] = row["solution"] if "solution" in row else prompts[task_id] + row["completion"]
    return solutions
