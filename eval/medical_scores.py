"""From lm-eval's samples to metrics: every question once, accuracies with standard errors, averages over tasks and benchmarks.

    samples of one task ► answers ► metric ► averages        answers ► problem_row (one line of problems.jsonl)

acc takes the option of the largest log-likelihood, acc_norm that of the largest per character of the option. No torch.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from clusterft.records import Metric
from eval.errors import EvaluationError
from eval.medical_sources import QuestionSet

SCORES = ("acc", "acc_norm")


@dataclass(frozen=True)
class Answered:
    """One question, one prompt mode."""

    task: str
    mode: str
    problem: str
    scores: Mapping[str, float]
    gold: int
    log_likelihoods: tuple[float, ...]


def names(mode: str) -> tuple[str, ...]:
    """Metric names of a prompt mode."""
    return SCORES if mode == "plain" else tuple(f"{s}_template" for s in SCORES)


def answers_of(questions: QuestionSet, mode: str, samples: Sequence[Mapping[str, Any]]) -> Iterator[Answered]:
    """lm-eval's samples of one task as answers, each question exactly once."""
    by_id = {s["doc_id"]: s for s in samples}
    if len(by_id) != len(questions) or len(samples) != len(questions):
        raise EvaluationError(f"{questions.task.name}: lm-eval answered {len(by_id)} of {len(questions)} questions")
    for i, problem in enumerate(questions.ids):
        sample = by_id[i]
        scores = {name: float(sample[own]) for name, own in zip(names(mode), SCORES, strict=True)}
        likelihoods = tuple(float(r[0]) for r in sample["filtered_resps"])
        if not all(map(math.isfinite, likelihoods)):
            raise EvaluationError(
                f"{questions.task.name}: question {problem} has a log-likelihood that is not finite: {likelihoods}"
            )
        _, _, gold = questions.task.content(questions.rows[i])
        yield Answered(questions.task.name, mode, problem, scores, gold, likelihoods)


def problem_row(a: Answered) -> dict[str, Any]:
    extra = {"mode": a.mode, "gold": a.gold, "log_likelihoods": [round(v, 6) for v in a.log_likelihoods]}
    return {"task": a.task, "problem": a.problem, "scores": dict(a.scores), **extra}


def metric(questions: QuestionSet, name: str, scores: Sequence[float], note: str) -> Metric:
    """Accuracy with its standard error, sd (ddof 1) / sqrt n, as lm-eval gives it."""
    n, mean = len(scores), math.fsum(scores) / len(scores)
    stderr = math.sqrt(math.fsum((s - mean) ** 2 for s in scores) / (n - 1) / n) if n > 1 else None
    return Metric(questions.task.name, name, mean, n, stderr, dataset_hash=questions.dataset_hash, note=note)


def averages(metrics: Sequence[Metric], questions: Mapping[str, QuestionSet]) -> list[Metric]:
    """Over the tasks of one benchmark by size (`mmlu_medical_average`), over benchmarks plainly (`medical_average`).

    The cloze forms are averaged among themselves (`medical_continuation_average`): they ask the same questions in another way.
    """
    out: list[Metric] = []
    for name in dict.fromkeys(m.name for m in metrics):
        by_benchmark: dict[str, list[Metric]] = {}
        for m in metrics:
            if m.name == name:
                by_benchmark.setdefault(questions[m.task].task.benchmark, []).append(m)
        for form in ("", "_continuation"):
            mine = {b: members for b, members in by_benchmark.items() if b.endswith("_continuation") == bool(form)}
            pooled = [_mean(f"{b}_average", members, by_size=True) for b, members in mine.items()]
            out += [p for p, members in zip(pooled, mine.values(), strict=True) if len(members) > 1]
            if len(pooled) > 1:
                out.append(_mean(f"medical{form}_average", pooled, by_size=False))
    return out


def _mean(task: str, members: Sequence[Metric], by_size: bool) -> Metric:
    total = sum(m.n for m in members)
    weights = [m.n / total if by_size else 1 / len(members) for m in members]
    value = math.fsum(w * m.value for w, m in zip(weights, members, strict=True))
    errors = [m.stderr for m in members]
    stderr = None if None in errors else math.sqrt(math.fsum((w * (e or 0)) ** 2 for w, e in zip(weights, errors, strict=True)))
    joined = hashlib.sha256("\n".join(f"{m.task} {m.dataset_hash}" for m in members).encode()).hexdigest()[:16]
    note = f"mean of {', '.join(m.task for m in members)}, weighted by {'size' if by_size else 'nothing'}"
    return Metric(task, members[0].name, min(value, 1.0), total, stderr, dataset_hash=joined, note=note)
