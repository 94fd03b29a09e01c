"""Per-problem results on disk, and reading them back whoever wrote them.

    problems.jsonl      {"task": "medmcqa", "problem": "…", "scores": {"acc": 1.0}, ...}          any evaluator
    per_problem.jsonl   {"id": "HumanEval/0", "value": 1, "value_plus": 0, ...}                   code; the folder names the task
    per_row.jsonl       {"id": "…", "family": "…", "nats": 12.5, "n_tokens": 10, ...}             held-out loss

Further keys are for people. `read_problems` collects every such file below a run directory. Scores are in the unit of the Metric
of the same task and name, and their plain mean is that metric: so two runs can be compared problem by problem. No torch.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

FILE_NAME = "problems.jsonl"

Problems = dict[tuple[str, str], dict[str, float]]
"""(task, metric name) -> problem id -> score."""


def write_problems(out_dir: Path, rows: Iterable[Mapping[str, Any]]) -> Path:
    """Writes `problems.jsonl` in one stroke: a reader never sees half of it. Raises ValueError for a repeated problem."""
    out_dir.mkdir(parents=True, exist_ok=True)
    lines, seen = [], set()
    for row in rows:
        key = (row["task"], row["problem"], *sorted(row["scores"]))
        if key in seen:
            raise ValueError(f"{row['task']}: problem {row['problem']!r} occurs twice")
        seen.add(key)
        lines.append(json.dumps(row, ensure_ascii=False, allow_nan=False))
    path = out_dir / FILE_NAME
    part = path.with_name(f".{FILE_NAME}.part")
    part.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    os.replace(part, path)
    return path


def read_problems(folder: Path) -> Problems:
    """All per-problem scores below `folder`.

    Raises ValueError naming file and line for a row that cannot be read, a score that is not finite, or one that is there twice.
    """
    found: Problems = {}
    for path in sorted(folder.rglob(FILE_NAME)):
        for line, row in _rows(path):
            for name, score in _field(path, line, row, "scores").items():
                _put(found, (_field(path, line, row, "task"), name), _field(path, line, row, "problem"), score, f"{path}:{line}")
    for path in sorted(folder.rglob("per_problem.jsonl")):
        for line, row in _rows(path):
            for suffix, key in (("", "value"), ("_plus", "value_plus")):
                if key in row:
                    task = f"{path.parent.name}{suffix}"
                    _put(found, (task, "pass@1"), _field(path, line, row, "id"), row[key], f"{path}:{line}")
    for path in sorted(folder.rglob("per_row.jsonl")):
        _read_losses(found, path)
    return found


def _read_losses(found: Problems, path: Path) -> None:
    """Held-out rows, scaled so that their plain mean is nll_micro (over tokens) and nll_macro (over families)."""
    rows = list(_rows(path))
    tokens: dict[str, int] = {}
    for line, row in rows:
        family = _field(path, line, row, "family")
        tokens[family] = tokens.get(family, 0) + _field(path, line, row, "n_tokens")
    total, n = sum(tokens.values()), len(rows)
    for line, row in rows:
        problem, nats = _field(path, line, row, "id"), _field(path, line, row, "nats")
        _put(found, ("heldout", "nll_micro"), problem, nats * n / total, f"{path}:{line}")
        _put(found, ("heldout", "nll_macro"), problem, nats * n / (tokens[row["family"]] * len(tokens)), f"{path}:{line}")


def _rows(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    for line, text in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        try:
            row = json.loads(text)
        except ValueError as error:
            raise ValueError(f"{path}:{line}: not a per-problem result ({error}); delete the file and evaluate again") from error
        if not isinstance(row, dict):
            raise ValueError(f"{path}:{line}: not a per-problem result; delete the file and evaluate again")
        yield line, row


def _field(path: Path, line: int, row: Mapping[str, Any], key: str) -> Any:
    if key not in row:
        raise ValueError(f"{path}:{line}: not a per-problem result ({key} is missing); delete the file and evaluate again")
    return row[key]


def _put(found: Problems, key: tuple[str, str], problem: str, score: Any, where: str) -> None:
    if not isinstance(score, int | float) or not math.isfinite(score):
        raise ValueError(f"{where}: {key[1]} of {problem} is {score}; evaluate again")
    cell = found.setdefault(key, {})
    if problem in cell:
        raise ValueError(f"{where}: {key[0]}/{key[1]} of problem {problem!r} is there twice")
    cell[problem] = float(score)
