"""Every engine trains like one process: the same losses, checkpoints that go on, refusals by name."""

from __future__ import annotations

import importlib.util
import signal
from pathlib import Path

import pytest
import torch
from omegaconf import OmegaConf
from safetensors.torch import load_file
from training_kit import run_training, trainer_config

from clusterft import launch
from clusterft.arithmetic import check_arithmetic, check_attention
from clusterft.deepspeed_config import deepspeed_config
from clusterft.distributed import Dist, Preempted, single_process
from clusterft.engine_fsdp import rows_of
from clusterft.engine_names import check_engine, deviations
from clusterft.metrics_log import read_metrics
from clusterft.optim import build_optimizer
from clusterft.sharded_adafactor import ShardedAdafactor
from clusterft.trainer import read_result

KIT = "training_kit:run_training"
ADAFACTOR = {"optimizer": "adafactor", "engine": "fsdp", "checkpoint_every_steps": 2}
ADAMW = {"optimizer": "adamw", "learning_rate": 1e-3, "max_grad_norm": 0.5, "weight_decay": 0.1}
needs_deepspeed = pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="deepspeed is not installed")
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def losses(folder: Path) -> list[float]:
    return [line["loss"] for line in read_metrics(folder)]


def same_training(one: Path, other: Path, tolerance: float = 1e-6) -> None:
    """Losses of all steps, gradient norms where clipped, and final weights agree."""
    assert losses(other) == pytest.approx(losses(one), rel=0, abs=tolerance)
    for a, b in zip(read_metrics(one), read_metrics(other), strict=True):
        assert a["order"] == b["order"]
        assert a.get("grad_norm", 0.0) == pytest.approx(b.get("grad_norm", 0.0), rel=1e-5)
    left, right = load_file(one / "final.safetensors"), load_file(other / "final.safetensors")
    assert left.keys() == right.keys()
    assert max(float((left[n] - right[n]).abs().max()) for n in left) < 2e-6


