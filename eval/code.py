"""What all code benchmarks share: ask, generate, score in the sandbox, summarise.

    problems ► questions ► prompt ids ► texts (resumable) ► programmes ► verdicts ► Metric

A benchmark is a subclass that says where its problems come from and how a question is put (`eval.humaneval`). Files under
out_dir:

    generated-<rank>.jsonl   texts as the model wrote them, up to the stop; resumable
    samples.jsonl            complete programmes in evalplus's sample form; `evalplus.evaluate` reads it
    per_problem.jsonl        {"task", "id", "value" 0 or 1, "base", "plus", "reason", "finish", "n_tokens"} for paired comparisons
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from clusterft.distributed import Dist, single_process
from clusterft.interfaces import EvalContext
from clusterft.progress import PassProgress
from clusterft.records import Metric
from eval import loading
from eval.errors import EvaluationError
from eval.evalplus_adapter import Verdict, check_environment, check_harness, score
from eval.generated_store import GeneratedStore
from eval.generation import Generated, Generator, Prompt
from eval.jail import Limits
from eval.problem_set import Problem, ProblemSet, take_subset
from eval.protocol import STOPS, Question
from eval.sandbox import MODES, Sandbox


class CodeEvaluator:
    """Greedy pass@1 on code problems.

    problems_file   local file in evalplus's override form, or None where a benchmark has a source of its own
    subset          None, or a rule that looks at the problems only; see problem_set.take_subset
    max_new_tokens  at most so many new tokens a problem; batch_size: problems generated at once
    stop            fence (the published protocol) | fence_or_toplevel; see protocol.STOPS
    sandbox         require | best_effort; limits: fields of jail.Limits that differ from their defaults
    parallel        problems scored at once, None for as many as the context's threads
    cache_dir       recorded inputs and harness checks; None for the user's cache folder
    dist            given when several processes evaluate together: each generates its share, the main one scores
    """

    task = ""
    dataset = ""
    sharded = True

    def __init__(
        self,
        *,
        context: EvalContext,
        problems_file: str | None = None,
        subset: Mapping[str, Any] | None = None,
        max_new_tokens: int = 512,
        batch_size: int = 16,
        stop: str = "fence",
        sandbox: str = "require",
        limits: Mapping[str, Any] | None = None,
        parallel: int | None = None,
        cache_dir: str | None = None,
        dist: Dist | None = None,
    ) -> None:
        if stop not in STOPS:
            raise EvaluationError(f"{self.task}: stop {stop!r} is not one of {', '.join(STOPS)}")
        if sandbox not in MODES:
            raise EvaluationError(f"{self.task}: sandbox {sandbox!r} is not one of {', '.join(MODES)}")
        self.context, self.subset, self.stop, self.sandbox = context, subset, stop, sandbox
        self.problems_file = Path(problems_file) if problems_file else None
        self.max_new_tokens, self.batch_size = max_new_tokens, batch_size
        self.limits = Limits(**(limits or {}))
        self.parallel = parallel or max(1, context.threads)
        self.cache_dir = Path(cache_dir) if cache_dir else user_cache()
        self.dist = dist or context.dist or single_process(context.device)

    def question(self, problem: Problem) -> Question:
        raise NotImplementedError

    def solution(self, problem: Problem, text: str) -> str:
        raise NotImplementedError

    def load(self, sandbox: Sandbox) -> ProblemSet:
        """The problems, before the subset is taken. Raises EvaluationError or FileNotFoundError with the command that fetches
        them.
        """
        raise NotImplementedError

    def preflight(self) -> None:
        """Everything that can be wrong without a model: versions, variables, data, sandbox, harness. Seconds; remembered by
        hash.
        """
        check_environment()
        with self._sandbox() as sandbox:
            self._ready(sandbox)

    def _sandbox(self) -> Sandbox:
        return Sandbox(self.sandbox, self.parallel, self.limits)

    def _ready(self, sandbox: Sandbox) -> tuple[ProblemSet, str]:
        problems = take_subset(self.load(sandbox), self.subset)
        for problem in problems.problems:
            self.question(problem)
        return problems, check_harness(problems, sandbox, self.cache_dir)

    def evaluate(self, checkpoint_dir: Path, out_dir: Path) -> list[Metric]:
        """Generates and scores; see the module's tour for the files. Every rank gets the metrics."""
        check_environment()
        out_dir.mkdir(parents=True, exist_ok=True)
        with self._sandbox() as sandbox:
            if not self.dist.is_main:
                self.dist.barrier()  # the main rank records inputs and checks the harness; the others find both done
            problems, harness = self._ready(sandbox)
            if self.dist.is_main:
                self.dist.barrier()
            texts = self._generate(problems, checkpoint_dir, out_dir)
            metrics: list[Metric] = []
            if self.dist.is_main:
                solutions = {p["task_id"]: self.solution(p, texts[p["task_id"]].text) for p in problems.problems}
                _write_jsonl(out_dir / "samples.jsonl", [{"task_id": i, "solution": s} for i, s in solutions.items()])
                verdicts = score(problems, solutions, sandbox)
                write_verdicts(out_dir / "per_problem.jsonl", self.task, verdicts, texts, problems.has_plus)
                metrics = summarise(self.task, problems, verdicts, self._note(problems, harness, sandbox))
        return self.dist.broadcast_object(metrics)

    def _note(self, problems: ProblemSet, harness: str, sandbox: Sandbox) -> str:
        dtype = str(loading.weights_dtype(self.context.precision)).removeprefix("torch.")
        parts = [
            "greedy",
            f"{self.context.template} template",
            f"{dtype} weights",
            f"stop at {self.stop}",
            f"max {self.max_new_tokens} new tokens",
            problems.source,
            problems.subset,
            harness,
            sandbox.note,
        ]
        return "; ".join(p for p in parts if p)

    def _generate(self, problems: ProblemSet, checkpoint_dir: Path, out_dir: Path) -> dict[str, Generated]:
        tokenizer = self._tokenizer(checkpoint_dir)
        prompts = [Prompt(p["task_id"], self._prompt_ids(tokenizer, p)) for p in problems.problems]
        store = GeneratedStore(out_dir, self._key(checkpoint_dir, prompts), self.dist.rank)
        done = set(self.dist.broadcast_object(sorted(store.read())))
        mine = sorted(prompts, key=lambda p: (len(p.ids), p.id))[self.dist.rank :: self.dist.world]
        if any(p.id not in done for p in mine):
            self._generate_missing(mine, done, checkpoint_dir, store)
        self.dist.barrier()
        return store.read()

    def _generate_missing(
        self, prompts: Sequence[Prompt], done: Collection[str], checkpoint_dir: Path, store: GeneratedStore
    ) -> None:
        with loading.threads(self.context.threads):
            model, tokenizer = loading.load(checkpoint_dir, self.context, loading.weights_dtype(self.context.precision))
            generator = Generator(
                model, tokenizer, max_new_tokens=self.max_new_tokens, batch_size=self.batch_size, stops=STOPS[self.stop]
            )
            missing = sum(p.id not in done for p in prompts)
            with PassProgress(self.task, missing, None, shown=self.context.progress, unit="problems") as bar:

                def on_done(generated: Generated) -> None:
                    store.append(generated)
                    bar.advance(1)

                generator.run(prompts, on_done, done)

    def _tokenizer(self, checkpoint_dir: Path) -> Any:
        from transformers import AutoTokenizer

        return AutoTokenizer.from_pretrained(
            checkpoint_dir, trust_remote_code=bool(self.context.model.trust_remote_code), local_files_only=True
        )

    def _prompt_ids(self, tokenizer: Any, problem: Problem) -> list[int]:
        from clusterft.prompting import generation_prompt

        question = self.question(problem)
        return [
            int(i) for i in generation_prompt(self.context.template, tokenizer, question.instruction, prefill=question.prefill)
        ]

    def _key(self, checkpoint_dir: Path, prompts: Sequence[Prompt]) -> str:
        """Everything that decides a text. How prompts are put into batches does so only where rounding depends on it."""
        facts = [
            loading.checkpoint_fingerprint(checkpoint_dir),
            self.context.precision,
            self.context.model.attention,
            self.max_new_tokens,
            self.stop,
            {p.id: list(p.ids) for p in prompts},
            None if self.context.precision == "float32" else [self.batch_size, self.dist.world],
        ]
        return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:16]


