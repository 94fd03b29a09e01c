"""The gradient-proxy pass: golden values, a slow twin, every layout, every head, any number of ranks."""

from __future__ import annotations

import json
import logging
import multiprocessing
import os
import signal
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.multiprocessing as mp
from transformers import (
    AutoModelForCausalLM,
    BloomConfig,
    CohereConfig,
    Gemma2Config,
    Gemma3TextConfig,
    GPTNeoXConfig,
    GraniteConfig,
    LlamaConfig,
    MistralConfig,
    Qwen2Config,
    Qwen3Config,
)

from clusterft.batching import plan_batches, row_of_labels, row_of_pair, run_batches, shared_beginning
from clusterft.config import ModelConfig
from clusterft.distributed import Dist
from clusterft.features import FeatureContext, FeatureStore, SingleProcess, compute
from clusterft.heads import HeadNotUnderstood, OutputHead
from clusterft.interfaces import FeatureSpec
from clusterft.packing import PackingUnsupported
from clusterft.proxy import ProxyParams, gradient_proxies
from clusterft.proxy_gradients import FactoredGradientPass, decoder_layers, tapped_linears
from clusterft.records import Encoded, Example, Pool, content_id

GOLDEN = Path(__file__).parent / "golden"
SHAPE = {"vocab_size": 101, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
GROUPED = {**SHAPE, "num_key_value_heads": 2}


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def llama():
    return AutoModelForCausalLM.from_pretrained(GOLDEN / "tiny_llama", dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def samples():
    return [(s["prompt_ids"], s["response_ids"]) for s in json.loads((GOLDEN / "proxy_samples.json").read_text())]


@pytest.fixture(scope="module")
def golden():
    return np.load(GOLDEN / "proxy_expected.npz")


def random_model(config) -> torch.nn.Module:
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config).eval()


def random_samples(n: int, vocabulary: int = 101) -> list[tuple[list[int], list[int]]]:
    rng = np.random.default_rng(5)
    return [
        (rng.integers(1, vocabulary, rng.integers(1, 9)).tolist(), rng.integers(1, vocabulary, rng.integers(1, 25)).tolist())
        for _ in range(n)
    ]


@torch.no_grad()
def slow_twin(model, samples) -> np.ndarray:
    """The formula, a sample at a time, from the model's own logits and hidden states."""
    rows = []
    for prompt, response in samples:
        ids = torch.tensor([prompt + response])
        out = model(input_ids=ids, output_hidden_states=True)
        hidden, p = out.hidden_states[-1][0].double(), out.logits[0].double().softmax(-1)
        terms = [(p[t - 1, ids[0, t]] - 1) * hidden[t - 1] for t in range(max(1, len(prompt)), ids.shape[1])]
        rows.append(torch.stack(terms).mean(0) if terms else torch.zeros(hidden.shape[1]))
    return torch.stack(rows).float().numpy()


@pytest.mark.parametrize("layout", ["packed", "right", "left"])
@pytest.mark.parametrize("token_budget", [1, 40, 8192])
def test_golden_values_in_every_layout_and_batch_size(llama, samples, golden, layout, token_budget):
    options = {"layout": layout, "token_budget": token_budget, "on_zero_rows": lambda rows: None}
    np.testing.assert_allclose(gradient_proxies(llama, samples, normalise=False, **options), golden["proxy"], atol=1e-5)
    np.testing.assert_allclose(gradient_proxies(llama, samples, **options), golden["proxy_normalised"], atol=1e-5)


def test_the_order_of_samples_does_not_change_a_bit(llama, samples):
    order = [4, 0, 7, 2, 5, 1, 6, 3]
    straight = gradient_proxies(llama, samples, on_zero_rows=lambda rows: None)
    permuted = gradient_proxies(llama, [samples[i] for i in order], on_zero_rows=lambda rows: None)
    np.testing.assert_array_equal(permuted, straight[order])


def test_a_sample_without_response_gives_a_zero_row_and_is_reported(llama, samples, caplog):
    reported: list[int] = []
    rows = gradient_proxies(llama, samples, on_zero_rows=reported.extend)
    (empty,) = [i for i, (_, response) in enumerate(samples) if not response]
    assert reported == [empty] and not rows[empty].any()
    with caplog.at_level(logging.WARNING):
        gradient_proxies(llama, samples)
    assert f"1 of {len(samples)} gradient proxies are zero (no response tokens), the first at {empty}" in caplog.text


def test_padding_comes_from_lengths_so_the_pad_id_may_be_a_token(llama):
    pad_like = [([0, 5, 0], [0, 0, 7, 0]), ([3], [9] * 12)]
    for layout in ("packed", "right", "left"):
        rows = gradient_proxies(llama, pad_like, normalise=False, layout=layout)
        np.testing.assert_allclose(rows, slow_twin(llama, pad_like), atol=1e-5)


def test_centring_subtracts_the_mean_of_rows_with_a_response(llama, samples, golden):
    rows = gradient_proxies(llama, samples, normalise=False, centre=True, on_zero_rows=lambda rows: None)
    answered = np.array([bool(response) for _, response in samples])
    expected = golden["proxy"] - golden["proxy"][answered].mean(0)
    np.testing.assert_allclose(rows[answered], expected[answered], atol=1e-5)
    assert not rows[~answered].any()


HEADS = {
    "llama_untied": LlamaConfig(**GROUPED, tie_word_embeddings=False),
    "llama_tied": LlamaConfig(**GROUPED, tie_word_embeddings=True),
    "gptneox": GPTNeoXConfig(**SHAPE),
    "qwen2": Qwen2Config(**GROUPED),
    "gemma2_softcaps_and_window": Gemma2Config(
        **GROUPED,
        head_dim=8,
        sliding_window=6,
        final_logit_softcapping=3.0,
        attn_logit_softcapping=2.0,
        attn_implementation="eager",
    ),
    "gemma3_mixed_layers": Gemma3TextConfig(
        **GROUPED,
        head_dim=8,
        sliding_window=6,
        layer_types=["sliding_attention", "full_attention"],
        bos_token_id=1,
        eos_token_id=2,
    ),
    "qwen3": Qwen3Config(**GROUPED, head_dim=8),
    "mistral_window": MistralConfig(**GROUPED, sliding_window=5, attn_implementation="eager"),
    "granite_scaled": GraniteConfig(**GROUPED, logits_scaling=4.0, initializer_range=0.3),
    "cohere_scaled": CohereConfig(**GROUPED, logit_scale=0.25, pad_token_id=0, bos_token_id=1, eos_token_id=2),
}


@pytest.mark.parametrize("name", HEADS)
@pytest.mark.parametrize("layout", ["packed", "right", "left"])
def test_every_known_head_agrees_with_the_formula_on_the_models_own_logits(name, layout):
    model, rows = random_model(HEADS[name]), random_samples(6)
    found = gradient_proxies(model, rows, normalise=False, layout=layout, token_budget=64)
    np.testing.assert_allclose(found, slow_twin(model, rows), atol=1e-5)


@pytest.mark.parametrize("name", ["llama_tied", "gptneox", "gemma2_softcaps_and_window", "gemma3_mixed_layers", "mistral_window"])
def test_a_shared_beginning_is_computed_once_and_changes_nothing(name):
    model = random_model(HEADS[name])
    rows = [([7, 8, 9, 10, 11, *prompt], response) for prompt, response in random_samples(6)]
    tokens: list[int] = []
    model.get_input_embeddings().register_forward_pre_hook(lambda module, args: tokens.append(args[0].numel()))
    shared = gradient_proxies(model, rows, normalise=False, token_budget=1000)
    apart = gradient_proxies(model, rows, normalise=False, token_budget=1000, share_beginning=False)
    np.testing.assert_allclose(shared, slow_twin(model, rows), atol=1e-5)
    np.testing.assert_allclose(shared, apart, atol=1e-5)
    batches = [n for n in tokens if n > 40]  # without the probes
    assert batches[0] == batches[1] - 5 * 5  # six rows, one beginning of five tokens


def test_shared_beginnings_by_hand():
    def beginning(*pairs):
        return shared_beginning(row_of_pair(p, r) for p, r in pairs)

    assert beginning(([1, 2, 3, 4], [5, 6]), ([1, 2, 9, 4], [5])) == 2
    assert beginning(([1, 2, 3], [4, 5]), ([1, 2, 3], [4, 6])) == 2  # position 2 predicts the first response token
    assert beginning(([1, 2, 3], [4]), ([], []), ([1, 2, 3, 4], [4])) == 2
    assert beginning(([1, 2, 3], [4]), ([], [1, 2])) == 0
    assert beginning(([1, 2, 3], [4])) == beginning() == 0


def test_the_models_attention_and_mode_are_put_back(llama):
    llama.train()
    gradient_proxies(llama, [([1], [2, 3])])
    assert llama.training and llama.config._attn_implementation == "sdpa"
    llama.eval()


def test_a_head_that_is_not_understood_is_refused_by_name(llama):
    class Twisted(type(llama)):
        def forward(self, *args, **kwargs):
            out = super().forward(*args, **kwargs)
            out.logits = out.logits * 1.5
            return out

    twisted = Twisted(llama.config).eval()
    with pytest.raises(HeadNotUnderstood, match="Twisted: its logits differ"):
        gradient_proxies(twisted, [([1], [2])])
    twisted.lm_head = torch.nn.Sequential(twisted.lm_head)
    with pytest.raises(HeadNotUnderstood, match="Twisted: the output head is Sequential"):
        gradient_proxies(twisted, [([1], [2])])


def test_a_model_that_packing_would_mix_is_refused_with_the_remedy():
    model = random_model(BloomConfig(vocab_size=101, hidden_size=32, n_layer=2, n_head=4))
    with pytest.raises(PackingUnsupported, match=r'BloomForCausalLM.*layout="right"'):
        gradient_proxies(model, [([1, 2], [3, 4])])
    rows = random_samples(4)
    np.testing.assert_allclose(gradient_proxies(model, rows, normalise=False, layout="right"), slow_twin(model, rows), atol=1e-5)


def test_bfloat16_is_a_copy_and_close_and_float32_from_bfloat16_is_refused(llama):
    rows = random_samples(6, 97)
    exact, half = (gradient_proxies(llama, rows, precision=p) for p in ("float32", "bfloat16"))
    assert llama.dtype == torch.float32
    assert (exact * half).sum(1).min() > 0.999
    assert np.abs(exact - half).max() > 0
    coarse = AutoModelForCausalLM.from_pretrained(GOLDEN / "tiny_llama", dtype=torch.bfloat16)
    with pytest.raises(ValueError, match=r"weights of LlamaForCausalLM are torch\.bfloat16"):
        gradient_proxies(coarse, rows, precision="float32")


@pytest.mark.parametrize("name", ["llama_tied", "gemma2_softcaps_and_window", "granite_scaled"])
def test_output_gradient_is_autograds_gradient_at_the_final_hidden_state(name):
    model, rows = random_model(HEADS[name]), random_samples(4)
    found = gradient_proxies(model, rows, normalise=False, proxy="output_gradient")
    both = gradient_proxies(model, rows, normalise=False, proxy="concat")
    for i, (prompt, response) in enumerate(rows):
        row = row_of_pair(prompt, response)
        hidden = model.base_model(input_ids=torch.tensor([prompt + response])).last_hidden_state[0].detach().requires_grad_()
        logits = hidden[row.places] @ model.get_output_embeddings().weight.T
        if name.startswith("gemma2"):
            logits = 3 * torch.tanh(logits / 3)
        if name.startswith("granite"):
            logits = logits / 4
        torch.nn.functional.cross_entropy(logits, torch.tensor(row.targets)).backward()
        u = hidden.grad.sum(0).detach().numpy()
        np.testing.assert_allclose(found[i], u, atol=1e-6)
        np.testing.assert_allclose(both[i, 32:], u / np.linalg.norm(u), atol=1e-5)
    np.testing.assert_allclose(both[:, :32], gradient_proxies(model, rows), atol=1e-5)


@pytest.mark.parametrize("name", ["llama_untied", "gptneox", "qwen2", "gemma2_softcaps_and_window"])
@pytest.mark.parametrize("proxy", ["lora_b", "last_layers"])
def test_factored_gradients_without_projection_are_the_true_gradients(name, proxy):
    """With identities for A and P the rows are autograd's gradients of the same matrices, sample by sample."""
    model, rows = random_model(HEADS[name]), random_samples(4)
    ready = FactoredGradientPass(model, proxy=proxy, layers=1, rank=None, seed=0)
    token_rows = [row_of_pair(p, r) for p, r in rows]
    found = np.split(ready.rows(token_rows), np.cumsum([tap.width for tap in ready.taps])[:-1], axis=1)
    linears = tapped_linears(list(decoder_layers(model))[-1:] if proxy == "last_layers" else decoder_layers(model), proxy)
    for i, row in enumerate(token_rows):
        model.zero_grad()
        logits = model(input_ids=torch.tensor(row.input_ids[None])).logits[0]
        torch.nn.functional.cross_entropy(logits[row.places], torch.tensor(row.targets)).backward()
        for part, linear in zip(found, linears, strict=True):
            np.testing.assert_allclose(part[i], linear.weight.grad.flatten().numpy(), atol=2e-6)
    ready.restore()
    assert all(p.requires_grad for p in model.parameters())


def test_factored_gradients_are_the_true_ones_between_their_factors(llama):
    rows = [row_of_pair(p, r) for p, r in random_samples(3, 97)]
    plain = FactoredGradientPass(llama, proxy="lora_b", layers=1, rank=None, seed=0)
    whole = plain.rows(rows)
    widths = [tap.width for tap in plain.taps]
    plain.restore()
    small = FactoredGradientPass(llama, proxy="lora_b", layers=1, rank=4, seed=0)
    expected = [
        np.einsum("bij,ik,jr->bkr", part.reshape(3, *tap_shape(tap)), tap.p.numpy(), tap.a.numpy()).reshape(3, -1)
        for part, tap in zip(np.split(whole, np.cumsum(widths)[:-1], axis=1), small.taps, strict=True)
    ]
    np.testing.assert_allclose(small.rows(rows), np.hstack(expected), rtol=1e-4, atol=1e-4)
    assert small.width == 3 * 4 * 16
    small.restore()
    through_the_face = gradient_proxies(llama, random_samples(3, 97), proxy="lora_b", rank=4, normalise=False)
    np.testing.assert_allclose(through_the_face, np.hstack(expected), rtol=1e-4, atol=1e-4)


def tap_shape(tap) -> tuple[int, int]:
    return tap.p.shape[0], tap.a.shape[0]


def test_factors_keep_inner_products_on_average(llama):
    rows = [row_of_pair(p, r) for p, r in random_samples(2, 97)]
    plain = FactoredGradientPass(llama, proxy="last_layers", layers=1, rank=None, seed=0)
    a, b = plain.rows(rows)
    plain.restore()
    found = []
    for seed in range(60):
        ready = FactoredGradientPass(llama, proxy="last_layers", layers=1, rank=4, seed=seed)
        x, y = ready.rows(rows)
        ready.restore()
        found.append(float(x @ y))
    assert np.mean(found) == pytest.approx(float(a @ b), abs=4 * np.std(found) / np.sqrt(60))


def test_gradient_signals_are_offered_packed_and_not_under_autocast(llama):
    for options, said in (
        ({"layout": "right"}, "runs packed, got"),
        ({"precision": "bf16_autocast"}, "runs in float32 or bfloat16"),
    ):
        with pytest.raises(ValueError, match=said):
            gradient_proxies(llama, [([1], [2])], proxy="lora_b", **options)
    with pytest.raises(ValueError, match="layers is 9, the model has 3"):
        gradient_proxies(llama, [([1], [2])], proxy="last_layers", layers=9)


def test_autocast_rounds_and_stays_close(llama):
    rows = random_samples(6, 97)
    exact, cast = (gradient_proxies(llama, rows, precision=p) for p in ("float32", "bf16_autocast"))
    assert (exact * cast).sum(1).min() > 0.999 and np.abs(exact - cast).max() > 0
    assert gradient_proxies(llama, rows, precision="bf16_autocast").dtype == np.float32


def test_a_surrounding_autocast_does_not_reach_the_pass(llama):
    rows = random_samples(6, 97)
    for proxy in ("paper", "lora_b"):
        expected = gradient_proxies(llama, rows, proxy=proxy)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert np.array_equal(gradient_proxies(llama, rows, proxy=proxy), expected)


def test_logits_in_chunks_are_logits_at_once(llama, monkeypatch):
    rows = random_samples(5, 97)
    whole = gradient_proxies(llama, rows, normalise=False)
    monkeypatch.setattr("clusterft.proxy_signals.LOGIT_BYTES", 3 * 97 * 4)
    np.testing.assert_allclose(gradient_proxies(llama, rows, normalise=False), whole, atol=1e-6)


def test_scaling_and_capping_by_hand():
    head = OutputHead(torch.tensor([[1.0, 0.0], [0.0, 2.0]]), scale=0.5, softcap=2.0)
    expected = [2 * np.tanh(0.5 * 3 / 2), 2 * np.tanh(0.5 * 8 / 2)]
    np.testing.assert_allclose(head.logits(torch.tensor([[3.0, 4.0]])).numpy()[0], expected, rtol=1e-6)


def test_plans_are_longest_first_and_within_budget():
    lengths = [3, 9, 0, 5, 5, 2]
    assert plan_batches(lengths, "abcdef", 10) == [[1], [3, 4], [0, 5]]
    assert plan_batches(lengths, "abcedf", 10) == [[1], [4, 3], [0, 5]]
    assert plan_batches(lengths, "abcdef", 10, "right") == [[1], [3, 4], [0, 5]]
    assert plan_batches([4, 3, 3], "abc", 10) == [[0, 1, 2]]
    assert plan_batches([4, 3, 3], "abc", 10, "right") == [[0, 1], [2]]
    assert plan_batches([20], "a", 10) == [[0]]
    with pytest.raises(ValueError, match="at least 1"):
        plan_batches([1], "a", 0)
    with pytest.raises(ValueError, match="'sideways' is not one of packed, right, left"):
        plan_batches([1], "a", 1, "sideways")


def test_rows_of_labels_by_hand():
    row = row_of_labels(np.array([5, 6, 7, 8, 9]), np.array([5, -100, 7, 8, -100]))
    assert (row.input_ids.tolist(), row.places.tolist(), row.targets.tolist()) == ([5, 6, 7], [1, 2], [7, 8])
    assert len(row_of_labels(np.array([5, 6]), np.array([5, -100]))) == 0
    assert len(row_of_labels(np.array([], int), np.array([], int))) == 0


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("CUDA out of memory"), MemoryError("no")])
def test_running_out_of_memory_halves_the_budget_says_so_and_goes_on(error, caplog):
    lengths, done = [4, 4, 4, 4, 2, 2], []

    def step(batch):
        if sum(lengths[i] for i in batch) > 9:
            raise error
        done.extend(batch)

    with caplog.at_level(logging.WARNING):
        assert run_batches(plan_batches(lengths, "abcdef", 16), lengths, 16, "packed", step) == 8
    assert done == [0, 1, 2, 3, 4, 5]
    assert "going on with 8 tokens" in caplog.text
    with pytest.raises(MemoryError, match="one sample of 4 tokens does not fit"):
        run_batches([[0]], lengths, 1, "packed", lambda batch: (_ for _ in ()).throw(error))
    with pytest.raises(RuntimeError, match="another fault"):
        run_batches([[0]], lengths, 1, "packed", lambda batch: (_ for _ in ()).throw(RuntimeError("another fault")))


