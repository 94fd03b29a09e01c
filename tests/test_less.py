"""LESS: Adam features, influence, subtasks, moments by name, per-sample gradients, and the whole way with a tiny model."""

from __future__ import annotations

import shutil
from itertools import pairwise

import numpy as np
import pytest
import torch
from tiny_feature_context import example, tiny_context

from baselines.less import LessSelector, best_subtask, checkpoint_weights, influence
from clusterft.batching import row_of_encoded
from clusterft.feature_columns import LESS_REASONS
from clusterft.feature_store import FeatureDamaged
from clusterft.features import FeatureStore, compute
from clusterft.interfaces import Feature
from clusterft.lora_gradients import check_validation, checkpoint_files, epoch_rates, warmup_rows
from clusterft.lora_model import (
    LoraParams,
    adapter_parameters,
    load_checkpoint,
    lora_on,
    moments_by_name,
    moments_from_state,
)
from clusterft.optim import learning_rate
from clusterft.per_sample_gradients import GradientPass, adam_feature
from clusterft.prompting import encode_example
from clusterft.records import IGNORE_INDEX, Encoded, Example, Pool
from clusterft.seeding import generator
from clusterft.warmup import Recipe, train_rows

LORA = {
    "rank": 4,
    "alpha": 8,
    "dropout": 0.1,
    "targets": ["q_proj", "k_proj", "v_proj", "o_proj"],
    "last_layers": None,
    "seed": 42,
}
TRAINING = {
    "epochs": 2,
    "batch_rows": 2,
    "learning_rate": 1e-2,
    "schedule": "linear",
    "warmup_ratio": 0.03,
    "weight_decay": 0.0,
    "precision": "float32",
    "seed": 42,
}
GRADIENTS = {
    "warmup_fraction": "0.4",
    "training": TRAINING,
    "lora": LORA,
    "precision": "float32",
    "adam_variant": "official",
    "dim": 256,
    "projection_seed": 0,
    "validation_eos": False,
}


# -- the features of Adam ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("g", "expected"),
    [(1.0, 3.16226), (1e-2, 3.01511), (1e-3, 0.953463), (1e-4, 0.09995), (1e-5, 0.00999995), (1e-6, 0.001)],
)
def test_official_feature_of_fresh_moments(g, expected):
    zero = torch.zeros(1)
    found = adam_feature(torch.tensor([[g]]), zero, zero, variant="official", step=1)
    assert float(found) == pytest.approx(expected, rel=2e-5)


def test_official_and_paper_feature_with_moments():
    g, m, v = torch.tensor([[1e-5]]), torch.tensor([2e-6]), torch.tensor([1e-10])
    assert float(adam_feature(g, m, v, variant="official", step=105)) == pytest.approx(0.0278610, rel=1e-5)
    assert float(adam_feature(g, m, v, variant="paper", step=105)) == pytest.approx(0.0883944, rel=1e-5)
    assert float(adam_feature(g, torch.zeros(1), torch.zeros(1), variant="paper", step=1)) == pytest.approx(0.999, abs=1e-4)
    assert adam_feature(g, m, v, variant="none", step=0) is g
    with pytest.raises(ValueError, match="official, paper, none"):
        adam_feature(g, m, v, variant="adamw", step=1)
    with pytest.raises(ValueError, match="update 0"):
        adam_feature(g, m, v, variant="paper", step=0)


def test_paper_feature_is_the_step_that_torch_takes():
    """From zero moments, one update of torch's Adam with learning rate 1 moves by the feature."""
    w = torch.nn.Parameter(torch.tensor([0.3, -0.2], dtype=torch.float64))
    optimizer = torch.optim.Adam([w], lr=1.0)
    before, gradient = w.detach().clone(), torch.tensor([[1e-3, -2e-6]], dtype=torch.float64)
    w.grad = gradient[0].clone()
    optimizer.step()
    zero = torch.zeros(2, dtype=torch.float64)
    torch.testing.assert_close(before - w.detach(), adam_feature(gradient, zero, zero, variant="paper", step=1)[0])


# -- influence ---------------------------------------------------------------------------------------------------------


def unit(rows):
    return rows / np.linalg.norm(rows, axis=1, keepdims=True)


def test_equal_opposite_and_orthogonal_rows():
    v = np.array([[3.0, 4.0, 0.0]])
    train = unit(np.array([[-3.0, -4.0, 0.0], [3.0, 4.0, 0.0], [0.0, 0.0, 1.0]]))
    np.testing.assert_allclose(influence(train, unit(v), np.ones(1))[:, 0], [-1, 1, 0], atol=1e-15)


