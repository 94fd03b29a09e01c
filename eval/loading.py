"""A trained model as an evaluator wants it: weights of one stated type, on the asked device, with a fingerprint of its files.

In goes the checkpoint folder and the evaluation context; out come model and tokenizer. Training in bf16 autocast keeps
float32 weights; generation then uses a bfloat16 copy, which is what the paper's protocol evaluates and twice as fast on a
CPU. The type is said in every metric's note.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from eval.errors import EvaluationError

PRECISIONS = ("float32", "bf16_autocast", "bf16")
_CHUNK = 1 << 22


def weights_dtype(precision: str) -> torch.dtype:
    """The type of the weights that generate: float32 for float32, else bfloat16."""
    if precision not in PRECISIONS:
        raise EvaluationError(f"precision {precision!r} is not one of {', '.join(PRECISIONS)}")
    return torch.float32 if precision == "float32" else torch.bfloat16


def load(checkpoint_dir: Path, context: Any, dtype: torch.dtype) -> tuple[Any, Any]:
    """(model in evaluation mode, tokenizer). Raises EvaluationError for a folder without a model or a device that is not
    there.
    """
    from transformers import AutoModelForCausalLM, AutoTokenizer

    if not (checkpoint_dir / "config.json").is_file():
        raise EvaluationError(f"{checkpoint_dir} holds no config.json, so no model can be scored from it; train first")
    if context.device.startswith("cuda") and not torch.cuda.is_available():
        raise EvaluationError(f"device {context.device} was asked for and CUDA is not available; set runtime.device=cpu")
    trust = bool(context.model.trust_remote_code)
    with _quiet(not context.progress):
        model = AutoModelForCausalLM.from_pretrained(
            checkpoint_dir,
            dtype=dtype,
            attn_implementation=context.model.attention,
            trust_remote_code=trust,
            use_safetensors=True,
            local_files_only=True,
        )
    tokenizer = AutoTokenizer.from_pretrained(checkpoint_dir, trust_remote_code=trust, local_files_only=True)
    return model.to(context.device).eval(), tokenizer


def checkpoint_fingerprint(checkpoint_dir: Path) -> str:
    """16 hex digits over names and contents of weights, configuration and tokenizer files: what decides the generated text."""
    digest = hashlib.sha256()
    names = [
        p for p in sorted(checkpoint_dir.iterdir()) if p.suffix in (".safetensors", ".bin", ".json", ".jinja", ".model", ".txt")
    ]
    for path in names:
        digest.update(f"{path.name}\0{path.stat().st_size}\0".encode())
        with open(path, "rb") as f:
            while piece := f.read(_CHUNK):
                digest.update(piece)
    return digest.hexdigest()[:16]


@contextmanager
def threads(count: int) -> Iterator[None]:
    """torch computes with `count` threads inside, and with as many as before afterwards."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextmanager
def _quiet(wanted: bool) -> Iterator[None]:
    """No bar of transformers' own while weights load."""
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    if wanted:
        logging.disable_progress_bar()
    try:
        yield
    finally:
        if wanted and shown:
            logging.enable_progress_bar()