def test_bad_options_are_named():
    with pytest.raises(ValueError, match="precision 'half' is not one of float32, bfloat16, bf16, bf16_autocast"):
        ProxyParams(precision="half")
    with pytest.raises(ValueError, match="proxy 'best' is not one of paper"):
        ProxyParams(proxy="best")


# -- into the store ------------------------------------------------------------------------------------------------------------


def make_context(dist, n: int = 23, token_budget: int = 64) -> FeatureContext:
    rows = [([7, 8, 9, *prompt], response) for prompt, response in random_samples(n, 97)]
    rows[3] = (rows[3][0], [])
    examples = tuple(Example(content_id(str(p), str(r)), str(p), str(r)) for p, r in rows)
    encoded = [
        Encoded(e.id, np.array(p + r, np.int32), np.array([-100] * len(p) + r, np.int32))
        for e, (p, r) in zip(examples, rows, strict=True)
    ]
    model = ModelConfig("tiny", "local", str(GOLDEN / "tiny_llama"), architecture="LlamaForCausalLM", weights_dtype="float32")
    return FeatureContext(
        pool=Pool("p", examples),
        encoded=encoded,
        model_cfg=model,
        tokenizer=None,
        template="alpaca",
        max_length=64,
        token_budget=token_budget,
        dist=dist,
        seed=0,
        load_model=lambda: AutoModelForCausalLM.from_pretrained(GOLDEN / "tiny_llama", dtype=torch.float32),
    )