def test_one_checkpoint_scores_lie_between_minus_one_and_one():
    rng = np.random.default_rng(0)
    scores = influence(unit(rng.normal(size=(50, 16))), unit(rng.normal(size=(9, 16))), np.ones(1))
    assert np.abs(scores).max() <= 1


def test_checkpoints_are_weighted_and_a_common_factor_is_nothing():
    rates = np.array([1.6877e-5, 1.2859e-5, 7.7030e-6, 2.5616e-6])
    np.testing.assert_allclose(checkpoint_weights(rates), [0.4219, 0.3215, 0.1926, 0.0640], atol=5e-5)
    np.testing.assert_allclose(checkpoint_weights(7 * rates), checkpoint_weights(rates), rtol=1e-15)
    train, validation = np.array([[1.0, 0.0, 0.0, 1.0]]), np.array([[1.0, 0.0, 1.0, 0.0]])
    assert influence(train, validation, np.array([0.25, 0.75]))[0, 0] == 0.25
    with pytest.raises(ValueError, match="zero"):
        checkpoint_weights(np.zeros(3))
    with pytest.raises(ValueError, match="5"):
        influence(np.ones((1, 5)), np.ones((1, 5)), np.ones(2))


def test_epoch_rates_of_the_released_run():
    """422 updates, warm-up ceil(0.03 x 422) = 13, peak 2e-5, rates as the Trainer logs them, after the update: within 1 %."""
    at = learning_rate("linear", lr=2e-5, warmup_steps=13, total_steps=422)
    edges = [0, 105, 211, 317, 422]
    means = [np.mean([at(s + 1) for s in range(a, b)]) for a, b in pairwise(edges)]
    np.testing.assert_allclose(means, [1.6877e-5, 1.2859e-5, 7.7030e-6, 2.5616e-6], rtol=0.01)


def test_plan_of_the_released_warm_up():
    """13,533 rows at a global batch of 128 are 106 updates an epoch, whatever the number of ranks."""
    recipe = Recipe(**{**TRAINING, "epochs": 4, "batch_rows": 128, "learning_rate": 2e-5})
    assert recipe.steps_per_epoch(13_533) == 106 and len(recipe.rates(13_533)) == 424
    np.testing.assert_allclose(epoch_rates(recipe, 13_533), [1.6877e-5, 1.2859e-5, 7.7030e-6, 2.5616e-6], rtol=0.02)


def test_subtasks_are_labels_not_positions():
    assert best_subtask(np.arange(6.0)[None], np.array([0, 0, 1, 1, 2, 2]))[0] == 4.5
    assert best_subtask(np.array([[1.0, 9.0, 1.0, 9.0]]), np.array([0, 1, 0, 1]))[0] == 9
    assert best_subtask(np.array([[9.0, 1.0, 9.0, 1.0]]), np.array([1, 0, 1, 0]))[0] == 9
    assert best_subtask(np.array([[1.0, 2.0, 6.0]]), np.array([0, 0, 1]))[0] == 6


# -- moments by name ---------------------------------------------------------------------------------------------------


def test_moments_are_found_by_name_in_swapped_groups():
    a, b = torch.nn.Parameter(torch.zeros(2, 3)), torch.nn.Parameter(torch.zeros(4))
    groups = [{"params": [b], "weight_decay": 0.0}, {"params": [a], "weight_decay": 0.1}]
    optimizer = torch.optim.AdamW(groups)
    a.grad, b.grad = torch.full((2, 3), 2.0), torch.full((4,), 5.0)
    optimizer.step()
    live = moments_by_name({"lora_A": a, "lora_B": b}, optimizer)
    saved = moments_from_state(optimizer.state_dict(), [["lora_B"], ["lora_A"]])
    for found in (live, saved):
        assert found["lora_A"][0].shape == (2, 3) and found["lora_B"][1].shape == (4,)
        torch.testing.assert_close(found["lora_A"][0], torch.full((2, 3), 0.2))
        torch.testing.assert_close(found["lora_B"][1], torch.full((4,), 0.025))


def test_missing_moments_are_an_error_that_names_the_tensor():
    a, b = torch.nn.Parameter(torch.zeros(2)), torch.nn.Parameter(torch.zeros(2))
    optimizer = torch.optim.AdamW([a, b])
    a.grad = torch.ones(2)
    optimizer.step()
    with pytest.raises(KeyError, match="lora_B"):
        moments_by_name({"lora_A": a, "lora_B": b}, optimizer)
    with pytest.raises(KeyError, match="lora_B"):
        moments_from_state(optimizer.state_dict(), [["lora_A", "lora_B"]])
    with pytest.raises(ValueError, match="groups"):
        moments_from_state(optimizer.state_dict(), [["lora_A"], ["lora_B"]])


