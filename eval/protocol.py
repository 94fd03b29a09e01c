"""Magicoder's evaluation protocol: how a code problem is put to the model, and how its answer becomes a programme.

HumanEval: the instruction is a lead-in and the prompt in a fenced block; the response is prefilled with an open fence and
the prompt, so that the model writes the body. MBPP: the instruction is the description and its assertion; only the fence is
prefilled. Both answers end at the first closing fence; MBPP's is then sanitised by evalplus. The published numbers of these
models were made this way; a chat wrapping that does not prefill loses some 12 points on them (evalplus issue 141).

Source: ise-uiuc/magicoder, experiments/text2code.py. The quoted lead-ins are part of the protocol: a changed word changes scores.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from eval.errors import EvaluationError

FENCE = "```"
TOP_LEVEL = ("\ndef ", "\nclass ", "\nimport ", "\nfrom ", "\nassert ", "\nif __name__", "\nprint(", "\n@")
"""What ends a function body for evalplus's own direct completion: a new statement at the left margin."""

STOPS = {"fence": (FENCE,), "fence_or_toplevel": (FENCE, *TOP_LEVEL)}
"""fence is the published protocol. fence_or_toplevel also ends at the next statement at the left margin: several times faster
for small models, which run on, and more lenient (a broken trailing statement no longer fails the function); stated in every
metric."""


@dataclass(frozen=True)
class Question:
    """What the model is asked: the instruction, and the beginning of its response that is written for it."""

    instruction: str
    prefill: str


def humaneval_question(problem: Mapping[str, Any]) -> Question:
    prompt = problem["prompt"].strip()
    block = f"{FENCE}python\n{prompt}"
    return Question(f"Write a solution to the following problem:\n{block}\n{FENCE}", block)


def mbpp_question(problem: Mapping[str, Any]) -> Question:
    """From the docstring of evalplus's MBPP prompt: description, then the assertion. Raises EvaluationError if it has another
    shape.
    """
    prompt = problem["prompt"]
    start, end = prompt.find('"""'), prompt.rfind('"""')
    text = prompt[start + 3 : end]
    at = text.find("assert")
    if start < 0 or end <= start or at < 0:
        raise EvaluationError(
            f"{problem['task_id']}: its prompt has no docstring with an assertion, so it is not evalplus's MBPP form"
        )
    description = text[:at].strip()
    if not description.endswith("."):
        description += "."
    lead = f"{description} Your code should satisfy the following assertion:"
    return Question(f"{lead}\n{FENCE}python\n{text[at:].strip()}\n{FENCE}", f"{FENCE}python")


def cut(text: str, stop: str) -> str:
    """The text before the first stop string of the rule `stop`; all of it when there is none (an unclosed fence is accepted)."""
    positions = [p for s in STOPS[stop] if (p := text.find(s)) >= 0]
    return text[: min(positions)] if positions else text


def humaneval_solution(problem: Mapping[str, Any], text: str) -> str:
    """Complete programme from the generated text (already cut): evalplus puts the original prompt before the completion."""
    return problem["prompt"] + text


def mbpp_solution(problem: Mapping[str, Any], text: str) -> str:
    """Complete programme from the generated text (already cut), sanitised by evalplus: prose and print calls go, the function
    stays.
    """
    from evalplus.sanitize import sanitize

    return sanitize(text, problem["entry_point"])
