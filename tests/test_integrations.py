"""The sampler and the loss inside real libraries on two gloo ranks: torch DDP, accelerate, transformers.Trainer, trl.SFTTrainer.

The yardstick is this project's own loop: the same rows, SGD at a constant rate, must end in the same weights to 1e-5.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from training_kit import rows, selection, tiny_model, trainer_config
from training_kit import sampler_config as make_sampler_config

from clusterft import launch
from clusterft.allocation import ClusterBatchSampler
from clusterft.distributed import Dist, single_process
from clusterft.integrations import ClusterTrainerMixin, WeightedCollator, WeightedRows, batch_denominator
from clusterft.loss import weighted_loss
from clusterft.trainer import train

SEED, N, BATCH, RATE = 11, 20, 8, 0.05  # 2 epochs of 8, 8 and 4 rows


def as_torchrun(dist: Dist) -> None:
    """What torchrun would have set: accelerate reads it even though the process group exists already."""
    os.environ |= {"RANK": str(dist.rank), "LOCAL_RANK": str(dist.rank), "WORLD_SIZE": str(dist.world)}
    os.environ |= {"LOCAL_WORLD_SIZE": str(dist.world), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29501"}
    os.environ["ACCELERATE_USE_CPU"] = "true"


def as_dicts() -> list[dict[str, list[int]]]:
    return [{"input_ids": r.input_ids.tolist(), "labels": r.labels.tolist()} for r in rows(N)]


def collate(batch: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    longest = max(len(row["input_ids"]) for row in batch)

    def pad(key: str, value: int) -> torch.Tensor:
        return torch.tensor([list(row[key]) + [value] * (longest - len(row[key])) for row in batch])

    mask = torch.tensor([[1] * len(r["input_ids"]) + [0] * (longest - len(r["input_ids"])) for r in batch])
    return {"input_ids": pad("input_ids", 0), "labels": pad("labels", -100), "attention_mask": mask}


def save(model: torch.nn.Module, path: Path) -> None:
    save_file({n: p.detach().clone() for n, p in model.named_parameters()}, path)


@pytest.fixture(scope="module", params=["sample", "token"])
def yardstick(request, tmp_path_factory) -> tuple[str, dict[str, torch.Tensor]]:
    cfg = trainer_config(
        workers=2,
        global_batch=BATCH,
        optimizer="sgd",
        learning_rate=RATE,
        schedule="constant",
        warmup_steps=0,
        loss_reduction=request.param,
    )
    model, encoded, out = tiny_model(), rows(N), tmp_path_factory.mktemp("own")
    for row in range(N):  # the loops below know positions, not ids: keep the canonical order the same
        assert encoded[row].id == f"row{row:03d}"
    train(model, encoded, selection(encoded), cfg, make_sampler_config(), dist=single_process(), out_dir=out, seed=SEED)
    return request.param, {n: p.detach().clone() for n, p in model.named_parameters()}


def gap(found: Path, expected: dict[str, torch.Tensor]) -> float:
    weights = load_file(found)
    return max(float((weights[n] - expected[n]).abs().max()) for n in expected)


# -- loops that run in the ranks ------------------------------------------------------------------------------------------


def own_sampler(**layout: Any) -> ClusterBatchSampler:
    return ClusterBatchSampler(selection(rows(N)).clusters, global_batch=BATCH, micro_batch=2, seed=SEED, **layout)


def torch_loop(*, dist: Dist, out: str, reduction: str) -> None:
    """Plain torch: DDP, a DataLoader, one synchronisation a step."""
    from torch.nn.parallel import DistributedDataParallel as DDP
    from torch.utils.data import DataLoader

    model = DDP(tiny_model())
    sampler = own_sampler(rank=dist.rank, world=dist.world, idle="empty")
    data = WeightedRows(as_dicts(), selection(rows(N)).weights)
    loader = DataLoader(data, batch_sampler=sampler, collate_fn=WeightedCollator(collate))
    for epoch in range(2):
        sampler.set_epoch(epoch)
        stream = iter(loader)
        for step in sampler.plan(epoch):
            batches = [next(stream) for _ in sampler.step_batches(step)]
            divisor = dist.all_reduce_sum(batch_denominator(batches, reduction))
            model.zero_grad()
            for i, batch in enumerate(batches):
                model.require_backward_grad_sync = i == len(batches) - 1
                weights, labels = batch.pop("row_weights"), batch.pop("labels")
                loss = weighted_loss(model(**batch), labels, weights, reduction=reduction, denominator=divisor, scale=dist.world)
                loss.backward()
            with torch.no_grad():
                for p in model.parameters():
                    p -= RATE * p.grad
    if dist.is_main:
        save(model.module, Path(out, "final.safetensors"))


def accelerate_loader(*, dist: Dist, out: str) -> None:
    """What arrives after `prepare`, over two epochs, and after `skip_first_batches` in epoch 1."""
    as_torchrun(dist)
    from accelerate import Accelerator, skip_first_batches
    from torch.utils.data import DataLoader

    accelerator = Accelerator(cpu=True)
    assert accelerator.num_processes == dist.world
    batches = own_sampler(world=dist.world).interleaved()
    loader = accelerator.prepare(DataLoader(list(range(N)), batch_sampler=batches, collate_fn=list))
    seen = {"0": list(loader), "1": list(loader)}
    loader.set_epoch(0)
    seen["again"] = list(loader)
    rest = skip_first_batches(loader, 2)
    rest.set_epoch(1)
    batches.set_epoch(1)
    seen["resumed"] = list(rest)
    Path(out, f"{dist.rank}.json").write_text(json.dumps(seen))


def hf_loop(*, dist: Dist, out: str, kind: str, reduction: str) -> None:
    """Two epochs; then a second trainer that resumes from the checkpoint in the middle of epoch 1."""
    as_torchrun(dist)
    save_steps = 4
    first = _hf_trainer(kind, Path(out), reduction, save_steps)
    first.train()
    if dist.is_main:
        save(first.accelerator.unwrap_model(first.model), Path(out, "final.safetensors"))
    second = _hf_trainer(kind, Path(out), reduction, save_steps)
    second.train(resume_from_checkpoint=str(Path(out, "checkpoint-4")))
    if dist.is_main:
        save(second.accelerator.unwrap_model(second.model), Path(out, "resumed.safetensors"))
        steps = [entry["step"] for entry in second.state.log_history if "loss" in entry]
        Path(out, "steps.json").write_text(json.dumps([steps, [e["loss"] for e in second.state.log_history if "loss" in e]]))


def _hf_trainer(kind: str, out: Path, reduction: str, save_steps: int) -> Any:
    import datasets

    datasets.disable_progress_bars()
    common = {
        "output_dir": str(out),
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 2,
        "num_train_epochs": 2,
        "learning_rate": RATE,
        "lr_scheduler_type": "constant",
        "optim": "sgd",
        "max_grad_norm": 0.0,
        "seed": SEED,
        "save_strategy": "steps",
        "save_steps": save_steps,
        "logging_steps": 1,
        "report_to": [],
        "use_cpu": True,
        "disable_tqdm": True,
        "dataloader_pin_memory": False,
    }
    data = datasets.Dataset.from_list(as_dicts())
    if kind == "sft":
        from trl import SFTConfig, SFTTrainer

        class Mine(ClusterTrainerMixin, SFTTrainer):
            pass

        tokens_already = {"dataset_kwargs": {"skip_prepare_dataset": True}, "max_length": None}
        args = SFTConfig(**common, **tokens_already, bf16=False, gradient_checkpointing=False)
        extra = {"processing_class": _tokenizer()}
        made = Mine(model=tiny_model(), args=args, train_dataset=data, data_collator=collate, **extra)
    else:
        from transformers import Trainer, TrainingArguments

        class Mine(ClusterTrainerMixin, Trainer):
            pass

        made = Mine(model=tiny_model(), args=TrainingArguments(**common), train_dataset=data, data_collator=collate)
    chosen = selection(rows(N))
    made.balance(chosen.clusters, chosen.weights, loss_reduction=reduction)
    return made


def _tokenizer() -> Any:
    """SFTTrainer insists on one; the rows are tokens already."""
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    words = {f"w{i}": i for i in range(97)}
    inner = Tokenizer(models.WordLevel(words, unk_token="w0"))
    return PreTrainedTokenizerFast(tokenizer_object=inner, pad_token="w0", eos_token="w1")


# -- tests ----------------------------------------------------------------------------------------------------------------


def test_plain_torch_loop_ends_in_the_same_weights(yardstick, tmp_path):
    reduction, expected = yardstick
    launch.run("test_integrations:torch_loop", {"out": str(tmp_path), "reduction": reduction}, processes=2, threads=1)
    assert gap(tmp_path / "final.safetensors", expected) < 1e-5


@pytest.mark.parametrize("kind", ["trainer", pytest.param("sft", marks=pytest.mark.slow)])
def test_hf_trainers_end_in_the_same_weights_also_after_a_resume_in_epoch_one(yardstick, tmp_path, kind):
    reduction, expected = yardstick
    if kind == "sft":
        pytest.importorskip("trl", reason="TRL is a development requirement")
    options = {"out": str(tmp_path), "kind": kind, "reduction": reduction}
    launch.run("test_integrations:hf_loop", options, processes=2, threads=1)
    assert gap(tmp_path / "final.safetensors", expected) < 1e-5
    assert gap(tmp_path / "resumed.safetensors", expected) < 1e-5
    steps, losses = json.loads((tmp_path / "steps.json").read_text())
    assert steps == [1, 2, 3, 4, 5, 6] and all(np.isfinite(losses))


@pytest.mark.parametrize("world", [1, 2, 4])
def test_case12_accelerate_prepare_keeps_the_global_batches_and_the_epochs(tmp_path, world):
    launch.run("test_integrations:accelerate_loader", {"out": str(tmp_path)}, processes=world, threads=1)
    seen = [json.loads((tmp_path / f"{r}.json").read_text()) for r in range(world)]
    sampler = own_sampler(world=world)
    for epoch in (0, 1):
        expected = [list(sampler.for_rank(r).batches(epoch)) for r in range(world)]
        assert [s[str(epoch)] for s in seen] == expected
        assert sorted(i for s in seen for b in s[str(epoch)] for i in b) == list(range(N))
    assert [s["again"] for s in seen] == [s["0"] for s in seen] != [s["1"] for s in seen]
    assert [s["resumed"] for s in seen] == [s["1"][2:] for s in seen]


def test_an_idle_rank_gets_a_silent_row():
    data = WeightedRows(as_dicts(), selection(rows(N)).weights)
    batch = WeightedCollator(collate)(data.__getitems__([]))
    assert batch["row_weights"].tolist() == [0.0] and (batch["labels"] == -100).all()
    assert float(batch_denominator([batch], "sample")) == 0
    with pytest.raises(ValueError, match="20 rows with 3 weights"):
        WeightedRows(as_dicts(), [1.0, 1.0, 1.0])


def test_layouts_that_fit_in_the_first_epoch_only_are_refused() -> None:
    """Sizes one apart: whose turn it is changes with the epoch, and with it how many micro-batches a rank needs."""

    class Host(ClusterTrainerMixin):
        """What `balance` reads of a Trainer on the first of two ranks."""

        def __init__(self, epochs: float, max_steps: int) -> None:
            self.train_dataset, self.args = (
                range(25),
                SimpleNamespace(
                    per_device_train_batch_size=2,
                    world_size=2,
                    gradient_accumulation_steps=1,
                    process_index=0,
                    seed=1,
                    data_seed=None,
                    num_train_epochs=epochs,
                    max_steps=max_steps,
                ),
            )

        def add_callback(self, callback: Any) -> None:
            self.callback = callback

    clusters = np.repeat([0, 1], [13, 12])
    Host(1.0, -1).balance(clusters)
    Host(9.0, 7).balance(clusters)
    for epochs, steps in ((2.0, -1), (1.0, 8)):
        with pytest.raises(ValueError, match=r"steps of these 2 epochs need \[1, 2\] micro-batches a rank"):
            Host(epochs, steps).balance(clusters)
