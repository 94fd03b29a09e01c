"""Small rows, models and entries that the training tests share. Entries are called by name in spawned ranks."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import numpy as np
import torch
from omegaconf import OmegaConf
from safetensors.torch import save_file

from clusterft.config import SamplerConfig, TrainerConfig
from clusterft.distributed import Dist
from clusterft.records import IGNORE_INDEX, Encoded, Selection
from clusterft.trainer import TrainResult, train

VOCABULARY = 97


def trainer_config(**changes: Any) -> Any:
    """A TrainerConfig node: 2 epochs of 12-row steps over 4 workers in float32."""
    values = {
        "workers": 4,
        "epochs": 2,
        "global_batch": 12,
        "per_device_batch": 2,
        "max_length": 64,
        "optimizer": "adafactor",
        "learning_rate": 1e-2,
        "schedule": "linear",
        "warmup_steps": 2,
        "weight_decay": 0.0,
        "max_grad_norm": None,
        "precision": "float32",
        "tf32": False,
        "loss_reduction": "sample",
        "engine": "ddp",
        "gradient_checkpointing": False,
        "checkpoint_every_steps": None,
        "keep_last": 2,
    }
    return OmegaConf.structured(TrainerConfig(**values | changes))


def sampler_config(**changes: Any) -> Any:
    return OmegaConf.structured(
        SamplerConfig(**{"kind": "auto", "weights": "selection", "reselect_every_epochs": None} | changes)
    )


def tiny_model(seed: int = 0, dropout: float = 0.0) -> Any:
    """A two-layer Llama with random weights."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        attention_dropout=dropout,
        tie_word_embeddings=True,
    )
    return LlamaForCausalLM(config)


def rows(n: int, seed: int = 0) -> list[Encoded]:
    """n rows of 4 to 16 tokens, the first third masked."""
    rng = np.random.default_rng(seed)
    made = []
    for i in range(n):
        ids = rng.integers(1, VOCABULARY, int(rng.integers(4, 17))).astype(np.int32)
        labels = ids.copy()
        labels[: max(1, len(ids) // 3)] = IGNORE_INDEX
        made.append(Encoded(f"row{i:03d}", ids, labels))
    return made


def selection(encoded: list[Encoded], k: int | None = 4) -> Selection:
    """Clusters 0 ... k-1 in turn with unequal weights of mean 1; k=None: neither."""
    m = len(encoded)
    clusters = weights = None
    if k is not None:
        clusters = (np.arange(m) % k).astype(np.int32)
        weights = (1.0 + clusters) / (1.0 + clusters).mean()
    return Selection("test", "pool", tuple(r.id for r in encoded), m, 0, clusters=clusters, weights=weights)


def run_training(
    *,
    dist: Dist,
    out: str,
    n: int = 40,
    k: int | None = 4,
    trainer: dict | None = None,
    sampler: dict | None = None,
    kill_at: int | None = None,
    kill_signal: int = signal.SIGKILL,
    poison: dict | None = None,
    dropout: float = 0.0,
    **options: Any,
) -> TrainResult:
    """Trains the tiny model; rank 0 saves the weights as `out`/final.safetensors.

    kill_at  this rank-0 process sends itself `kill_signal` after that step
    poison   {"rank", "step", "how": "nan" | "raise" | "exit"}: that rank fails in that forward pass
    """
    encoded, model = rows(n), tiny_model(dropout=dropout)
    if poison is not None and poison["rank"] == dist.rank:
        _poison(model, poison)
    killer = None
    if kill_at is not None:
        killer = lambda line: os.kill(os.getpid(), kill_signal) if line["step"] == kill_at else None  # noqa: E731
    result = train(
        model,
        encoded,
        selection(encoded, k),
        trainer_config(**trainer or {}),
        sampler_config(**sampler or {}),
        dist=dist,
        out_dir=Path(out),
        seed=5,
        on_step=killer,
        **options,
    )
    if dist.is_main:
        save_file({n: p.detach().clone() for n, p in model.named_parameters()}, Path(out) / "final.safetensors")
    return result


def _poison(model: torch.nn.Module, poison: dict) -> None:
    """Makes the forward pass of one training call fail. Calls: one a micro-batch, only counted in training mode."""
    calls = {"n": 0}

    def hook(module: torch.nn.Module, arguments: Any, output: Any) -> Any:
        if not module.training:
            return output
        calls["n"] += 1
        if calls["n"] < poison["step"]:
            return output
        if poison["how"] == "raise":
            raise ValueError("this row is cursed")
        if poison["how"] == "exit":
            os._exit(7)
        output.last_hidden_state = output.last_hidden_state * float("nan")
        return output

    model.base_model.register_forward_hook(hook)
