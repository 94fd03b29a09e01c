"""PubMedQA without its loading script: rows of any mirror in the columns of lm-eval's task, and proof of the test part.

The task file of lm-eval names a data set with a loading script, which `datasets` 4 and later refuse. Mirrors hold the 1,000
labelled questions under other column names and without the official split; taking "the last 500" gives another test set. So the
500 official test ids are known here by short hashes (`medical_tasks/pubmedqa_test_ids.txt`): the part is cut by them, and
a mirror that lacks one is refused. Source of the split: Jin et al. 2019, fold 0 of the labelled questions.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from eval.errors import EvaluationError

TEST_IDS_FILE = Path(__file__).parent / "medical_tasks" / "pubmedqa_test_ids.txt"
TEST_QUESTIONS = 500

# Ours -> the names under which mirrors keep it. `context` may be a record that holds `contexts`.
_NAMES = {
    "pubid": ("pubid", "PMID", "id", "pmid"),
    "QUESTION": ("QUESTION", "question"),
    "CONTEXTS": ("CONTEXTS", "contexts", "context"),
    "final_decision": ("final_decision",),
}


def short_hash(pubid: str | int) -> str:
    """8 hex digits of the SHA-256 of a PubMed id."""
    return hashlib.sha256(str(pubid).encode()).hexdigest()[:8]


@cache
def official_ids() -> frozenset[str]:
    """Short hashes of the 500 official test ids."""
    found = frozenset(TEST_IDS_FILE.read_text(encoding="ascii").split())
    if len(found) != TEST_QUESTIONS:
        raise EvaluationError(
            f"{TEST_IDS_FILE} holds {len(found)} ids instead of {TEST_QUESTIONS}; restore it from the repository"
        )
    return found


def normalise_pubmedqa(row: Mapping[str, Any], where: str) -> dict[str, Any]:
    """A mirror's row under the names of lm-eval's task. Raises EvaluationError naming the column that is missing."""
    out: dict[str, Any] = {}
    for ours, theirs in _NAMES.items():
        name = next((n for n in theirs if n in row), None)
        if name is None:
            raise EvaluationError(f"{where}: none of the columns {', '.join(theirs)} is there, so this is no PubMedQA row")
        out[ours] = row[name]
    if isinstance(out["CONTEXTS"], Mapping):
        out["CONTEXTS"] = out["CONTEXTS"]["contexts"]
    if not isinstance(out["CONTEXTS"], list):
        raise EvaluationError(f"{where}: the contexts are {type(out['CONTEXTS']).__name__}, expected a list of texts")
    out["pubid"] = str(out["pubid"])
    return out


def is_official(pubid: str) -> bool:
    """Whether a PubMed id is one of the 500 official test questions."""
    return short_hash(pubid) in official_ids()


def official_part(rows: Sequence[tuple[int, dict[str, Any]]], path: Path) -> list[tuple[int, dict[str, Any]]]:
    """The official 500 test questions among `rows`, pairs of line and row.

    Raises EvaluationError unless each is there exactly once.
    """
    part = [(line, row) for line, row in rows if short_hash(row["pubid"]) in official_ids()]
    ids = {row["pubid"] for _, row in part}
    if len(part) != TEST_QUESTIONS or len(ids) != TEST_QUESTIONS:
        raise EvaluationError(
            f"{path} holds {len(ids)} of the {TEST_QUESTIONS} official PubMedQA test questions in {len(part)} of its "
            f"{len(rows)} rows; "
            "each must be there once, else the score is of another test set"
        )
    return part