def user_cache() -> Path:
    """The user's cache folder for evaluation."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "clusterft" / "eval"


def summarise(task: str, problems: ProblemSet, verdicts: Sequence[Verdict], note: str) -> list[Metric]:
    """pass@1 on base inputs, and on base and extra inputs under the name `<task>_plus` where the set has extra inputs."""
    stopped = [v for v in verdicts if v.base in ("timeout", "killed", "missing")]
    if stopped:
        note += "; " + ", ".join(f"{sum(v.base == k for v in stopped)} {k}" for k in sorted({v.base for v in stopped}))
    metrics = [pass_at_1(task, [v.passed_base for v in verdicts], problems, note)]
    if problems.has_plus:
        metrics.append(pass_at_1(f"{task}_plus", [v.passed_plus for v in verdicts], problems, note))
    return metrics


def pass_at_1(task: str, passed: Sequence[bool], problems: ProblemSet, note: str) -> Metric:
    """The share that passed, with its binomial standard error."""
    n, value = len(passed), sum(passed) / len(passed)
    return Metric(task, "pass@1", value, n, math.sqrt(value * (1 - value) / n), "fraction", problems.hash, note)


def write_verdicts(path: Path, task: str, verdicts: Sequence[Verdict], texts: Mapping[str, Generated], has_plus: bool) -> None:
    rows = []
    for v in verdicts:
        row: dict[str, Any] = {"task": task, "id": v.task_id, "value": int(v.passed_base)}
        row |= {"base": v.base, "plus": v.plus, "reason": v.reason}
        if has_plus:
            row["value_plus"] = int(v.passed_plus)
        if v.task_id in texts:
            row |= {"finish": texts[v.task_id].finish, "n_tokens": texts[v.task_id].n_tokens}
        rows.append(row)
    _write_jsonl(path, rows)


def _write_jsonl(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    part = path.with_name(path.name + ".part")
    part.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    part.replace(path)