@pytest.fixture(scope="module")
def one_process(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Whole tensors in one process: Adafactor, and AdamW with clipping and decay."""
    made = {}
    for name, settings in (("adafactor", {}), ("adamw", ADAMW)):
        made[name] = tmp_path_factory.mktemp(name)
        run_training(dist=single_process(), out=str(made[name]), trainer=settings)
    return made


def test_fsdp_with_adafactor_equals_one_process_and_goes_on_with_another_number_of_ranks(one_process, tmp_path):
    """3 ranks, 4 workers: ranks have unequal work, tensors of 32 rows are cut unevenly, the last step has 4 rows. A signal to rank 0
    in step 3 makes a checkpoint; 2 ranks go on from it."""
    with pytest.raises(Preempted, match="after step 3 of 8"):
        options = {"out": str(tmp_path), "trainer": ADAFACTOR, "kill_at": 2, "kill_signal": int(signal.SIGTERM)}
        launch.run(KIT, options, processes=3, threads=1)
    launch.run(KIT, {"out": str(tmp_path), "trainer": ADAFACTOR}, processes=2, threads=1)
    same_training(one_process["adafactor"], tmp_path)
    result = read_result(tmp_path)
    assert (result.engine, result.carrier, result.resumed_from) == ("fsdp", "FSDP2", (3,))
    assert result.facts()["deviations"] == [
        "float32 weights and optimiser with products in float32; the paper trains bf16 weights"
    ]
    saved = load_file(tmp_path / "model" / "model.safetensors")
    trained = load_file(tmp_path / "final.safetensors")
    assert all(torch.equal(saved[name], value) for name, value in trained.items() if name in saved) and len(saved) > 10


def test_messages_in_many_pieces_give_the_same_bits(one_process, tmp_path):
    launch.run("test_engines:in_pieces", {"out": str(tmp_path)}, processes=4, threads=1)
    assert read_result(tmp_path).carrier == "messages"
    left, right = (load_file(folder / "final.safetensors") for folder in (one_process["adafactor"], tmp_path))
    assert all(torch.equal(left[name], right[name]) for name in left)


def in_pieces(*, dist: Dist, out: str) -> None:
    """Training over messages of at most 1,000 bytes: some 30 pieces a step, the last ones shorter, some ranks without a rest."""
    from clusterft import carriers

    carriers.MESSAGE_BYTES = 1000
    run_training(dist=dist, out=out, carrier="messages")


def test_fsdp_with_adamw_clipping_and_checkpointing_equals_one_process(one_process, tmp_path):
    settings = ADAMW | {"engine": "fsdp", "gradient_checkpointing": True}
    launch.run(KIT, {"out": str(tmp_path), "trainer": settings}, processes=2, threads=1)
    same_training(one_process["adamw"], tmp_path)


def test_fsdp_in_one_process_resumes_to_the_bit_and_leaves_a_plain_model(tmp_path):
    for folder, stops in (("a", (None,)), ("b", (3, None))):
        for stop in stops:
            run_training(dist=single_process(), out=str(tmp_path / folder), trainer=ADAFACTOR, dropout=0.1, stop_after=stop)
    a, b = (load_file(tmp_path / f / "final.safetensors") for f in "ab")
    assert losses(tmp_path / "a") == losses(tmp_path / "b")
    assert all(type(value) is torch.Tensor and torch.equal(value, b[name]) for name, value in a.items())
    with pytest.raises(ValueError, match=r"written by trainer.engine=fsdp, this run has ddp"):
        (tmp_path / "b" / "result.json").unlink()
        run_training(dist=single_process(), out=str(tmp_path / "b"), trainer=ADAFACTOR | {"engine": "ddp"}, dropout=0.1)


def test_a_loss_that_is_not_finite_on_one_rank_ends_fsdp_with_its_message(tmp_path):
    options = {"out": str(tmp_path), "trainer": ADAFACTOR, "poison": {"rank": 1, "step": 2, "how": "nan"}}
    with pytest.raises(launch.WorkerError, match="rank 1: the loss is nan in step 1"):
        launch.run(KIT, options, processes=2, threads=1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sharded_adafactor_on_one_rank_is_transformers_adafactor(dtype):
    torch.manual_seed(0)
    shapes = [(7, 5), (11,), (3, 8)]
    ours = [torch.nn.Parameter(torch.randn(s).to(dtype)) for s in shapes]
    theirs = [torch.nn.Parameter(p.detach().clone()) for p in ours]
    options = {"lr": 0.03, "weight_decay": 0.1}
    optimizers = (
        ShardedAdafactor(ours, [p.shape for p in ours], single_process(), **options),
        build_optimizer("adafactor", theirs, **options),
    )
    for _ in range(5):
        for p, q in zip(ours, theirs, strict=True):
            p.grad = torch.randn(p.shape).to(dtype)
            q.grad = p.grad.clone()
        for optimizer in optimizers:
            optimizer.step()
        for p, q in zip(ours, theirs, strict=True):
            assert torch.allclose(p, q, rtol=1e-2 if dtype == torch.bfloat16 else 1e-6, atol=1e-6)


def test_sharded_adafactor_refuses_tensors_of_three_axes():
    cube = torch.nn.Parameter(torch.zeros(2, 2, 2))
    with pytest.raises(ValueError, match=r"shape \(2, 2, 2\); use adamw"):
        ShardedAdafactor([cube], [cube.shape], single_process(), lr=1.0, weight_decay=0.0)


@pytest.mark.parametrize(("n", "world"), [(7, 3), (2, 4), (8, 4), (1, 2), (9, 4)])
def test_rows_of_a_rank_are_those_of_torch_chunk(n, world):
    chunks = [c.tolist() for c in torch.arange(n).chunk(world)]
    chunks += [[]] * (world - len(chunks))
    assert [list(range(n))[rows_of(n, world, rank)] for rank in range(world)] == chunks


# -- DeepSpeed ------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@needs_deepspeed
@pytest.mark.parametrize("engine", ["deepspeed_zero2", "deepspeed_zero3"])
def test_deepspeed_equals_one_process_and_resumes_with_as_many_ranks_only(one_process, tmp_path, engine):
    settings = ADAMW | {"engine": engine, "checkpoint_every_steps": 2}
    with pytest.raises(Preempted, match="after step 3 of 8"):
        options = {"out": str(tmp_path), "trainer": settings, "kill_at": 2, "kill_signal": int(signal.SIGTERM)}
        launch.run(KIT, options, processes=2, threads=1)
    with pytest.raises(launch.WorkerError, match=r"written by 2 processes, this run has 1; .*runtime.processes=2"):
        launch.run(KIT, {"out": str(tmp_path), "trainer": settings}, processes=1, threads=1)
    launch.run(KIT, {"out": str(tmp_path), "trainer": settings}, processes=2, threads=1)
    same_training(one_process["adamw"], tmp_path)
    assert read_result(tmp_path).resumed_from == (3,)


@needs_deepspeed
@pytest.mark.parametrize("engine", ["deepspeed_zero2", "deepspeed_zero3"])
@pytest.mark.parametrize("precision", ["float32", "bf16"])
def test_the_generated_configuration_is_one_that_deepspeed_takes(engine, precision):
    from deepspeed.runtime.config import DeepSpeedConfig

    trainer = trainer_config(engine=engine, precision=precision, max_grad_norm=1.5, per_device_batch=3)
    for on_gpu in (False, True):
        found = DeepSpeedConfig(deepspeed_config(trainer, on_gpu=on_gpu))
        assert found.zero_optimization_stage == int(engine[-1])
        assert (found.gradient_clipping, found.bfloat16_config.enabled) == (1.5, precision == "bf16")
        assert (found.train_micro_batch_size_per_gpu, found.managed_gradient_accumulation) == (3, False)
        assert found.zero_config.overlap_comm is (on_gpu and engine.endswith("2"))


def test_deepspeed_is_refused_for_adafactor_and_where_it_is_absent(monkeypatch):
    with pytest.raises(ValueError, match=r"flat vector.*trainer.engine=fsdp"):
        check_engine(trainer_config(engine="deepspeed_zero2", optimizer="adafactor"))
    monkeypatch.setattr("clusterft.engine_names.find_spec", lambda name: None)
    with pytest.raises(ValueError, match="needs the package deepspeed, which is not installed"):
        check_engine(trainer_config(engine="deepspeed_zero3", optimizer="adamw"))


# -- formats and kernels ---------------------------------------------------------------------------------------------------


def test_deviations_from_the_papers_optimiser_are_sentences():
    paper = trainer_config(precision="bf16")
    assert deviations(paper) == ()
    changed = trainer_config(**ADAMW | {"schedule": "cosine", "precision": "bf16", "engine": "deepspeed_zero3"})
    assert deviations(changed) == (
        "optimizer adamw instead of adafactor",
        "weight decay 0.1 instead of 0",
        "gradients clipped to norm 0.5; the paper does not clip",
        "cosine schedule instead of linear",
        "DeepSpeed updates float32 copies of the bf16 weights; the paper updates bf16 weights",
    )


def model_node(**changes):
    return OmegaConf.create({"attention": "flash_attention_2", "weights_dtype": "bfloat16"} | changes)


def test_what_a_device_lacks_is_refused_before_loading(monkeypatch):
    cpu = torch.device("cpu")
    with pytest.raises(ValueError, match=r"tf32=true: runtime.device=cpu has no TF32"):
        check_arithmetic(trainer_config(tf32=True), cpu)
    check_arithmetic(trainer_config(precision="bf16"), cpu)
    with pytest.raises(ValueError, match=r"needs a CUDA device, runtime.device is cpu; use model.attention=sdpa"):
        check_attention(model_node(), "cpu")
    check_attention(model_node(attention="sdpa"), "cpu")
    monkeypatch.setattr("clusterft.arithmetic.find_spec", lambda name: None)
    with pytest.raises(ValueError, match="needs the package flash-attn, which is not installed"):
        check_attention(model_node(), "cuda")
    monkeypatch.setattr("clusterft.arithmetic.find_spec", lambda name: name)
    check_attention(model_node(), "cuda")
    with pytest.raises(ValueError, match=r"needs bfloat16 weights, model.weights_dtype is float32"):
        check_attention(model_node(weights_dtype="float32"), "cuda")


@pytest.mark.parametrize("capability", [(7, 5), (8, 0)])
def test_tf32_and_bf16_need_ampere(monkeypatch, capability):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "T4")
    gpu = torch.device("cuda", 0)
    for settings in ({"tf32": True}, {"precision": "bf16"}):
        if capability >= (8, 0):
            check_arithmetic(trainer_config(**settings), gpu)
            continue
        with pytest.raises(ValueError, match="T4 has no"):
            check_arithmetic(trainer_config(**settings), gpu)


# -- on a GPU ------------------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("engine", ["ddp", "fsdp", "deepspeed_zero2", "deepspeed_zero3"])
def test_engines_on_a_gpu_equal_the_cpu(one_process, tmp_path, engine):
    if engine.startswith("deepspeed"):
        pytest.importorskip("deepspeed")
    launch.run(
        "test_engines:on_gpu",
        {"out": str(tmp_path), "trainer": ADAMW | {"engine": engine}},
        processes=1,
        threads=1,
        device="cuda",
    )
    assert losses(tmp_path) == pytest.approx(losses(one_process["adamw"]), abs=1e-4)


def on_gpu(*, dist: Dist, **options) -> None:
    """The kit's training with the model on this rank's device."""
    import training_kit

    make = training_kit.tiny_model
    training_kit.tiny_model = lambda **kw: make(**kw).to(dist.device)
    training_kit.run_training(dist=dist, **options)
