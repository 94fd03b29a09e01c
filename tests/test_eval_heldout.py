"""Held-out loss against sums worked out by hand and a slow twin that takes one row at a time."""

import json
import math
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from test_eval_generation import byte_tokenizer
from transformers import LlamaConfig, LlamaForCausalLM

from clusterft.interfaces import EvalContext, Evaluator
from clusterft.records import IGNORE_INDEX, Encoded
from eval.errors import EvaluationError
from eval.heldout import HeldoutLoss, RowLoss, batches_by_length, row_losses, rows_hash, summarise

LN2 = math.log(2)


def encoded(name, n_prompt, n_response, seed=0):
    ids = np.random.default_rng([seed, n_prompt, n_response]).integers(3, 259, n_prompt + n_response).astype(np.int32)
    labels = ids.copy()
    labels[:n_prompt] = IGNORE_INDEX
    return Encoded(name, ids, labels)


ROWS = [encoded("a", 5, 9), encoded("b", 30, 2), encoded("c", 1, 60), encoded("d", 12, 12), encoded("e", 3, 3)]
GROUPS = ["x", "x", "y", "y", "z"]


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    shape = {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    }
    return LlamaForCausalLM(LlamaConfig(vocab_size=259, pad_token_id=2, initializer_range=0.2, **shape)).eval()


@pytest.fixture(scope="module")
def checkpoint(model, tmp_path_factory):
    folder = tmp_path_factory.mktemp("checkpoint")
    model.save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return folder


def context(**changes):
    node = SimpleNamespace(attention="sdpa", trust_remote_code=False)
    given = {"model": node, "template": "magicoder", "max_length": 128, "assets_dir": Path("."), "device": "cpu"}
    given |= {"precision": "float32", "threads": 1, "heldout": ROWS, "heldout_groups": GROUPS}
    return EvalContext(**{**given, **changes})


def slow_twin(model, row):
    """Sum over response tokens of -log p(token | everything before it), one row alone, full logits."""
    with torch.no_grad():
        logp = model(torch.tensor(row.input_ids[None].astype(np.int64))).logits[0].double().log_softmax(-1)
    at = [t for t in range(1, len(row)) if row.labels[t] != IGNORE_INDEX]
    return -sum(float(logp[t - 1, int(row.input_ids[t])]) for t in at)


@pytest.mark.parametrize("budget", [1, 64, 10_000])
def test_batched_losses_equal_the_slow_twin(model, budget):
    expected = [slow_twin(model, r) for r in ROWS]
    np.testing.assert_allclose(row_losses(model, ROWS, budget, autocast=False), expected, rtol=2e-6)


def test_micro_and_macro_by_hand():
    """Family x: 6 nats on 3 tokens; family y: 1 nat on 1 token and 2 nats on 4. micro 9/8, macro (2 + 3/5) / 2 = 1.3."""
    rows = [RowLoss("a", "x", 6.0, 3), RowLoss("b", "y", 1.0, 1), RowLoss("c", "y", 2.0, 4)]
    micro, macro = summarise(rows, "h", "")
    assert (micro.name, micro.value, micro.n, micro.unit) == ("nll_micro", 1.125, 3, "nats")
    assert macro.value == pytest.approx(1.3, abs=1e-15)
    # residuals l - L t: 6 - 3.375, 1 - 1.125, 2 - 4.5
    assert micro.stderr == pytest.approx(math.sqrt(1.5 * (2.625**2 + 0.125**2 + 2.5**2)) / 8, rel=1e-12)
    # family values 2 and 0.6: deviation 1.4 / sqrt 2, over sqrt 2
    assert macro.stderr == pytest.approx(0.7, rel=1e-12)


def test_one_row_has_no_standard_error():
    (micro,) = summarise([RowLoss("a", "x", 3.0, 2)], "h", "")  # and one family no macro loss: it would be the same number twice
    assert (micro.name, micro.value, micro.stderr) == ("nll_micro", 1.5, None)


