"""HumanEval and MBPP, with their extra inputs (HumanEval+, MBPP+) where the problem file has them.

HumanEval comes from the PyPI package unpacked in the assets folder unless `problems_file` names evalplus's file. MBPP always
needs `problems_file`. What is missing is said in preflight, with the command that fetches it on a connected machine.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from eval import protocol
from eval.code import CodeEvaluator
from eval.errors import EvaluationError
from eval.prefetch import check_manifest
from eval.problem_set import Problem, ProblemSet, load_override, load_package
from eval.protocol import Question
from eval.sandbox import Sandbox


class HumanEval(CodeEvaluator):
    """164 problems (or a stated subset). See CodeEvaluator for the parameters."""

    task = "humaneval"
    dataset = "humaneval"

    def load(self, sandbox: Sandbox) -> ProblemSet:
        if self.problems_file is None:
            return load_package(Path(self.context.assets_dir), self.cache_dir, sandbox)
        return load_local(self.problems_file, self.dataset, "humaneval_plus")

    def question(self, problem: Problem) -> Question:
        return protocol.humaneval_question(problem)

    def solution(self, problem: Problem, text: str) -> str:
        return protocol.humaneval_solution(problem, text)


class MBPP(CodeEvaluator):
    """evalplus's MBPP: 378 problems in v0.2.0, 399 in v0.1.0, which must not be compared. See CodeEvaluator for the
    parameters.
    """

    task = "mbpp"
    dataset = "mbpp"

    def __init__(self, **parameters: Any) -> None:
        super().__init__(**parameters)
        if self.stop != "fence":
            raise EvaluationError(
                f"mbpp: stop {self.stop!r} would cut the function itself, which begins at the left margin; use fence"
            )

    def load(self, sandbox: Sandbox) -> ProblemSet:
        if self.problems_file is None:
            raise EvaluationError(
                "mbpp: problems_file is not set; on a connected machine run `python -m eval.prefetch mbpp_plus` and name the file"
            )
        return load_local(self.problems_file, self.dataset, "mbpp_plus")

    def question(self, problem: Problem) -> Question:
        return protocol.mbpp_question(problem)

    def solution(self, problem: Problem, text: str) -> str:
        return protocol.mbpp_solution(problem, text)


def load_local(path: Path, dataset: str, name: str) -> ProblemSet:
    """Problems from a local file, checked against the manifest beside it. Raises FileNotFoundError with the command that
    fetches it.
    """
    if not path.is_file():
        raise FileNotFoundError(
            f"{path} is not there; on a machine with network run `python -m eval.prefetch {name} --to {path.parent}`, "
            "then copy the folder here"
        )
    check_manifest(path)
    return load_override(path, dataset)