def spec(**params) -> FeatureSpec:
    return FeatureSpec("proxy", "clusterft.proxy:extract_gradient_proxies", params)


def rank_main(rank: int, world: int, root: str, port: int, die: bool) -> None:
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", f"tcp://127.0.0.1:{port}", world_size=world, rank=rank)
    dist = Dist(rank, world, torch.device("cpu"))
    if die and rank == world - 1:
        from clusterft.feature_writer import RowWriter

        put = RowWriter.put

        def put_and_die(self, *args):
            put(self, *args)
            os.kill(os.getpid(), signal.SIGKILL)

        RowWriter.put = put_and_die
    compute([spec(centre=True)], make_context(dist), FeatureStore(root))
    torch.distributed.destroy_process_group()


def free_port() -> int:
    import socket

    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def spawn(world: int, root: Path, die: bool = False) -> None:
    """Ranks from a server that has imported what they need: seconds instead of tens of them."""
    multiprocessing.get_context("forkserver").set_forkserver_preload(["clusterft.proxy", "clusterft.distributed", "pytest"])
    mp.start_processes(rank_main, (world, str(root), free_port(), die), nprocs=world, start_method="forkserver")


def test_the_store_holds_what_the_in_memory_pass_returns(tmp_path, llama):
    context = make_context(SingleProcess())
    store = FeatureStore(tmp_path)
    feature = compute([spec()], context, store)["proxy"]
    rows = [(e.input_ids[: (e.labels == -100).sum()], e.input_ids[(e.labels == -100).sum() :]) for e in context.encoded]
    in_memory = gradient_proxies(llama, rows, token_budget=64, on_zero_rows=lambda rows: None)
    np.testing.assert_allclose(feature.rows, in_memory, atol=1e-6)
    assert store.manifest(spec(), context)["notes"]["zero_rows"] == [context.pool.ids[3]]
    assert not feature.rows[3].any()
    assert feature.cost.forward_passes == 22
    assert feature.cost.flops > 0 and feature.cost.cpu_seconds > 0 and feature.cost.peak_memory_gib > 0


