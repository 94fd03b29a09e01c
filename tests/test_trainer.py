"""The loop: the same update on every layout, the formula by hand, failures that end all ranks."""

from __future__ import annotations

import math
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from training_kit import rows, run_training, sampler_config, selection, tiny_model, trainer_config

from clusterft import launch
from clusterft.distributed import RankFailure, single_process
from clusterft.loss import per_sample_loss
from clusterft.metrics_log import read_metrics
from clusterft.trainer import make_sampler, read_result, row_weights, train

KIT = "training_kit:run_training"


def weights_of(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "final.safetensors")


def same_bits(a: Path, b: Path) -> bool:
    left, right = weights_of(a), weights_of(b)
    return left.keys() == right.keys() and all(torch.equal(left[n], right[n]) for n in left)


def largest_gap(a: Path, b: Path) -> float:
    left, right = weights_of(a), weights_of(b)
    return max(float((left[n] - right[n]).abs().max()) for n in left)


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One process that emulates four workers: 40 rows, 2 epochs of 4 steps, the last of 4 rows."""
    out = tmp_path_factory.mktemp("one-process")
    run_training(dist=single_process(), out=str(out))
    return out


def losses(folder: Path) -> list[float]:
    return [line["loss"] for line in read_metrics(folder)]


@pytest.mark.parametrize(("processes", "carrier"), [(4, "shared"), (4, "messages"), (2, "shared"), (2, "messages")])
def test_real_ranks_equal_one_process_that_emulates_them(reference, tmp_path, processes, carrier):
    launch.run(KIT, {"out": str(tmp_path), "carrier": carrier}, processes=processes, threads=1)
    assert read_result(tmp_path).carrier == {"shared": "shared memory", "messages": "messages"}[carrier]
    assert same_bits(reference, tmp_path)
    assert losses(tmp_path) == losses(reference)


def test_blocks_that_are_no_subtrees_agree_up_to_rounding(reference, tmp_path):
    launch.run(KIT, {"out": str(tmp_path)}, processes=3, threads=1)
    assert largest_gap(reference, tmp_path) < 1e-6


def test_workers_and_micro_batches_do_not_change_the_update(reference, tmp_path):
    for i, change in enumerate([{"per_device_batch": 3}, {"workers": 3, "per_device_batch": 5}, {"workers": 8}, {"workers": 1}]):
        out = tmp_path / str(i)
        run_training(dist=single_process(), out=str(out), trainer=change)
        assert np.allclose(losses(out), losses(reference), rtol=0, atol=2e-5), change
        assert [line["order"] for line in read_metrics(out)] != [], change


def test_gradient_accumulated_in_one_buffer_equals_ordered_sum(reference, tmp_path, monkeypatch):
    from clusterft.exchange import LocalExchange

    plain = LocalExchange.__init__
    monkeypatch.setattr(LocalExchange, "__init__", lambda self, *a, **kw: plain(self, *a, **kw | {"ordered": False}))
    run_training(dist=single_process(), out=str(tmp_path))
    assert largest_gap(reference, tmp_path) < 1e-5


@pytest.mark.parametrize("reduction", ["sample", "token"])
def test_one_step_is_the_formula(tmp_path, reduction):
    """SGD, one step of 8 rows: theta - lr * grad of sum_i w_i l_i / sum_i w_i (T_i), from one plain backward over all rows."""
    encoded, cfg = (
        rows(8),
        trainer_config(
            optimizer="sgd",
            global_batch=8,
            epochs=1,
            warmup_steps=0,
            schedule="constant",
            learning_rate=0.1,
            loss_reduction=reduction,
        ),
    )
    chosen, model, twin = selection(encoded), tiny_model(), tiny_model()
    result = train(model, encoded, chosen, cfg, sampler_config(), dist=single_process(), out_dir=tmp_path, seed=1)
    total, divisor = 0.0, 0.0
    for row, weight in zip(encoded, chosen.weights, strict=True):
        ids, labels = torch.as_tensor(row.input_ids).long()[None], torch.as_tensor(row.labels).long()[None]
        loss, tokens = per_sample_loss(twin(input_ids=ids), labels, reduction)
        total = total + weight * loss[0]
        divisor += weight * (1 if reduction == "sample" else int(tokens[0]))
    (total / divisor).backward()
    assert result.losses[0] == pytest.approx(float(total.detach()) / divisor, abs=1e-6)
    for trained, plain in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.allclose(trained, plain.detach() - 0.1 * plain.grad, atol=1e-6)


def test_full_logits_and_target_logits_train_alike(reference, tmp_path):
    run_training(dist=single_process(), out=str(tmp_path), logits="full")
    assert np.allclose(losses(tmp_path), losses(reference), rtol=0, atol=1e-5)


def test_metrics_name_every_step_once_with_its_rate(reference):
    lines = read_metrics(reference)
    assert [line["step"] for line in lines] == list(range(1, 9))
    assert [line["epoch"] for line in lines] == [0] * 4 + [1] * 4
    expected = [0.0, 0.005, *(0.01 * (8 - s) / 6 for s in range(2, 8))]  # two warm-up steps from 0, then linear to 0 at step 8
    assert [line["lr"] for line in lines] == pytest.approx(expected)
    assert [line["rows"] for line in lines] == [12, 12, 12, 4] * 2
    result = read_result(reference)
    assert result.tokens == sum(line["tokens"] for line in lines) == 2 * sum(len(r) for r in rows(40))
    assert result.target_tokens == 2 * sum(r.n_target for r in rows(40))


def test_order_of_the_selection_does_not_matter(tmp_path):
    encoded = rows(24)
    chosen, flipped = selection(encoded), encoded[::-1]
    turned = type(chosen)(
        "test", "pool", chosen.ids[::-1], 24, 0, clusters=chosen.clusters[::-1].copy(), weights=chosen.weights[::-1].copy()
    )
    a, b = tiny_model(), tiny_model()
    cfg = trainer_config(epochs=1)
    train(a, encoded, chosen, cfg, sampler_config(), dist=single_process(), out_dir=tmp_path / "a", seed=1)
    train(b, flipped, turned, cfg, sampler_config(), dist=single_process(), out_dir=tmp_path / "b", seed=1)
    assert all(torch.equal(x, y) for x, y in zip(a.parameters(), b.parameters(), strict=True))


def test_gradient_clipping_bounds_the_update_and_reports_the_norm(tmp_path):
    encoded = rows(8)
    cfg = trainer_config(
        optimizer="sgd", global_batch=8, epochs=1, warmup_steps=0, learning_rate=1.0, max_grad_norm=0.01, schedule="constant"
    )
    model, before = tiny_model(), tiny_model()
    train(model, encoded, selection(encoded), cfg, sampler_config(), dist=single_process(), out_dir=tmp_path, seed=1)
    moved = math.sqrt(sum(float((a - b).square().sum()) for a, b in zip(model.parameters(), before.parameters(), strict=True)))
    assert moved == pytest.approx(0.01, rel=1e-3)
    assert read_metrics(tmp_path)[0]["grad_norm"] > 0.01


def test_a_step_without_target_tokens_says_so_and_changes_nothing(tmp_path):
    encoded = rows(4)
    silent = [type(r)(r.id, r.input_ids, np.full_like(r.labels, -100)) for r in encoded[:2]]
    mixed, cfg = [*silent, *encoded[2:]], trainer_config(global_batch=2, workers=1, epochs=1, warmup_steps=0)
    chosen, one = selection(mixed, None), single_process()
    plans = {seed: make_sampler(chosen, mixed, cfg, sampler_config(), one, seed).plan(0) for seed in range(50)}
    seed = next(seed for seed, plan in plans.items() if set(plan[0]) == {0, 1})
    model = tiny_model()
    first = train(model, mixed, chosen, cfg, sampler_config(), dist=one, out_dir=tmp_path, seed=seed, stop_after=1)
    assert first.losses == (None,)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), tiny_model().parameters(), strict=True))
    result = train(model, mixed, chosen, cfg, sampler_config(), dist=one, out_dir=tmp_path, seed=seed)
    assert [line.get("note") for line in read_metrics(tmp_path)] == ["no tokens", None]
    assert result.losses[1] > 0 and result.facts()["first_loss"] == result.losses[1]


def test_a_selection_without_any_target_token_is_refused(tmp_path):
    silent = [type(r)(r.id, r.input_ids, np.full_like(r.labels, -100)) for r in rows(4)]
    args = (tiny_model(), silent, selection(silent, None), trainer_config(), sampler_config())
    with pytest.raises(ValueError, match="every label is masked"):
        train(*args, dist=single_process(), out_dir=tmp_path, seed=1)


def test_weights_rules():
    chosen = selection(rows(8))
    assert row_weights(chosen, "selection").tolist() == pytest.approx([0.4, 0.8, 1.2, 1.6] * 2)
    assert row_weights(chosen, "none").tolist() == [1.0] * 8
    roots = row_weights(chosen, "sqrt")
    assert roots.mean() == pytest.approx(1) and roots[3] / roots[0] == pytest.approx(2)
    with pytest.raises(ValueError, match="selection, none, sqrt"):
        row_weights(chosen, "squared")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"engine": "deepspeed_zero3"}, "Adafactor needs the rows and columns of whole matrices"),
        ({"tf32": True}, "runtime.device=cpu has no TF32"),
        ({"engine": "horovod"}, "is not one of"),
        ({"precision": "bf16"}, "needs torch.bfloat16 weights, the model has torch.float32"),
        ({"precision": "fp8"}, "is not one of float32"),
        ({"optimizer": "lion"}, "adafactor, adamw, sgd"),
        ({"schedule": "wsd"}, "linear, cosine, constant"),
        ({"loss_reduction": "mean"}, "sample, token"),
        ({"max_length": 5}, "max_length=5"),
    ],
)
def test_settings_that_do_not_fit_are_refused_by_name(tmp_path, change, words):
    encoded = rows(8)
    with pytest.raises(ValueError, match=words):
        train(
            tiny_model(),
            encoded,
            selection(encoded),
            trainer_config(**change),
            sampler_config(),
            dist=single_process(),
            out_dir=tmp_path,
            seed=1,
        )


@pytest.mark.parametrize(("precision", "dtype"), [("bf16_autocast", torch.float32), ("bf16", torch.bfloat16)])
def test_half_precision_trains_close_to_float32(reference, tmp_path, precision, dtype):
    encoded, model = rows(40), tiny_model().to(dtype)
    train(
        model,
        encoded,
        selection(encoded),
        trainer_config(precision=precision),
        sampler_config(),
        dist=single_process(),
        out_dir=tmp_path,
        seed=5,
    )
    assert {p.dtype for p in model.parameters()} == {dtype}
    assert np.allclose(losses(tmp_path), losses(reference), atol=0.05)
    assert losses(tmp_path) != losses(reference)


@pytest.mark.parametrize("how", ["nan", "raise", "exit"])
def test_a_failing_rank_ends_all_ranks_within_seconds(tmp_path, how):
    started = time.monotonic()
    poison = {"rank": 2, "step": 2, "how": how}
    with pytest.raises(launch.WorkerError) as caught:
        launch.run(KIT, {"out": str(tmp_path), "poison": poison}, processes=4, threads=1)
    words = {
        "nan": "rank 2: the loss is nan in step",
        "raise": "rank 2: ValueError: this row is cursed",
        "exit": "rank 2: ended with exit code 7",
    }
    assert words[how] in str(caught.value)
    assert time.monotonic() - started < 25


def test_a_loss_that_is_not_finite_stops_one_process_too(tmp_path):
    with pytest.raises(RankFailure, match="the loss is nan in step 1, rows row"):
        run_training(dist=single_process(), out=str(tmp_path), poison={"rank": 0, "step": 1, "how": "nan"})
