"""Validation rows for gradient matching (LESS): small samples of the target tasks that no test benchmark contains.

In come rows of public data sets in their own columns; out come examples by subtask, the same number each, checked against the
test rows.

    code      MBPP problems that are neither in MBPP+ nor in sanitised MBPP, written in two ways: signature and docstring (as
    HumanEval
              asks), description and assertion (as MBPP asks). HumanEval has no other part than its test part, so none of it is
              used
    medical   MedQA validation, MedMCQA train (lm-eval scores its validation part), PubMedQA outside the official test ids, HeadQA
              validation; the answer is a letter, yes / no / maybe, or HeadQA's option text
    held-out  rows set apart from the pool itself, cut in two so that the half that is matched is not the half that is scored

Which rows are taken follows from their content, not from their order. Nothing here falls back to another set: what is missing
raises.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

from clusterft.records import Example, Pool, content_id
from clusterft.sources import DataError

Row = Mapping[str, Any]
Subtasks = dict[str, tuple[Example, ...]]

MBPP = ("google-research-datasets/mbpp", "full", ("train", "test", "validation", "prompt"))
MBPP_SANITISED = ("google-research-datasets/mbpp", "sanitized", ("train", "test", "validation", "prompt"))
MEDICAL = {
    "medqa": ("GBaker/MedQA-USMLE-4-options-hf", None, ("validation",)),
    "medmcqa": ("openlifescienceai/medmcqa", None, ("train",)),
    "pubmedqa": ("qiaojin/PubMedQA", "pqa_labeled", ("train",)),
    "headqa": ("EleutherAI/headqa", "en", ("validation",)),
}
LETTERS = "ABCDEFGHIJ"
SHORTEST_TEXT = 24
"""Normalised characters from which one text inside another is called a leak; shorter ones meet by chance."""


def code_subtasks(mbpp: Iterable[Row], tested_ids: Collection[int], per_subtask: int) -> Subtasks:
    """Two subtasks from rows of MBPP's full configuration (task_id, text, code, test_list), without `tested_ids`.

    tested_ids  task ids of MBPP+ and of sanitised MBPP. The same problems serve both ways of writing.
    Raises DataError if fewer than `per_subtask` problems are left.
    """
    examples = [(_docstring_style(r), _assertion_style(r)) for r in mbpp if int(r["task_id"]) not in tested_ids]
    usable = sorted(((a, b) for a, b in examples if a is not None), key=lambda pair: pair[1].id)
    _require(len(usable), per_subtask, "MBPP problems outside MBPP+ and sanitised MBPP")
    return {
        "code_docstring": tuple(a for a, _ in usable[:per_subtask]),
        "code_assertion": tuple(b for _, b in usable[:per_subtask]),
    }


def medical_subtasks(rows: Mapping[str, Iterable[Row]], per_subtask: int, is_pubmedqa_test: Callable[[str], bool]) -> Subtasks:
    """One subtask a benchmark from its rows (keys as in MEDICAL).

    is_pubmedqa_test  whether a PubMed id is one of the 500 official test questions; the mirror does not tell.
    Raises DataError for an unknown benchmark or one with fewer than `per_subtask` rows.
    """
    out: Subtasks = {}
    for name in sorted(rows):
        if name not in _MEDICAL:
            raise DataError(f"no validation rows are known for {name!r}; known are {', '.join(sorted(_MEDICAL))}")
        examples = [_MEDICAL[name](r) for r in rows[name] if name != "pubmedqa" or not is_pubmedqa_test(str(r["pubid"]))]
        kept = sorted((e for e in examples if e is not None), key=lambda e: e.id)
        _require(len(kept), per_subtask, f"validation rows of {name}")
        out[name] = tuple(kept[:per_subtask])
    return out


def split_heldout(heldout: Pool, validation_rows: int) -> tuple[Pool, Pool]:
    """(validation, test): `validation_rows` of the held-out rows, by content, and the others.

    Raises DataError unless both parts get at least one row.
    """
    if not 1 <= validation_rows < len(heldout):
        raise DataError(
            f"{validation_rows} validation rows of {len(heldout)} held-out ones leave a part empty; raise data.holdout_rows"
        )
    first = set(sorted(heldout.ids)[:validation_rows])
    parts = [tuple(e for e in heldout.examples if (e.id in first) == inside) for inside in (True, False)]
    return Pool(f"{heldout.name}/validation", parts[0]), Pool(f"{heldout.name}/test", parts[1])


def normalised(text: str) -> str:
    """Lower-case words and digits with single spaces: what two copies of one problem have in common."""
    return " ".join(re.findall(r"[a-z0-9]+", text.lower()))


def check_no_leak(validation: Subtasks, *, ids: Collection[str], texts: Sequence[str], against: str) -> None:
    """Raises DataError if a validation row is one of `ids` (content ids, or `benchmark_id` of its meta), or shares its problem's
    or answer's normalised text with one of `texts`. `against` names those rows in the message."""
    tested = [t for t in map(normalised, texts) if len(t) >= SHORTEST_TEXT]
    for subtask, examples in validation.items():
        for e in examples:
            name = str(e.meta.get("benchmark_id", e.id))
            if e.id in ids or name in ids:
                raise DataError(f"validation row {name} of {subtask} is a row of {against}")
            own = [
                t for t in (normalised(str(e.meta.get("problem", e.prompt))), normalised(e.response)) if len(t) >= SHORTEST_TEXT
            ]
            if any(a in b or b in a for a in own if len(a) >= SHORTEST_TEXT for b in tested):
                raise DataError(f"validation row {name} of {subtask} has the text of a row of {against}")


