"""Prompting: cases 05, 06 and 07, the two marker templates, the mask of conversations, generation prompts, batches."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from data_configs import case, files_config
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from clusterft.data import load_pool
from clusterft.prompting import (
    TEMPLATES,
    collate,
    conversation_prompt,
    encode_example,
    encode_pool,
    encode_pool_with_report,
    generation_prompt,
    pad_id_of,
    tokenizer_report,
)
from clusterft.records import IGNORE_INDEX, Encoded, Example, Pool, Turn
from clusterft.templates import MAGICODER_PREAMBLE, runs
from clusterft.tiny import build_tiny_tokenizer

LONG = 100_000


@pytest.fixture(scope="module")
def byte_tokenizer():
    return build_tiny_tokenizer()


def merging_tokenizer() -> PreTrainedTokenizerFast:
    """Joins "x" and "y": the boundary between prompt and answer would vanish if they were tokenised together."""
    vocabulary = {"<s>": 0, "</s>": 1, "x": 2, "y": 3, "xy": 4, "<unk>": 5}
    core = Tokenizer(models.BPE(vocab=vocabulary, merges=[("x", "y")], unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.Split("\n", "removed")
    return PreTrainedTokenizerFast(tokenizer_object=core, bos_token="<s>", eos_token="</s>", unk_token="<unk>")


def text_of(tokenizer, ids) -> str:
    return tokenizer.decode([i for i in ids if i >= 0])


class TestPromptEatsBudget:
    folder, expected = case("05")
    tokenizer = AutoTokenizer.from_pretrained(folder / "tokenizer")

    def pool(self) -> Pool:
        return load_pool(files_config(str(self.folder / "train.jsonl"))).train

    @pytest.mark.parametrize("max_length", [16, 32, 64])
    def test_supervised_tokens_per_row(self, max_length: int) -> None:
        rows = {r["line"]: r for r in self.expected["by_max_length"][str(max_length)]["per_line"]}
        raw = [json.loads(line) for line in (self.folder / "train.jsonl").read_text().splitlines()]
        for line, row in enumerate(raw, 1):
            want = rows[line]
            got = encode_example(Example("i", row["instruction"], row["output"]), self.tokenizer, "chat", max_length)
            assert len(got) == want["kept_tokens"]
            assert got.n_target == want["supervised_tokens"]
            assert got.n_target == max(0, min(want["response_tokens"] + 1, max_length - (5 + want["prompt_tokens"])))
            assert (got.labels[-1] == self.tokenizer.eos_token_id) == want["eos_kept"]
            assert got.truncated == (want["total_tokens"] > max_length)

    @pytest.mark.parametrize("max_length", [16, 32, 64])
    def test_rows_without_target_are_set_aside(self, max_length: int) -> None:
        want = self.expected["by_max_length"][str(max_length)]
        pool, encoded, report = encode_pool_with_report(self.pool(), self.tokenizer, "chat", max_length)
        refused = [r for r in pool.rejected if r.reason == "no_target_tokens"]
        assert [r.line for r in refused] == want["rejected_no_supervised"]
        assert [r.reason for r in pool.rejected if r.line == 11] == ["empty_instruction"]
        assert pool.ids == tuple(e.id for e in encoded) and all(e.n_target > 0 for e in encoded)
        assert not {r.line for r in pool.rejected} & {e.line for e in pool.examples}
        line_11 = next(r for r in want["per_line"] if r["line"] == 11)
        assert report.answers_cut == len(want["response_cut"])
        assert sum(e.n_target for e in encoded) == want["supervised_total"] == report.target_tokens, line_11

    def test_hint_names_the_length_that_fits(self) -> None:
        pool, _ = encode_pool(self.pool(), self.tokenizer, "chat", 16)
        detail = {r.line: r.detail for r in pool.rejected}
        assert detail[5] == "the prompt takes 16 tokens; the first answer token needs max_length 17, the whole row 20"
        row_5 = next(e for e in self.pool().examples if e.line == 5)
        assert encode_example(row_5, self.tokenizer, "chat", 17).n_target == 1
        assert not encode_example(row_5, self.tokenizer, "chat", 20).truncated

    def test_longest_row_is_reported_before_truncation(self) -> None:
        _, _, report = encode_pool_with_report(self.pool(), self.tokenizer, "chat", 64)
        assert report.longest[1:] == (self.expected["longest_line"], self.expected["longest_total_tokens"]) == (9, 50008)
        assert "line 9, 50,008 tokens before truncation at 64" in report.lines()[1]

    def test_nothing_left_is_an_error(self) -> None:
        pool = Pool("p", (Example("a", "b " * 30, "c", source="f", line=3),))
        with pytest.raises(ValueError, match=r"none of the 1 rows .* max_length 16 \(first: f line 3: no_target_tokens"):
            encode_pool(pool, self.tokenizer, "chat", 16)
        assert encode_pool(Pool("q", ()), self.tokenizer, "chat", 16) == (Pool("q", ()), ())

    def test_row_limit_is_a_stated_filter(self) -> None:
        pool, encoded = encode_pool(self.pool(), self.tokenizer, "chat", 64, max_row_tokens=18)
        over = {r.line: r.detail for r in pool.rejected if r.reason == "over_row_limit"}
        assert sorted(over) == [4, 5, 6, 7, 8, 9, 10] and over[4] == "19 tokens, data.max_row_tokens is 18"
        assert max(map(len, encoded)) == 18


class TestPadIsEos:
    folder, expected = case("06")
    tokenizer = AutoTokenizer.from_pretrained(folder / "tokenizer")

    def encoded(self) -> list[Encoded]:
        rows = [json.loads(line) for line in (self.folder / "batch.jsonl").read_text().splitlines()]
        return [
            encode_example(Example(str(i), r["instruction"], r["output"]), self.tokenizer, "chat", LONG)
            for i, r in enumerate(rows)
        ]

    def test_batch_is_exactly_as_expected(self) -> None:
        batch = collate(self.encoded(), pad_id_of(self.tokenizer), side=self.expected["pad_side"])
        for key, value in batch.items():
            assert value.dtype == torch.int64 and value.tolist() == self.expected[key], key

    def test_every_answer_teaches_its_end(self) -> None:
        labels = collate(self.encoded(), pad_id_of(self.tokenizer))["labels"]
        assert (labels == self.tokenizer.eos_token_id).sum(1).tolist() == self.expected["supervised_eos_per_row"] == [1, 1, 2]
        assert [labels[0, 8], labels[1, -1], labels[2, 9]] == [2, 2, 2]

    def test_start_up_line(self) -> None:
        line = tokenizer_report(self.tokenizer, self.encoded(), template="chat")
        assert "pad==eos = yes" in line and "EOS supervised = yes" in line and "EOS text inside 1 answers (kept)" in line


class TestBosZeroOneTwo:
    folder, expected = case("07")
    example = Example("i", "a b", "c")

    def tokenizer(self, name: str):
        return AutoTokenizer.from_pretrained(self.folder / name)

    @pytest.mark.parametrize(
        ("name", "key", "count"),
        [
            ("tok_template_and_post", "ids", 1),
            ("tok_post_only", "ids_if_policy_adds_bos", 1),
            ("tok_no_bos", "ids", 0),
            ("tok_no_bos_naive_template", "ids", 0),
        ],
    )
    def test_ids_and_report(self, name: str, key: str, count: int) -> None:
        tokenizer = self.tokenizer(name)
        question, answer = json.loads((self.folder / "messages.json").read_text())
        assert (question["content"], answer["content"]) == (self.example.prompt, self.example.response)
        encoded = encode_example(self.example, tokenizer, "chat", LONG)
        assert encoded.input_ids.tolist() == self.expected[name][key]
        assert tokenizer.unk_token_id not in encoded.input_ids and "None" not in tokenizer.decode(encoded.input_ids)
        line = tokenizer_report(tokenizer, [encoded], template="chat")
        assert f"BOS per sample = {count} (min=max); EOS supervised = yes; pad==eos = no; template = chat" in line
        assert "evaluation uses the same" in line

    @pytest.mark.parametrize("name", ["tok_template_and_post", "tok_post_only", "tok_no_bos", "tok_no_bos_naive_template"])
    def test_evaluation_feeds_what_training_saw(self, name: str) -> None:
        tokenizer = self.tokenizer(name)
        trained = encode_example(self.example, tokenizer, "chat", LONG).input_ids.tolist()
        fed = generation_prompt("chat", tokenizer, "a b")
        assert fed == trained[: len(fed)] and len(fed) == len(trained) - 2

    @pytest.mark.parametrize("template", ["magicoder", "alpaca"])
    def test_marker_templates_have_one_bos_where_there_is_one(self, template: str) -> None:
        for name, count in (("tok_post_only", 1), ("tok_template_and_post", 1), ("tok_no_bos", 0)):
            ids = encode_example(self.example, self.tokenizer(name), template, LONG).input_ids.tolist()
            assert ids.count(1) == count and (ids[0] == 1) == bool(count) and ids.count(2) == 1

    def test_a_bos_text_that_a_template_doubles_is_written_once(self) -> None:
        tokenizer = self.tokenizer("tok_template_and_post")
        tokenizer.chat_template = "{{ bos_token }} {{ bos_token }}" + tokenizer.chat_template.partition("}}")[2]
        encoded = encode_example(self.example, tokenizer, "chat", LONG)
        assert encoded.input_ids.tolist() == self.expected["tok_template_and_post"]["ids"]
        assert encoded.labels.tolist() == [IGNORE_INDEX] * 7 + [10, 2]

    def test_uneven_bos_is_shown(self) -> None:
        tokenizer = self.tokenizer("tok_post_only")
        rows = [Encoded(str(i), np.array(ids, np.int32), np.array(ids, np.int32)) for i, ids in enumerate(([1, 1, 8, 2], [8, 2]))]
        assert "BOS per sample = 0 to 2;" in tokenizer_report(tokenizer, rows)


def test_magicoder_text_and_mask(byte_tokenizer) -> None:
    encoded = encode_example(Example("i", "Sort it.", "```python\nx\n```"), byte_tokenizer, "magicoder", LONG)
    prompt = MAGICODER_PREAMBLE + "\n\n@@ Instruction\nSort it.\n\n@@ Response\n"
    assert text_of(byte_tokenizer, encoded.input_ids) == "<s>" + prompt + "```python\nx\n```</s>"
    assert text_of(byte_tokenizer, encoded.labels) == "```python\nx\n```</s>"
    assert (encoded.labels == IGNORE_INDEX).sum() == len(prompt) + 1
    assert encoded.input_ids.dtype == encoded.labels.dtype == np.int32


@pytest.mark.parametrize(
    ("given", "block"),
    [("", ""), ("<noinput>", ""), ("NA", ""), ("\u200b", ""), ("DNA", "### Input:\nDNA\n\n"), ("NA!", "### Input:\nNA!\n\n")],
)
def test_alpaca_with_and_without_input(byte_tokenizer, given: str, block: str) -> None:
    (context, answer) = runs(Example("i", "Do it.", "Done.", given), "alpaca", byte_tokenizer)
    assert context.text.endswith(f"\n\n### Instruction:\nDo it.\n\n{block}### Response:")
    assert ("paired with an input" in context.text) == bool(block)
    assert (answer.text, answer.target, answer.end) == ("Done.", True, True)


def test_input_block_reaches_the_other_templates_too(byte_tokenizer) -> None:
    example = Example("i", "Sum.", "6", "[1, 2, 3]")
    assert "@@ Instruction\nSum.\n\n[1, 2, 3]\n\n@@ Response" in runs(example, "magicoder", byte_tokenizer)[0].text
    assert "<user>Sum.\n\n[1, 2, 3]" in runs(example, "chat", byte_tokenizer)[0].text


CHAT = (
    Turn("system", "Be brief."),
    Turn("user", "Q1"),
    Turn("assistant", "A1", True),
    Turn("user", "Q2"),
    Turn("assistant", ""),
    Turn("user", "Q3"),
    Turn("assistant", "A3", True),
)


@pytest.mark.parametrize("template", TEMPLATES)
def test_loss_is_on_answers_and_their_ends_alone(byte_tokenizer, template: str) -> None:
    encoded = encode_example(Example("i", "Q3", "A3", turns=CHAT), byte_tokenizer, template, LONG)
    assert text_of(byte_tokenizer, encoded.labels) == "A1</s>A3</s>"
    text = text_of(byte_tokenizer, encoded.input_ids)
    assert text.count("<s>") == 1 and text.startswith("<s>")
    order = [text.index(part) for part in ("Be brief.", "Q1", "A1", "Q2", "Q3", "A3")]
    assert order == sorted(order)


def test_chat_template_text_is_the_tokenizers_own(byte_tokenizer) -> None:
    encoded = encode_example(Example("i", "Q3", "A3", turns=CHAT), byte_tokenizer, "chat", LONG)
    messages = [{"role": t.role, "content": t.text} for t in CHAT]
    assert text_of(byte_tokenizer, encoded.input_ids) == byte_tokenizer.apply_chat_template(messages, tokenize=False)


def test_templates_that_trim_or_rewrite_messages() -> None:
    tokenizer = build_tiny_tokenizer()
    tokenizer.chat_template = "{% for m in messages %}[{{ m['role'] }}]{{ m['content'] | trim }}{% endfor %}"
    encoded = encode_example(Example("i", " q ", " a "), tokenizer, "chat", LONG)
    assert text_of(tokenizer, encoded.input_ids) == "[user]q[assistant]a</s>"
    assert text_of(tokenizer, encoded.labels) == "a</s>"
    tokenizer.chat_template = "{% for m in messages %}{{ m['content'] | upper }}{% endfor %}"
    with pytest.raises(ValueError, match=r"rewrites messages"):
        encode_example(Example("i", "q", "a"), tokenizer, "chat", LONG)
    tokenizer.chat_template = "{{ messages[0]['content'] }}"
    with pytest.raises(ValueError, match=r"leaves out a message"):
        encode_example(Example("i", "q", "a"), tokenizer, "chat", LONG)
    tokenizer.chat_template = None
    with pytest.raises(ValueError, match=r"no chat template; use data.template=alpaca"):
        encode_example(Example("i", "q", "a"), tokenizer, "chat", LONG)


def test_prompt_and_answer_never_merge_into_one_token() -> None:
    tokenizer = merging_tokenizer()
    tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    encoded = encode_example(Example("i", "x", "yx"), tokenizer, "chat", LONG)
    assert encoded.input_ids.tolist() == [2, 3, 2, 1] and encoded.labels.tolist() == [-100, 3, 2, 1]
    assert tokenizer("xyx", add_special_tokens=False)["input_ids"] == [4, 2]


@pytest.mark.parametrize("template", TEMPLATES)
def test_generation_prompt_is_the_training_prompt(byte_tokenizer, template: str) -> None:
    example = Example("i", "Write f.", "```python\ndef f(): pass\n```", "n = 3")
    trained = encode_example(example, byte_tokenizer, template, LONG)
    for prefill in ("", "```python\n", "```python\ndef f():"):
        fed = generation_prompt(template, byte_tokenizer, "Write f.", "n = 3", prefill)
        assert fed == trained.input_ids[: len(fed)].tolist()
        assert len(fed) == (trained.labels == IGNORE_INDEX).sum() + len(prefill)


@pytest.mark.parametrize("template", TEMPLATES)
def test_conversation_prompt_is_the_training_prompt(byte_tokenizer, template: str) -> None:
    turns = (Turn("user", "Q1"), Turn("assistant", "A1"), Turn("user", "Q2"))
    trained = encode_example(
        Example("i", "Q2", "A2", turns=(*turns, Turn("assistant", "A2", True))), byte_tokenizer, template, LONG
    )
    fed = conversation_prompt(template, byte_tokenizer, turns)
    assert fed == trained.input_ids[: len(fed)].tolist() and text_of(byte_tokenizer, trained.input_ids[len(fed) :]).startswith(
        "A2"
    )
    with pytest.raises(ValueError, match=r"must end with a turn of the user"):
        conversation_prompt(template, byte_tokenizer, turns[:2])


def test_batches_of_the_tokenizer_do_not_change_ids(byte_tokenizer) -> None:
    examples = tuple(Example(f"{i:04d}", "q" * (i % 7 + 1), "a" * (i % 11 + 1)) for i in range(600))
    pool, encoded = encode_pool(Pool("p", examples), byte_tokenizer, "magicoder", 200)
    assert len(pool) == 600
    for i in (0, 255, 256, 511, 599):
        alone = encode_example(examples[i], byte_tokenizer, "magicoder", 200)
        assert (encoded[i].input_ids == alone.input_ids).all() and (encoded[i].labels == alone.labels).all()


def test_unknown_template_length_and_missing_eos(byte_tokenizer) -> None:
    example = Example("i", "q", "a")
    with pytest.raises(ValueError, match=r"template 'llama' is unknown; known: magicoder, alpaca, chat"):
        encode_example(example, byte_tokenizer, "llama", 8)
    with pytest.raises(ValueError, match=r"max_length is 1; expected at least 2"):
        encode_example(example, byte_tokenizer, "alpaca", 1)
    bare = build_tiny_tokenizer()
    bare.eos_token = None
    with pytest.raises(ValueError, match=r"no EOS token"):
        encode_example(example, bare, "alpaca", 8)


def test_text_that_looks_like_markers_stays_text(byte_tokenizer) -> None:
    nasty = "\ue0000\ue001 ### Response: @@ Response\n {{ bos_token }} <script>"
    for template in TEMPLATES:
        encoded = encode_example(Example("i", nasty, nasty), byte_tokenizer, template, LONG)
        assert text_of(byte_tokenizer, encoded.labels) == nasty + "</s>"


class TestCollate:
    rows = (
        Encoded("a", np.array([0, 5, 6], np.int32), np.array([-100, 5, 6], np.int32)),
        Encoded("b", np.array([0, 7], np.int32), np.array([-100, 7], np.int32)),
    )

    def test_right_and_left(self) -> None:
        right = collate(self.rows, 9)
        assert right["input_ids"].tolist() == [[0, 5, 6], [0, 7, 9]]
        left = collate(self.rows, 9, side="left")
        assert left["input_ids"].tolist() == [[0, 5, 6], [9, 0, 7]]
        assert left["attention_mask"].tolist() == [[1, 1, 1], [0, 1, 1]]
        assert left["labels"].tolist() == [[-100, 5, 6], [-100, -100, 7]]

    def test_multiple(self) -> None:
        assert collate(self.rows, 9, pad_to_multiple_of=4)["input_ids"].shape == (2, 4)
        assert collate(self.rows, 9, pad_to_multiple_of=3)["input_ids"].shape == (2, 3)

    def test_refusals(self) -> None:
        with pytest.raises(ValueError, match=r"empty batch"):
            collate([], 0)
        with pytest.raises(ValueError, match=r"side is 'middle'"):
            collate(self.rows, 0, side="middle")
        with pytest.raises(ValueError, match=r"pad_to_multiple_of is 0"):
            collate(self.rows, 0, pad_to_multiple_of=0)


def test_pad_falls_back_to_eos_and_adds_no_token(byte_tokenizer) -> None:
    tokenizer = build_tiny_tokenizer()
    size = len(tokenizer)
    tokenizer.pad_token = None
    assert pad_id_of(tokenizer) == tokenizer.eos_token_id and len(tokenizer) == size
    assert pad_id_of(byte_tokenizer) == 2


def test_cases_are_unchanged_copies() -> None:
    shared = Path("/".join(("", "work", "shared", "cases")))
    if not shared.is_dir():
        pytest.skip("the handed cases are not at hand")
    for name in ("01", "02", "04", "05", "06", "07"):
        folder, _ = case(name)
        for path in folder.rglob("*"):
            if path.is_file():
                assert path.read_bytes() == (shared / path.relative_to(folder.parent)).read_bytes()