# -- gradients ---------------------------------------------------------------------------------------------------------


def grown_adapters(model):
    """B away from zero, as after some training: else every gradient of A is zero."""
    torch.manual_seed(0)
    with torch.no_grad():
        for name, parameter in adapter_parameters(model).items():
            if "lora_B" in name:
                parameter.normal_(std=0.2)


@pytest.mark.parametrize("last_layers", [None, 1])
def test_batched_gradients_equal_batch_one(last_layers):
    context = tiny_context(9)
    rows = [row_of_encoded(e) for e in context.encoded]
    with lora_on(context.load_model(), LoraParams(**{**LORA, "last_layers": last_layers})) as model:
        grown_adapters(model)
        ready = GradientPass(model)
        assert len(ready.named) == (16 if last_layers is None else 8)
        fast, slow = ready.gradients(rows), ready.slow_gradients(rows)
    assert fast.shape == (9, ready.n_features) and slow.abs().max() > 0.05
    assert (fast - slow).abs().max() < 1e-5 * slow.abs().max()


def test_batched_gradients_equal_the_library_loss_and_autograd():
    context = tiny_context(3)
    with lora_on(context.load_model(), LoraParams(**LORA)) as model:
        grown_adapters(model)
        ready = GradientPass(model)
        fast = ready.gradients([row_of_encoded(e) for e in context.encoded])
        for row, encoded in zip(fast, context.encoded, strict=True):
            ids, labels = (torch.from_numpy(x).long()[None] for x in (encoded.input_ids, encoded.labels))
            loss = model(input_ids=ids, labels=labels).loss
            expected = torch.cat([g.flatten() for g in torch.autograd.grad(loss, list(ready.named.values()))])
            torch.testing.assert_close(row, expected, atol=1e-6, rtol=1e-4)


def test_adapters_leave_no_trace():
    model = tiny_context(1).load_model()
    before = {k: v.clone() for k, v in model.state_dict().items()}
    flags = [p.requires_grad for p in model.parameters()]
    with lora_on(model, LoraParams(**LORA)) as wearing:
        grown_adapters(wearing)
        assert not wearing.get_input_embeddings().weight.requires_grad
    assert list(model.state_dict()) == list(before) and flags == [p.requires_grad for p in model.parameters()]
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
    with pytest.raises(ValueError, match="last_layers is 9"), lora_on(model, LoraParams(**{**LORA, "last_layers": 9})):
        pass


def test_only_linear_weights_can_be_trainable():
    with pytest.raises(ValueError, match="linear"):
        GradientPass(tiny_context(1).load_model())


# -- warm-up -----------------------------------------------------------------------------------------------------------


def test_warm_up_rows_are_a_prefix_of_one_permutation():
    encoded = tiny_context(20).encoded
    few, more = ({e.id for e in warmup_rows(encoded, f, 42)} for f in ("0.1", "0.25"))
    assert len(few) == 2 and len(more) == 5 and few < more
    assert {e.id for e in warmup_rows(encoded[::-1], "0.25", 42)} == more
    assert len(warmup_rows(encoded, "0.01", 42)) == 1


def test_a_training_without_a_learning_rate_is_refused():
    context = tiny_context(2)
    recipe = Recipe(**{**TRAINING, "epochs": 1, "batch_rows": 2})
    with pytest.raises(ValueError, match="learning rate 0"):
        train_rows(context.load_model(), context.encoded, recipe, dist=context.dist, token_budget=512)


def test_gradient_of_a_step_is_that_of_the_whole_batch():
    """Cut into micro-batches by tokens, the step is that of the mean loss over all its rows: AdamW's first moments agree."""
    moments = []
    for budget in (100, 10_000):
        context = tiny_context(6)
        recipe = Recipe(**{**TRAINING, "epochs": 1, "batch_rows": 6, "warmup_ratio": 0.0})
        seen = {}
        model = context.load_model()

        def keep(step, optimizer, model=model, seen=seen):
            seen.update({n: m[0].clone() for n, m in moments_by_name(dict(model.named_parameters()), optimizer).items()})

        train_rows(model, context.encoded, recipe, dist=context.dist, token_budget=budget, on_step=keep)
        moments.append(seen)
    for name, value in moments[0].items():
        torch.testing.assert_close(value, moments[1][name], atol=1e-7, rtol=1e-4)