def test_the_micro_error_is_right_in_simulation():
    """The linearised error of the ratio against its spread over 400 draws of 60 rows: within a tenth."""
    rng = np.random.default_rng(0)
    values, errors = [], []
    for _ in range(400):
        tokens = rng.integers(1, 50, 60)
        nats = tokens * rng.gamma(4.0, 0.5, 60)
        (micro,) = summarise(
            [RowLoss(str(i), "x", float(a), int(t)) for i, (a, t) in enumerate(zip(nats, tokens, strict=True))], "h", ""
        )
        values.append(micro.value)
        errors.append(micro.stderr)
    assert np.mean(errors) == pytest.approx(np.std(values, ddof=1), rel=0.1)


def test_a_uniform_model_loses_the_logarithm_of_the_vocabulary(model):
    flat = LlamaForCausalLM(model.config).eval()
    torch.nn.init.zeros_(flat.lm_head.weight)
    np.testing.assert_allclose(row_losses(flat, ROWS, 64, autocast=False), [r.n_target * math.log(259) for r in ROWS], rtol=1e-6)


def test_evaluator_end_to_end(checkpoint, model, tmp_path):
    one = HeldoutLoss(context=context())
    assert isinstance(one, Evaluator)
    micro, macro = one.evaluate(checkpoint, tmp_path)
    sums = [slow_twin(model, r) for r in ROWS]
    assert micro.value == pytest.approx(sum(sums) / sum(r.n_target for r in ROWS), rel=1e-5)
    rows = [json.loads(line) for line in (tmp_path / "per_row.jsonl").read_text().splitlines()]
    assert [r["id"] for r in rows] == ["a", "b", "c", "d", "e"] and [r["n_tokens"] for r in rows] == [9, 2, 60, 12, 3]
    assert micro.dataset_hash == macro.dataset_hash == rows_hash(ROWS)
    autocast = HeldoutLoss(context=context(precision="bf16_autocast")).evaluate(checkpoint, tmp_path)[0]
    assert autocast.value == pytest.approx(micro.value, rel=0.01) and autocast.value != micro.value
    assert HeldoutLoss(context=context(precision="bf16_autocast"), precision="float32").evaluate(checkpoint, tmp_path)[
        0
    ] == replace(micro)


def test_the_hash_follows_content_not_order():
    assert rows_hash(ROWS[::-1]) == rows_hash(ROWS) != rows_hash(ROWS[:4])
    other = Encoded("a", ROWS[0].input_ids, np.where(np.arange(14) < 6, IGNORE_INDEX, ROWS[0].labels).astype(np.int32))
    assert rows_hash([other, *ROWS[1:]]) != rows_hash(ROWS)


def test_batches_cover_every_row_once_within_the_budget():
    lengths = [3, 50, 7, 7, 20, 1]
    batches = batches_by_length(lengths, 60)
    assert sorted(i for b in batches for i in b) == list(range(6))
    assert batches[0] == [1] and all(len(b) == 1 or len(b) * max(lengths[i] for i in b) <= 60 for b in batches)


def test_what_cannot_be_measured_is_refused(checkpoint, tmp_path):
    with pytest.raises(EvaluationError, match="no held-out rows"):
        HeldoutLoss(context=context(heldout=(), heldout_groups=())).evaluate(checkpoint, tmp_path)
    with pytest.raises(EvaluationError, match="5 rows but 4 families"):
        HeldoutLoss(context=context(heldout_groups=GROUPS[:4])).evaluate(checkpoint, tmp_path)
    with pytest.raises(EvaluationError, match="neither training nor float32"):
        HeldoutLoss(context=context(), precision="int8")
    with pytest.raises(EvaluationError, match="no held-out row has a response token"):
        summarise([], "h", "")


def test_a_diverged_model_is_named_as_such(model):
    broken = LlamaForCausalLM(model.config).eval()
    torch.nn.init.constant_(broken.lm_head.weight, float("nan"))
    with pytest.raises(EvaluationError, match="row a is not finite; the model has diverged"):
        row_losses(broken, ROWS, 64, autocast=False)
