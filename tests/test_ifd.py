"""IFD: hand-computed values, both forms, what is set aside, and that both passes average the same tokens."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from tiny_feature_context import TINY, tiny_context
from transformers import LlamaConfig, LlamaForCausalLM

from baselines.ifd import IfdSelector, ifd
from clusterft.batching import row_of_encoded
from clusterft.budget import rows_for
from clusterft.feature_columns import IFD_COLUMNS as COLUMNS
from clusterft.feature_columns import IFD_REASONS as REASONS
from clusterft.feature_context import SingleProcess
from clusterft.features import FeatureStore, compute
from clusterft.ifd_losses import answer_mark, loss_pairs, pass_rows, refusal
from clusterft.interfaces import Feature
from clusterft.models import load_model
from clusterft.pre_experience import PreExperience, varied_rows
from clusterft.prompting import encode_example, generation_prompt
from clusterft.records import IGNORE_INDEX, Encoded, Example, Pool
from clusterft.row_losses import LossPass, mean_losses, without_eos
from clusterft.seeding import generator

OPTIONS = {"form": "loss", "precision": "float32", "score_eos": False, "pre_experience": None, "shortfall": "error"}


def encoded(prompt, answer, id="x", truncated=False):
    ids = np.array([*prompt, *answer], np.int32)
    labels = np.array([IGNORE_INDEX] * len(prompt) + list(answer), np.int32)
    return Encoded(id, ids, labels, truncated)


def toy_selection(conditional, direct, budget, reasons=None, **options):
    pool = Pool("toy", tuple(Example(str(i), "p", "r") for i in range(len(conditional))))
    rows = np.stack([conditional, direct, np.full(len(pool), 5.0), np.zeros(len(pool)) if reasons is None else reasons], axis=1)
    selector = IfdSelector(**{**OPTIONS, **options})
    return selector.choose(pool, {"ifd_losses": Feature(rows)}, budget, generator(0, "choose"))


def bigram_model(table: np.ndarray) -> LlamaForCausalLM:
    """A model of no layers with next-token probabilities table[last token]: one-hot states, log-probabilities as the head."""
    v = len(table)
    config = LlamaConfig(hidden_size=v, intermediate_size=v, num_hidden_layers=0, num_attention_heads=1, vocab_size=v)
    model = LlamaForCausalLM(config).eval()
    with torch.no_grad():
        model.model.embed_tokens.weight.copy_(torch.eye(v))
        model.lm_head.weight.copy_(torch.from_numpy(np.log(table).T) / v**0.5)
    return model


def test_forms_have_one_border_and_two_orders():
    """A (0.9 | 1.0): 0.900 and 0.905. B (3.0 | 3.2): 0.9375 and 0.819. D (1.2 | 1.1) lies above 1 in both."""
    conditional, direct = np.array([0.9, 3.0, 1.2]), np.array([1.0, 3.2, 1.1])
    np.testing.assert_allclose(ifd(conditional, direct, "loss"), [0.9, 0.9375, 1.0909], atol=5e-5)
    np.testing.assert_allclose(ifd(conditional, direct, "ppl"), [0.9048, 0.8187, 1.1052], atol=5e-5)
    assert toy_selection(conditional, direct, 2, form="loss").ids == ("1", "0")
    assert toy_selection(conditional, direct, 2, form="ppl").ids == ("0", "1")
    for form in ("loss", "ppl"):
        assert toy_selection(conditional, direct, 1, form=form).rejected == {"2": "ifd_ge_1"}


def test_one_and_more_are_set_aside():
    chosen = toy_selection(np.array([0.2, 0.999, 1.0, 1.3]), np.ones(4), 1)
    assert chosen.ids == ("1",) and chosen.rejected == {"2": "ifd_ge_1", "3": "ifd_ge_1"}


def test_shortfall_is_an_error_or_goes_on_along_the_ranking():
    losses = np.array([0.2, 0.999, 1.3, 1.0])
    with pytest.raises(ValueError, match=r"budget of 3 rows, but only 2"):
        toy_selection(losses, np.ones(4), 3)
    chosen = toy_selection(losses, np.ones(4), 3, shortfall="take_unhelped")
    assert chosen.ids == ("1", "0", "3") and chosen.rejected == {"2": "ifd_ge_1"} and chosen.info["taken_at_or_above_1"] == 1
    assert toy_selection(losses, np.ones(4), 2, shortfall="take_unhelped").info["taken_at_or_above_1"] == 0


def test_reasons_pass_through_and_nonfinite_is_never_ranked():
    reasons = np.array([0, REASONS.index("empty"), REASONS.index("truncated"), 0])
    chosen = toy_selection(np.array([0.5, 0.0, 0.0, 0.5]), np.array([1.0, 0.0, 0.0, 0.0]), 1, reasons=reasons)
    assert chosen.rejected == {"1": "empty", "2": "truncated", "3": "nonfinite"}


def test_budget_counts_the_whole_pool_not_the_kept_rows():
    """1,000 rows of which 100 are invalid, rate 0.05: exactly 50 rows."""
    conditional = np.where(np.arange(1000) % 10, 0.5, 1.5)
    assert len(toy_selection(conditional, np.ones(1000), rows_for(1000, "0.05")).ids) == 50


def test_uniform_model_has_ifd_one():
    """All weights zero: both losses are ln 50 = 3.912023."""
    model = bigram_model(np.full((50, 50), 0.02))
    losses = loss_pairs(LossPass(model), [pass_rows(encoded([0, 7, 8], [3, 4, 5]), [0])])
    np.testing.assert_allclose(losses, math.log(50), atol=1e-5)
    for form in ("loss", "ppl"):
        assert abs(ifd(losses[:, 0], losses[:, 1], form)[0] - 1) < 1e-6


def test_bigram_model_gives_the_value_computed_by_hand():
    """p(a | x) = 1/2, p(b | a) = 1/4, p(a | BOS) = 1/8: losses ln 8 / 2 and ln 32 / 2, IFD 3/5 and, by perplexity, 1/2."""
    bos, x, a, b = range(4)
    table = np.full((4, 4), 0.25)
    table[bos] = [0.5, 0.25, 0.125, 0.125]
    table[x] = [0.25, 0.125, 0.5, 0.125]
    losses = loss_pairs(LossPass(bigram_model(table)), [pass_rows(encoded([bos, x], [a, b]), [bos])])[0]
    np.testing.assert_allclose(losses, [math.log(8) / 2, math.log(32) / 2], atol=1e-5)
    assert ifd(losses[:1], losses[1:], "loss")[0] == pytest.approx(0.6, abs=1e-5)
    assert ifd(losses[:1], losses[1:], "ppl")[0] == pytest.approx(0.5, abs=1e-5)


def test_both_passes_have_the_same_targets_and_the_boundary_token_in_both():
    row = encoded([0, 5, 6], [7, 8])
    conditional, direct = pass_rows(row, [0, 9])
    assert conditional.targets.tolist() == direct.targets.tolist() == [7, 8]
    assert direct.input_ids.tolist() == [0, 9, 7]  # the last answer token predicts nothing, so it is not fed
    context_of = lambda r: [r.input_ids[p] for p in r.places]  # noqa: E731
    assert context_of(conditional) == [6, 7] and context_of(direct) == [9, 7]


def test_a_label_at_position_zero_counts_in_neither_pass():
    conditional, direct = pass_rows(Encoded("x", np.array([4, 5], np.int32), np.array([4, 5], np.int32)), [0])
    assert conditional.targets.tolist() == direct.targets.tolist() == [5]


def test_closing_eos_may_be_left_out():
    row = encoded([0, 5], [7, 1])
    assert without_eos(row, 1).labels.tolist() == [IGNORE_INDEX, IGNORE_INDEX, 7, IGNORE_INDEX]
    assert without_eos(row, 2) is row


@pytest.mark.parametrize("template", ["alpaca", "magicoder", "chat"])
def test_answer_mark_is_what_ends_every_prompt(template):
    tokenizer = tiny_context(1).tokenizer
    mark = answer_mark(template, tokenizer)
    prompt = generation_prompt(template, tokenizer, "an instruction of another kind")
    assert mark[0] == tokenizer.bos_token_id and prompt[-len(mark) + 1 :] == mark[1:]
    assert {"alpaca": "### Response:", "magicoder": "@@ Response\n", "chat": "<assistant>"}[template] in tokenizer.decode(mark)


def test_what_is_refused_before_scoring():
    tokenizer = tiny_context(1).tokenizer
    reasons = []
    for answer, limit in (("", 512), (" ", 512), ("A", 512), ("A long answer", 160)):
        example = Example("x", "Say a letter.", answer)
        row = without_eos(encode_example(example, tokenizer, "alpaca", limit), tokenizer.eos_token_id)
        reasons.append(REASONS[refusal(example, row)])
    assert reasons == ["empty", "empty", "", "truncated"]


@pytest.fixture(scope="module")
def model():
    return load_model(TINY)


def test_losses_do_not_depend_on_the_batch(model):
    context = tiny_context(12)
    rows = [row_of_encoded(e) for e in context.encoded]
    find = lambda budget: mean_losses(  # noqa: E731
        model, rows, context.pool.ids, token_budget=budget, precision="float32", dist=SingleProcess()
    )
    alone, together = find(1), find(10_000)
    np.testing.assert_allclose(alone, together, atol=1e-5)
    padded = LossPass(model, layout="right").rows(rows)[:, 0]
    np.testing.assert_allclose(padded, alone, atol=1e-5)


def test_loss_equals_the_library_loss(model):
    row = tiny_context(1).encoded[0]
    ids, labels = torch.from_numpy(row.input_ids).long()[None], torch.from_numpy(row.labels).long()[None]
    expected = float(model(input_ids=ids, labels=labels).loss.detach())
    assert float(LossPass(model).rows([row_of_encoded(row)])[0, 0]) == pytest.approx(expected, abs=1e-5)


def scored(tmp_path, context, **options):
    selector = IfdSelector(**{**OPTIONS, "shortfall": "take_unhelped", **options})
    return selector, compute(selector.feature_specs(), context, FeatureStore(tmp_path))


def test_from_pool_to_selection(tmp_path):
    context = tiny_context(16)
    selector, features = scored(tmp_path, context)
    feature = features["ifd_losses"]
    assert feature.rows.shape == (16, len(COLUMNS)) and feature.cost.forward_passes == 32
    chosen = selector.choose(context.pool, features, 5, generator(0, "choose"))
    assert chosen.info["mean_answer_tokens_pool"] == pytest.approx(float(feature.rows[:, 2].mean()))
    other = tiny_context(16, order=list(range(15, -1, -1)))
    _, again = scored(tmp_path / "other", other)
    assert selector.choose(other.pool, again, 5, generator(0, "choose")).ids == chosen.ids


def test_a_row_cut_short_is_rejected_in_the_whole_way(tmp_path):
    context = tiny_context(16, max_length=190)
    assert any(e.truncated for e in context.encoded) and not all(e.truncated for e in context.encoded)
    selector, features = scored(tmp_path, context)
    chosen = selector.choose(context.pool, features, 2, generator(0, "choose"))
    cut = {e.id for e in context.encoded if e.truncated}
    assert {one for one, reason in chosen.rejected.items() if reason == "truncated"} == cut


SETTINGS = PreExperience(
    clusters=3,
    per_cluster=2,
    low_percentile=25,
    high_percentile=75,
    epochs=1,
    batch_rows=4,
    learning_rate=1e-2,
    schedule="cosine",
    warmup_ratio=0.0,
    precision="float32",
    seed=0,
)


def test_pre_experience_trains_a_copy(tmp_path):
    context = tiny_context(16)
    before = {k: v.clone() for k, v in context.load_model().state_dict().items()}
    _, plain = scored(tmp_path / "a", context)
    _, trained = scored(tmp_path / "b", context, pre_experience=dict(vars(SETTINGS)))
    assert all(torch.equal(v, before[k]) for k, v in context.load_model().state_dict().items())
    assert trained["ifd_losses"].rows[:, 0].mean() < plain["ifd_losses"].rows[:, 0].mean() - 0.05
    assert trained["ifd_losses"].cost.backward_passes > 0


def test_varied_rows_are_middling_few_and_independent_of_order():
    rng = np.random.default_rng(0)
    means = np.repeat(np.eye(3) * 10, 20, axis=0) + rng.normal(size=(60, 3)) * 0.1
    losses, ids = rng.random(60), [f"{i:02d}" for i in range(60)]
    chosen = varied_rows(ids, means, losses, SETTINGS)
    assert len(chosen) == 6 and [sum(i // 20 == c for i in chosen) for c in range(3)] == [2, 2, 2]
    for c in range(3):
        low, high = np.percentile(losses[c * 20 : c * 20 + 20], [25, 75])
        assert all(low <= losses[i] <= high for i in chosen if i // 20 == c)
    order = rng.permutation(60)
    again = varied_rows([ids[i] for i in order], means[order], losses[order], SETTINGS)
    assert {ids[order[i]] for i in again} == {ids[i] for i in chosen}


def test_unknown_options_are_named():
    with pytest.raises(ValueError, match="loss, ppl"):
        IfdSelector(**{**OPTIONS, "form": "bits"})
    with pytest.raises(ValueError, match="take_unhelped"):
        IfdSelector(**{**OPTIONS, "shortfall": "shrug"})