def load_rows(source: tuple[str, str | None, Sequence[str]]) -> list[Row]:
    """All rows of some splits of a hub data set. Raises DataError if it is neither on the hub nor in its cache."""
    import datasets

    from clusterft.network import hub_or_cache

    path, name, splits = source
    try:
        with hub_or_cache():
            return [row for split in splits for row in datasets.load_dataset(path, name, split=split)]
    except (OSError, RuntimeError, ValueError) as error:
        why = str(error).splitlines()[0][:200] if str(error) else type(error).__name__
        raise DataError(f"validation rows of {path} are not available ({why}); connect to the hub once") from error


def load_code_subtasks(per_subtask: int, mbpp_plus_ids: Collection[int]) -> Subtasks:
    """`code_subtasks` from the hub. mbpp_plus_ids: the ids of the very MBPP+ that will be scored."""
    sanitised = {int(r["task_id"]) for r in load_rows(MBPP_SANITISED)}
    return code_subtasks(load_rows(MBPP), sanitised | set(mbpp_plus_ids), per_subtask)


def load_medical_subtasks(per_subtask: int, is_pubmedqa_test: Callable[[str], bool]) -> Subtasks:
    """`medical_subtasks` from the hub."""
    return medical_subtasks({name: load_rows(source) for name, source in MEDICAL.items()}, per_subtask, is_pubmedqa_test)


def _require(found: int, wanted: int, what: str) -> None:
    if wanted < 1 or found < wanted:
        raise DataError(f"{wanted} {what} are wanted, {found} are there")


def _example(prompt: str, response: str, benchmark_id: str, problem: str) -> Example:
    meta = {"benchmark_id": benchmark_id, "problem": problem}
    return Example(content_id(prompt, response), prompt, response, source=benchmark_id.partition("/")[0], meta=meta)


def _assertion_style(row: Row) -> Example:
    prompt = f"{row['text'].strip()}\nThe code has to satisfy this assertion:\n```python\n{row['test_list'][0].strip()}\n```"
    return _example(prompt, _fenced(row["code"]), f"mbpp/{row['task_id']}", row["text"])


def _docstring_style(row: Row) -> Example | None:
    """None where the tested function's signature cannot be found in the solution."""
    for name in re.findall(r"\w+(?=\s*\()", row["test_list"][0]):
        signature = re.search(rf"^def {re.escape(name)}\s*\(.*\)\s*(?:->.*)?:", row["code"].replace("\r", ""), re.MULTILINE)
        if signature:
            head = f'{signature.group(0)}\n    """{row["text"].strip()}"""'
            prompt = f"Complete this function:\n```python\n{head}\n```"
            return _example(prompt, _fenced(row["code"]), f"mbpp/{row['task_id']}", row["text"])
    return None


def _fenced(code: str) -> str:
    return "```python\n" + code.replace("\r", "").strip() + "\n```"


def _question(text: str, options: Sequence[str]) -> str:
    return "\n".join([text.strip(), *(f"{letter}. {o.strip()}" for letter, o in zip(LETTERS, options, strict=False))])


def _medqa(row: Row) -> Example:
    options = [row[f"ending{i}"] for i in range(4)]
    problem = " ".join(filter(None, (row["sent1"], row.get("sent2", ""))))
    return _example(_question(problem, options), LETTERS[int(row["label"])], f"medqa/{row['id']}", problem)


def _medmcqa(row: Row) -> Example | None:
    """None for questions with several right answers."""
    if row["choice_type"] != "single":
        return None
    options = [row[k] for k in ("opa", "opb", "opc", "opd")]
    return _example(_question(row["question"], options), LETTERS[int(row["cop"])], f"medmcqa/{row['id']}", row["question"])


def _pubmedqa(row: Row) -> Example:
    context = row["context"]["contexts"]
    prompt = "\n".join([*context, row["question"], "Answer yes, no or maybe."])
    return _example(prompt, row["final_decision"], f"pubmedqa/{row['pubid']}", row["question"])


def _headqa(row: Row) -> Example:
    options = {int(a["aid"]): a["atext"] for a in row["answers"]}
    prompt = _question(row["qtext"], [options[k] for k in sorted(options)])
    return _example(prompt, options[int(row["ra"])], f"headqa/{row['qid']}", row["qtext"])


_MEDICAL: dict[str, Callable[[Row], Example | None]] = {
    "medqa": _medqa,
    "medmcqa": _medmcqa,
    "pubmedqa": _pubmedqa,
    "headqa": _headqa,
}
