"""Measures the peak memory of real training in a process of its own: `python memory_kit.py '{"shape": {...}, "trainer": {...}}'`.

Prints one JSON line: resident bytes before the model, the peak, what the plan says without libraries. "path" instead of "shape": a model folder.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from clusterft.app import prepare_libraries

SHAPE = {
    "hidden_size": 512,
    "intermediate_size": 1376,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "vocab_size": 8192,
    "tie_word_embeddings": True,
}


def status(key: str) -> int:
    """Bytes of a line of /proc/self/status: VmRSS now, VmHWM at its highest."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(key + ":"):
            return int(line.split()[1]) * 1024
    raise KeyError(key)


def measure(settings: dict[str, Any]) -> dict[str, float]:
    """Trains two steps of full micro-batches in which every token is a target."""
    import numpy as np
    import torch
    from training_kit import sampler_config, selection, trainer_config
    from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

    from clusterft.distributed import single_process
    from clusterft.memory_plan import memory_plan
    from clusterft.records import Encoded
    from clusterft.trainer import train

    torch.set_num_threads(1)
    trainer = trainer_config(**{"workers": 1, "epochs": 1, "learning_rate": 1e-4, "per_device_batch": 4} | settings["trainer"])
    batch, length = trainer.per_device_batch, trainer.max_length
    train_on(tiny_rows(np, Encoded, batch, 8, 50), LlamaForCausalLM(LlamaConfig(**SHAPE | small())), trainer)  # warms up code
    before = status("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # VmHWM starts again
    if "path" in settings:
        model = AutoModelForCausalLM.from_pretrained(settings["path"], dtype=torch.float32)
    else:
        model = LlamaForCausalLM(LlamaConfig(**settings["shape"], max_position_embeddings=2048))
    shape = {key: getattr(model.config, key) for key in SHAPE}
    encoded = tiny_rows(np, Encoded, 2 * batch, length, shape["vocab_size"])
    chosen, out = selection(encoded, None), tempfile.TemporaryDirectory()
    trainer.global_batch = batch
    train(model, encoded, chosen, trainer, sampler_config(), dist=single_process(), out_dir=Path(out.name), seed=1)
    peak = status("VmHWM")
    planned = memory_plan(
        SimpleNamespace(architecture="LlamaForCausalLM", shape=shape, attention="sdpa"),
        trainer,
        SimpleNamespace(processes=1, device="cpu"),
    )
    return {"before": before, "measured": peak - before, "planned": planned.model, "line": planned.line()}


def small() -> dict[str, int]:
    return {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "vocab_size": 64}


def tiny_rows(np: Any, kind: Any, n: int, length: int, vocabulary: int) -> list[Any]:
    """n rows of `length` tokens, all of them targets."""
    rng = np.random.default_rng(0)
    made = [rng.integers(0, vocabulary, length).astype(np.int32) for _ in range(n)]
    return [kind(f"row{i:03d}", ids, ids.copy()) for i, ids in enumerate(made)]


def train_on(encoded: list[Any], model: Any, trainer: Any) -> None:
    from training_kit import sampler_config, selection

    from clusterft.distributed import single_process
    from clusterft.trainer import train

    with tempfile.TemporaryDirectory() as out:
        train(
            model, encoded, selection(encoded, None), trainer, sampler_config(), dist=single_process(), out_dir=Path(out), seed=1
        )


if __name__ == "__main__":
    prepare_libraries()
    print(json.dumps(measure(json.loads(sys.argv[1]))))
