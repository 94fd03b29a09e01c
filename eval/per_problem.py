"""Per-problem results on disk: one JSON line a problem, the same form for code and for medicine.

    {"task": "humaneval", "problem": "HumanEval/0", "scores": {"pass@1": 1.0}, ...}      further keys are for people

An evaluator writes `problems.jsonl` below its `out_dir`; `read_problems` collects every such file below a run directory. Scores
are in the unit of the Metric of the same task and name. No torch.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Mapping
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
        for line, text in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
            _take(found, text, f"{path}:{line}")
    return found


def _take(found: Problems, text: str, where: str) -> None:
    try:
        row = json.loads(text)
        task, problem = str(row["task"]), str(row["problem"])
        scores = {str(name): float(value) for name, value in row["scores"].items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{where}: not a per-problem result ({error!r}); delete the file and evaluate again") from error
    for name, score in scores.items():
        if not math.isfinite(score):
            raise ValueError(f"{where}: {name} of {problem} is {score}; evaluate again")
        cell = found.setdefault((task, name), {})
        if problem in cell:
            raise ValueError(f"{where}: {task}/{name} of problem {problem!r} is there twice")
        cell[problem] = score
