"""The weighted loss is one number: by hand, case 15 over its ten layouts (float64, 1e-12), and against a slow twin."""

from __future__ import annotations

import json
from fractions import Fraction
from pathlib import Path

import pytest
import torch
from torch import nn

from clusterft import launch
from clusterft.carriers import MessageExchange, SharedExchange, choose_exchange
from clusterft.distributed import Dist, single_process
from clusterft.exchange import LocalExchange, TreeSum, plan_layout
from clusterft.loss import combine, per_sample_loss, step_denominator, target_loss, weighted_loss

CASE15 = Path(__file__).parent / "golden" / "cases" / "15-weighted-update-exact"
IGNORE = -100


def read(name):
    return json.loads((CASE15 / name).read_text())


SAMPLES, LAYOUTS, EXPECTED = read("samples.json"), read("layouts.json"), read("expected.json")
REDUCTIONS = {"sample": "sample_weighted", "token": "token_and_sample_weighted"}


class Scalar(nn.Module):
    """Case 15's model: one theta, loss of sample i = 0.5 (theta - target_i)^2 at each of its supervised tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.theta = nn.Parameter(torch.zeros((), dtype=torch.float64))

    def losses(self, samples, reduction):
        target = torch.tensor([s["target"] for s in samples], dtype=torch.float64)
        tokens = torch.tensor([s["supervised_tokens"] for s in samples])
        each = 0.5 * (self.theta - target) ** 2
        return (each if reduction == "sample" else each * tokens), tokens


def exact_weights(samples):
    return torch.tensor([float(Fraction(s["weight"])) for s in samples], dtype=torch.float64)


def denominator(reduction):
    return step_denominator(exact_weights(SAMPLES).tolist(), [s["supervised_tokens"] for s in SAMPLES], reduction)


def accumulate(model, batches, reduction, scale):
    total = 0.0
    for batch in batches:
        samples = [SAMPLES[i] for i in batch]
        if samples:
            losses, tokens = model.losses(samples, reduction)
            part = combine(
                losses, tokens, exact_weights(samples), reduction=reduction, denominator=denominator(reduction), scale=scale
            )
            part.backward()
            total += float(part.detach()) / scale
    return total


# -- by hand ----------------------------------------------------------------------------------------------------------


def by_hand():
    """2 rows, 3 tokens, vocabulary 2, logits (0, ln 3): probabilities 1/4 and 3/4. Row 0 predicts 1 then 0, row 1 only 1."""
    logits = torch.log(torch.tensor([1.0, 3.0], dtype=torch.float64)).expand(2, 3, 2)
    labels = torch.tensor([[IGNORE, 1, 0], [IGNORE, 1, IGNORE]])
    return logits, labels


def test_per_sample_loss_by_hand():
    logits, labels = by_hand()
    one, zero = -torch.log(torch.tensor(0.75)), -torch.log(torch.tensor(0.25))
    sums, tokens = per_sample_loss(logits, labels, "token")
    assert tokens.tolist() == [2, 1]
    assert sums.tolist() == pytest.approx([float(one + zero), float(one)])
    means, _ = per_sample_loss(logits, labels, "sample")
    assert means.tolist() == pytest.approx([float(one + zero) / 2, float(one)])


def test_weighted_loss_by_hand():
    logits, labels = by_hand()
    a, b = 0.2876820724517809, 1.3862943611198906  # -ln 3/4, -ln 1/4
    weights = torch.tensor([0.5, 1.5])
    assert float(weighted_loss(logits, labels, weights, reduction="sample")) == pytest.approx((0.5 * (a + b) / 2 + 1.5 * a) / 2)
    assert float(weighted_loss(logits, labels, weights, reduction="token")) == pytest.approx((0.5 * (a + b) + 1.5 * a) / 2.5)
    shifted = labels.clone()
    shifted[:, 0] = 1  # position 0 cannot be predicted: a label there changes nothing
    assert torch.equal(weighted_loss(logits, shifted, weights), weighted_loss(logits, labels, weights))


def test_rows_without_targets_count_in_neither_sum():
    logits, labels = by_hand()
    more = torch.cat([labels, torch.full((1, 3), IGNORE)])
    wider = torch.cat([logits, logits[:1]])
    for reduction in REDUCTIONS:
        plain = weighted_loss(logits, labels, torch.tensor([0.5, 1.5]), reduction=reduction)
        assert torch.equal(weighted_loss(wider, more, torch.tensor([0.5, 1.5, 9.0]), reduction=reduction), plain)
    assert step_denominator([0.5, 1.5, 9.0], [2, 1, 0], "sample") == 2.0
    assert step_denominator([0.5, 1.5, 9.0], [2, 1, 0], "token") == 2.5
    assert step_denominator([1.0], [0], "sample") == 0


def test_a_silent_or_empty_micro_batch_gives_zero_with_a_graph():
    logits = torch.randn(2, 3, 5, requires_grad=True)
    loss = weighted_loss(logits, torch.full((2, 3), IGNORE), torch.ones(2), denominator=4.0)
    loss.backward()
    assert float(loss.detach()) == 0 and torch.equal(logits.grad, torch.zeros_like(logits))
    empty = torch.randn(0, 3, 5, requires_grad=True)
    weighted_loss(empty, torch.zeros((0, 3), dtype=torch.long), torch.ones(0), denominator=4.0).backward()


def test_mistakes_are_refused():
    logits, labels = by_hand()
    with pytest.raises(ValueError, match="sample, token"):
        per_sample_loss(logits, labels, "mean")
    with pytest.raises(ValueError, match="do not fit labels"):
        per_sample_loss(logits[:, :2], labels)
    with pytest.raises(ValueError, match="denominator is 0"):
        weighted_loss(logits, labels, torch.ones(2), denominator=0.0)


# -- case 15 --------------------------------------------------------------------------------------------------------------


def test_case15_denominators_and_reference_values():
    assert denominator("sample") == pytest.approx(EXPECTED["weights_sum"])
    for reduction, name in REDUCTIONS.items():
        model = Scalar()
        losses, tokens = model.losses(SAMPLES, reduction)
        combine(losses, tokens, torch.ones(8), reduction=reduction, denominator=None).backward()
        assert float(model.theta.grad) == pytest.approx(EXPECTED["unweighted_for_reference"][reduction], abs=1e-12)
        assert Fraction(EXPECTED["gradient"][name]["exact"]) == pytest.approx(EXPECTED["gradient"][name]["value"])


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda one: one["name"])
def test_case15_one_number_for_every_layout(layout, reduction):
    """All ten layouts with their ranks in turn, gradients summed: exact to 1e-12, and so is the logged loss."""
    model, expected = Scalar(), float(Fraction(EXPECTED["gradient"][REDUCTIONS[reduction]]["exact"]))
    logged = sum(accumulate(model, batches, reduction, 1.0) for batches in layout["ranks"])
    assert float(model.theta.grad) == pytest.approx(expected, abs=1e-12)
    whole = Scalar()
    assert logged == pytest.approx(accumulate(whole, [list(range(8))], reduction, 1.0), abs=1e-12)
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    after = EXPECTED["theta_after_one_sgd_step_lr_0_1"][REDUCTIONS[reduction]]
    assert float(model.theta.detach()) == pytest.approx(after, abs=1e-7)


def case15_rank(*, dist: Dist, out: str) -> None:
    """All layouts of this world size: torch's DDP (scale = world, with no_sync) and both carriers (scale 1)."""
    from torch.nn.parallel import DistributedDataParallel as DDP

    found = {}
    for layout in LAYOUTS:
        if len(layout["ranks"]) != dist.world:
            continue
        batches = layout["ranks"][dist.rank]
        for reduction in REDUCTIONS:
            found[f"{layout['name']} {reduction} ddp"] = _through_ddp(DDP(Scalar()), batches, reduction, dist.world)
            for carrier in (SharedExchange, MessageExchange):
                found[f"{layout['name']} {reduction} {carrier.__name__}"] = _through_exchange(carrier, dist, batches, reduction)
    Path(out, f"{dist.world}-{dist.rank}.json").write_text(json.dumps(found))


