"""Validation rows of the target tasks: which rows may be used, how they are written, and that leaks are found."""

from __future__ import annotations

import pytest

from clusterft.records import Example, Pool
from clusterft.sources import DataError
from clusterft.validation_sets import check_no_leak, code_subtasks, medical_subtasks, normalised, split_heldout


def problem(task_id: int, verb: str = "add") -> dict:
    return {
        "task_id": task_id,
        "text": f"Write a function to {verb} the numbers of list {task_id} together.",
        "code": f"def total_{task_id}(xs):\r\n    return sum(xs)",
        "test_list": [f"assert total_{task_id}([1, 2]) == 3", "assert total_0([]) == 0"],
        "challenge_test_list": [],
    }


def test_code_rows_are_outside_the_tested_ids_and_written_twice():
    subtasks = code_subtasks([problem(i) for i in range(800, 830)], tested_ids=set(range(800, 820)), per_subtask=5)
    ids = [[e.meta["benchmark_id"] for e in subtasks[name]] for name in ("code_docstring", "code_assertion")]
    assert ids[0] == ids[1] and len(set(ids[0])) == 5
    assert all(int(i.partition("/")[2]) >= 820 for i in ids[0])
    one, other = subtasks["code_docstring"][0], subtasks["code_assertion"][0]
    number = ids[0][0].partition("/")[2]
    assert f'def total_{number}(xs):\n    """Write a function' in one.prompt and "assert" not in one.prompt
    assert f"assert total_{number}([1, 2]) == 3" in other.prompt
    assert one.response == other.response == f"```python\ndef total_{number}(xs):\n    return sum(xs)\n```"


def test_the_choice_follows_from_content_not_order():
    rows = [problem(i) for i in range(810, 830)]
    pick = lambda given: [e.id for e in code_subtasks(given, set(), 4)["code_assertion"]]  # noqa: E731
    assert pick(rows) == pick(rows[::-1])


def test_nested_calls_and_unfindable_signatures():
    nested = {**problem(900), "test_list": ["assert set(total_900([1])) == {1}"]}
    odd = {**problem(901), "code": "total_901 = lambda xs: sum(xs)"}
    subtasks = code_subtasks([nested, odd], set(), 1)
    assert "def total_900(xs):" in subtasks["code_docstring"][0].prompt
    with pytest.raises(DataError, match=r"2 MBPP problems .* 1 are there"):
        code_subtasks([nested, odd], set(), 2)


DRUG = {"question": "Which drug?", "opa": "w", "opb": "x", "opc": "y", "opd": "z", "cop": 0}
ENDINGS = {"ending0": "a", "ending1": "b", "ending2": "c", "ending3": "d"}
BONES = [{"aid": 1, "atext": "ulna"}, {"aid": 2, "atext": "tibia"}]
MEDICAL_ROWS = {
    "medqa": [{"id": "d1", "sent1": "Which nerve?", "sent2": "", **ENDINGS, "label": 2}],
    "medmcqa": [{**DRUG, "id": "m1", "choice_type": "single"}, {**DRUG, "id": "m2", "choice_type": "multi"}],
    "pubmedqa": [
        {"pubid": 11, "question": "Does it?", "context": {"contexts": ["We looked."]}, "final_decision": "maybe"},
        {"pubid": 12, "question": "Does it not?", "context": {"contexts": ["We saw."]}, "final_decision": "no"},
    ],
    "headqa": [{"qid": 5, "qtext": "Which bone?", "ra": 2, "answers": BONES}],
}


def test_medical_rows_and_answers():
    subtasks = medical_subtasks(MEDICAL_ROWS, 1, lambda pubid: pubid == "12")
    answers = {name: rows[0].response for name, rows in subtasks.items()}
    assert answers == {"headqa": "tibia", "medmcqa": "A", "medqa": "C", "pubmedqa": "maybe"}
    assert subtasks["medqa"][0].prompt == "Which nerve?\nA. a\nB. b\nC. c\nD. d"
    assert subtasks["headqa"][0].prompt.endswith("A. ulna\nB. tibia")


def test_what_is_tested_or_ambiguous_is_never_taken():
    with pytest.raises(DataError, match="2 validation rows of medmcqa are wanted, 1 are there"):
        medical_subtasks({"medmcqa": MEDICAL_ROWS["medmcqa"]}, 2, lambda _: False)
    with pytest.raises(DataError, match="pubmedqa are wanted, 0"):
        medical_subtasks({"pubmedqa": MEDICAL_ROWS["pubmedqa"]}, 1, lambda _: True)
    with pytest.raises(DataError, match="icliniq"):
        medical_subtasks({"icliniq": []}, 1, lambda _: False)


def test_leaks_are_found_by_id_and_by_text():
    subtasks = code_subtasks([problem(i) for i in range(810, 815)], set(), 5)
    check_no_leak(subtasks, ids={"mbpp/3"}, texts=["Write something else entirely, please, now."], against="MBPP+")
    with pytest.raises(DataError, match=r"mbpp/812 of code_docstring is a row of MBPP\+"):
        check_no_leak(subtasks, ids={"mbpp/812"}, texts=[], against="MBPP+")
    copied = '"""WRITE a function to   add the numbers of list 813 together! """ def f(): ...'
    with pytest.raises(DataError, match=r"mbpp/813 .* text"):
        check_no_leak(subtasks, ids=(), texts=[copied], against="HumanEval")
    assert normalised(' Write\n"A"_function! ') == "write a function"


def test_held_out_rows_are_cut_in_two():
    pool = Pool("h", tuple(Example(f"{i:02d}", "p", "r") for i in (5, 1, 4, 2, 3)))
    validation, test = split_heldout(pool, 2)
    assert set(validation.ids) == {"01", "02"} and set(test.ids) == {"03", "04", "05"}
    for rows in (0, 5):
        with pytest.raises(DataError, match=r"data\.holdout_rows"):
            split_heldout(pool, rows)