def test_flops_by_hand(llama):
    from clusterft.proxy import ProxyPass

    ready = ProxyPass(llama)
    row = row_of_pair([1, 2, 3], [4, 5])  # 4 tokens go in, 2 are predicted
    body = sum(p.numel() for n, p in llama.model.named_parameters() if "embed" not in n)
    assert ready.flops([row]) == 2 * body * 4 + 2 * 3 * 32 * 16 + 2 * 97 * 32 * 2


@pytest.mark.parametrize("world", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_ranks_give_the_same_bits_as_one_process(tmp_path, world):
    alone = compute([spec(centre=True)], make_context(SingleProcess()), FeatureStore(tmp_path / "one"))["proxy"]
    spawn(world, tmp_path / "many")
    shared = FeatureStore(tmp_path / "many").load(spec(centre=True), make_context(SingleProcess()))
    assert np.asarray(shared.rows).tobytes() == np.asarray(alone.rows).tobytes()
    assert shared.cost.forward_passes == 22


def test_a_killed_pass_of_two_ranks_is_finished_by_one_to_the_same_bits(tmp_path):
    with pytest.raises(mp.ProcessExitedException):
        spawn(2, tmp_path / "killed", die=True)
    context = make_context(SingleProcess())
    resumed = compute([spec(centre=True)], context, FeatureStore(tmp_path / "killed"))["proxy"]
    alone = compute([spec(centre=True)], context, FeatureStore(tmp_path / "alone"))["proxy"]
    assert np.asarray(resumed.rows).tobytes() == np.asarray(alone.rows).tobytes()


def test_unknown_parameters_of_the_extractor_are_refused(tmp_path):
    with pytest.raises(TypeError, match="colour"):
        compute([spec(colour="red")], make_context(SingleProcess()), FeatureStore(tmp_path))