def _through_ddp(model, batches, reduction, world):
    """Accumulation without synchronising but for the last micro-batch; an idle rank runs backward on an empty sum."""
    with model.no_sync():
        accumulate(model.module, batches[:-1], reduction, world)
    last = [SAMPLES[i] for i in batches[-1]]
    model.require_forward_param_sync = False
    losses, tokens = _ForwardThroughDDP(model)(last, reduction)
    combine(losses, tokens, exact_weights(last), reduction=reduction, denominator=denominator(reduction), scale=world).backward()
    return float(model.module.theta.grad)


class _ForwardThroughDDP:
    """DDP only synchronises gradients of a forward that went through it."""

    def __init__(self, model) -> None:
        model.module.forward = model.module.losses
        self._model = model

    def __call__(self, *arguments):
        return self._model(*arguments)


def _through_exchange(carrier, dist, batches, reduction):
    model = Scalar()
    exchange = carrier([("theta", model.theta)], dist, first_worker=dist.rank)
    exchange.begin_step()
    idle = not any(batches)
    if not idle:
        exchange.begin_worker()
        accumulate(model, batches, reduction, 1.0)
    exchange.end_worker(idle=idle)
    exchange.set_gradients(exchange.reduce())
    if exchange.owned:
        with torch.no_grad():
            model.theta.sub_(0.1 * model.theta.grad)
    exchange.publish()
    return float(model.theta.detach())