# -- the whole way -----------------------------------------------------------------------------------------------------


def less_context(n=14, **changes):
    """n rows and two validation subtasks of three and two other rows."""
    base = tiny_context(n, **changes)
    rows = [encode_example(example(1000 + i), base.tokenizer, "alpaca", 512) for i in range(5)]
    base.validation = {"sums": rows[:3], "lists": rows[3:]}
    return base


def less_features(tmp_path, context, **changes):
    selector = LessSelector(gradients={**GRADIENTS, **changes})
    return selector, compute(selector.feature_specs(), context, FeatureStore(tmp_path))


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    context = less_context()
    return context, *less_features(tmp_path_factory.mktemp("less"), context)


def test_from_pool_to_ranking(whole):
    context, selector, features = whole
    feature = features["lora_gradients"]
    assert feature.rows.shape == (14, 2 * 256 + 1) and feature.extra["validation"].shape == (5, 512)
    norms = np.linalg.norm(feature.rows[:, :256].astype(np.float64), axis=1)
    np.testing.assert_allclose(norms, 1, atol=1e-3)
    chosen = selector.choose(context.pool, features, 4, generator(0, "choose"))
    assert chosen.info["subtasks"] == {"lists": 2, "sums": 3} and max(chosen.scores.values()) <= 1.001
    assert feature.cost.backward_passes == 2 * (14 + 5) + 2 * 5 and feature.cost.flops > 0


def test_features_are_the_projected_adam_features_of_slow_gradients(whole, tmp_path):
    """The slow way for three rows at the first checkpoint: batch 1, autograd, whole sign matrix in float64."""
    from clusterft.projection import SignProjection

    context, selector, features = whole
    store = FeatureStore(tmp_path)
    compute(selector.feature_specs(), context, store)
    (folder,) = tmp_path.glob("lora_gradients-*")
    files = checkpoint_files(folder / "work")
    assert [f.stem for f in files] == ["checkpoint-3", "checkpoint-6"]
    checkpoint = load_checkpoint(files[0])
    with lora_on(context.load_model(), LoraParams(**LORA)) as model:
        checkpoint.load_into(model)
        ready = GradientPass(model)
        gradients = ready.slow_gradients([row_of_encoded(e) for e in context.encoded[:3]])
    adam = adam_feature(gradients, *checkpoint.flat_moments(), variant="official", step=4).double()
    signs = SignProjection(ready.n_features, 256, seed=0, backend="torch").signs(0, ready.n_features).double()
    expected = adam @ signs / 16
    expected = expected / expected.norm(dim=1, keepdim=True)
    np.testing.assert_allclose(features["lora_gradients"].rows[:3, :256].astype(np.float64), expected, atol=2e-4)


def test_a_permuted_pool_has_the_same_features_and_choice(whole, tmp_path):
    context, selector, features = whole
    other = less_context(order=list(range(13, -1, -1)))
    _, again = less_features(tmp_path, other)
    np.testing.assert_array_equal(again["lora_gradients"].rows[::-1], features["lora_gradients"].rows)
    pick = lambda c, f: selector.choose(c.pool, f, 5, generator(0, "choose"))  # noqa: E731
    assert pick(other, again).ids == pick(context, features).ids
    assert pick(other, again).scores == pick(context, features).scores


def test_a_scaled_gradient_keeps_its_plain_score_and_not_its_adam_score():
    zero = torch.full((8,), 1e-6)
    g = torch.linspace(-1e-3, 2e-3, 8)[None]
    for variant, same in (("none", True), ("official", False)):
        one, ten = (adam_feature(scale * g, zero, zero, variant=variant, step=1) for scale in (1, 10))
        assert (torch.nn.functional.cosine_similarity(one, ten) > 0.999999) == same


def test_variant_and_validation_change_the_key_and_the_seed_does_not(whole, tmp_path):
    context, _, _ = whole
    store = FeatureStore(tmp_path)
    key = lambda c, **g: store.key(LessSelector(gradients={**GRADIENTS, **g}).feature_specs()[0], c)  # noqa: E731
    assert key(context) != key(context, adam_variant="paper")
    other = less_context()
    other.validation = {"sums": context.validation["sums"]}
    assert key(context) != key(other)
    assert key(context) == key(less_context(seed=7))