@pytest.mark.parametrize("world", [2, 3, 4, 8])
def test_case15_on_real_ranks(tmp_path, world):
    """Real gloo ranks: DDP's gradient, and theta on every rank after an SGD step through both carriers, to 1e-12."""
    launch.run("test_loss:case15_rank", {"out": str(tmp_path)}, processes=world, threads=1)
    checked = 0
    for rank in range(world):
        for name, value in json.loads((tmp_path / f"{world}-{rank}.json").read_text()).items():
            *_, reduction, way = name.split()
            exact = float(Fraction(EXPECTED["gradient"][REDUCTIONS[reduction]]["exact"]))
            assert value == pytest.approx(exact if way == "ddp" else -0.1 * exact, abs=1e-12), name
            checked += 1
    assert checked == world * 6 * sum(len(layout["ranks"]) == world for layout in LAYOUTS)


# -- the exchange's parts -------------------------------------------------------------------------------------------------


def test_tree_sum_adds_pairwise_whatever_block_it_starts_with():
    def spell(leaves, first=0):
        tree = TreeSum(lambda a, b: f"({a}{b})", first)
        for leaf in leaves:
            tree.push(leaf)
        return tree.total()

    assert spell("abcd") == "((ab)(cd))"
    assert spell("abcdef") == "(((ab)(cd))(ef))"
    assert spell([spell("ab"), spell("cd", 2)]) == spell("abcd")
    assert spell(["a", None, None, "d"]) == "(ad)"
    assert spell([None, None]) is None
    assert spell("bc", 1) == "(bc)", "no subtree: left over, added left to right"


def test_tensors_are_shared_out_whole_and_evenly():
    sizes = {"a": 8, "b": 5, "c": 4, "d": 3, "e": 2}
    layout = plan_layout([(n, nn.Parameter(torch.zeros(s))) for n, s in sizes.items()], 2)
    assert layout.numel == 22 and layout.shards == ((0, 11), (11, 22))
    assert sorted(layout.starts[i] for i in range(5)) == sorted(set(layout.starts))
    views = layout.views(torch.arange(22.0))
    assert sorted(float(x) for v in views for x in v) == list(range(22))
    with pytest.raises(ValueError, match="several dtypes"):
        plan_layout([("a", nn.Parameter(torch.zeros(1))), ("b", nn.Parameter(torch.zeros(1).double()))], 1)
    with pytest.raises(ValueError, match="no trainable"):
        plan_layout([], 1)


def test_carriers_are_chosen_by_where_the_ranks_are():
    cpu, far = Dist(0, 4, torch.device("cpu"), 0, 4), Dist(0, 4, torch.device("cpu"), 0, 2)
    assert choose_exchange(single_process()) is LocalExchange
    assert choose_exchange(cpu) is SharedExchange
    assert choose_exchange(cpu, "messages") is choose_exchange(far) is MessageExchange
    with pytest.raises(ValueError, match="one Linux host, found 2 of 4"):
        choose_exchange(far, "shared")
    with pytest.raises(ValueError, match="auto, shared, messages"):
        choose_exchange(cpu, "pigeons")


# -- logits at target positions -------------------------------------------------------------------------------------------


def small_model(kind):
    import transformers as tf

    sizes = {"vocab_size": 61, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2}
    torch.manual_seed(0)
    if kind == "gemma2":
        config = tf.Gemma2Config(**sizes, num_key_value_heads=1, head_dim=8, final_logit_softcapping=0.05, sliding_window=8)
        return tf.Gemma2ForCausalLM(config)
    if kind == "granite":
        return tf.GraniteForCausalLM(tf.GraniteConfig(**sizes, logits_scaling=7.0))
    return tf.LlamaForCausalLM(tf.LlamaConfig(**sizes, tie_word_embeddings=kind == "tied"))


@pytest.mark.parametrize("kind", ["tied", "untied", "gemma2", "granite"])
@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_target_logits_equal_full_logits_and_one_row_at_a_time(kind, reduction):
    from clusterft.heads import find_head

    model = small_model(kind).eval()
    ids = torch.randint(1, 61, (3, 9), generator=torch.Generator().manual_seed(1))
    labels, lengths = ids.clone(), [9, 6, 4]
    labels[:, :2] = IGNORE
    mask = torch.tensor([[1] * n + [0] * (9 - n) for n in lengths])
    labels[mask == 0] = IGNORE
    lean, counts = target_loss(model, find_head(model), ids, mask, labels, reduction)
    full, _ = target_loss(model, None, ids, mask, labels, reduction)
    assert counts.tolist() == [n - 2 for n in lengths]
    assert torch.allclose(lean, full, atol=1e-5)
    for i, n in enumerate(lengths):
        own = model(input_ids=ids[i : i + 1, :n], labels=labels[i : i + 1, :n]).loss * (1 if reduction == "sample" else n - 2)
        assert float(lean[i].detach()) == pytest.approx(float(own.detach()), abs=1e-5)