def test_features_of_another_projection_are_computed_anew_and_refused_where_they_stand_in(whole, tmp_path):
    """Another seed of the signs is another feature beside the first. Its folder under the first one's name is an error, not rows
    that look alike: their cosines with the right ones mean nothing."""
    context, selector, features = whole
    (_, first), (other, second) = (less_features(tmp_path, context, projection_seed=seed) for seed in (0, 1))
    one, two = first["lora_gradients"], second["lora_gradients"]
    np.testing.assert_array_equal(one.rows, features["lora_gradients"].rows)
    assert str(one.extra["projection"]) != str(two.extra["projection"])
    cosines = (one.rows[:, :256].astype(float) * two.rows[:, :256]).sum(1)
    assert np.abs(cosines).max() < 0.5
    store, (spec,), (wrong,) = FeatureStore(tmp_path), selector.feature_specs(), other.feature_specs()
    right, foreign = store.path(spec, context), store.path(wrong, context)
    shutil.rmtree(right)
    shutil.copytree(foreign, right)
    with pytest.raises(
        FeatureDamaged, match=f"key is {store.key(wrong, context)}.*asked for is {store.key(spec, context)}.*other"
    ):
        compute([spec], context, store)


def test_other_signs_are_other_features(whole, monkeypatch):
    """A new version of the sign function renames the features: none of the old signs is ever read with them."""
    context, selector, _ = whole
    key = lambda: FeatureStore("unused").key(selector.feature_specs()[0], context)  # noqa: E731
    before = key()
    monkeypatch.setattr("baselines.less.PROJECTION_VERSION", 2)
    assert key() != before


def test_validation_is_checked_before_anything_is_trained(tmp_path):
    context = tiny_context(4, load_model=lambda: pytest.fail("the model was loaded"))
    with pytest.raises(ValueError, match="validation rows"):
        less_features(tmp_path, context)
    context.validation = {"leaky": [context.encoded[2]]}
    with pytest.raises(ValueError, match=f"rows of pool 'tiny', for example {context.pool.ids[2]}"):
        check_validation(context)
    context.validation = {"hollow": [Encoded("v", np.array([1, 2], np.int32), np.array([-100, -100], np.int32))]}
    with pytest.raises(ValueError, match="hollow"):
        check_validation(context)


def test_a_row_without_response_tokens_is_rejected_never_promoted(tmp_path):
    context = less_context(10)
    labels = np.full_like(context.encoded[4].labels, IGNORE_INDEX)
    encoded = list(context.encoded)
    encoded[4] = Encoded(encoded[4].id, encoded[4].input_ids, labels, True)
    context.encoded = encoded
    selector, features = less_features(tmp_path, context)
    chosen = selector.choose(context.pool, features, 9, generator(0, "choose"))
    assert chosen.rejected == {context.pool.ids[4]: "no_target_tokens"} and len(chosen.ids) == 9
    with pytest.raises(ValueError, match=r"budget of 10 rows, but only 9"):
        selector.choose(context.pool, features, 10, generator(0, "choose"))


def test_every_row_has_features_beyond_two_hundred(tmp_path):
    context = less_context(201)
    _, features = less_features(tmp_path, context, warmup_fraction="0.05", dim=64)
    assert features["lora_gradients"].rows.shape[0] == 201 and features["lora_gradients"].rows.any(axis=1).all()


def test_features_of_another_pool_size_are_refused(whole):
    context, selector, features = whole
    smaller = Pool("s", context.pool.examples[:5])
    with pytest.raises(ValueError, match="14 feature rows for a pool of 5"):
        selector.choose(smaller, features, 2, generator(0, "choose"))


def test_nonfinite_scores_are_rejected_with_a_reason():
    rows = np.zeros((4, 5), np.float32)
    rows[:, 0] = [0.1, np.nan, 0.3, -0.2]
    rows[3, -1] = LESS_REASONS.index("nonfinite")
    extra = {
        "validation": np.array([[1.0, 0.0, 0.0, 0.0]]),
        "subtask": np.zeros(1, int),
        "subtask_names": np.array(["a"]),
        "rates": np.ones(1),
        "projection": np.array("x"),
    }
    pool = Pool("toy", tuple(Example(str(i), "p", "r") for i in range(4)))
    chosen = LessSelector(gradients={}).choose(pool, {"lora_gradients": Feature(rows, extra)}, 2, generator(0, "choose"))
    assert chosen.ids == ("2", "0") and chosen.rejected == {"1": "nonfinite", "3": "nonfinite"}


def test_a_missing_checkpoint_is_an_error(tmp_path):
    with pytest.raises(FileNotFoundError, match="checkpoint-105"):
        load_checkpoint(tmp_path / "checkpoint-105.safetensors")
