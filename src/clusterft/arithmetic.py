"""Number formats and attention kernels: asked for by name, and refused where the device does not have them. Nothing falls back.

trainer.precision   float32 | bf16_autocast | bf16
trainer.tf32        true: float32 products on a GPU keep 10 bits of mantissa; CPUs and GPUs before Ampere have no such format
model.attention     eager | sdpa | flash_attention_2 (a GPU, half precision and the package flash-attn)
"""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import torch

PRECISIONS = ("float32", "bf16_autocast", "bf16")
AMPERE = (8, 0)


def check_arithmetic(trainer: Any, device: torch.device) -> None:
    """Raises ValueError if the trainer's number formats are unknown or not there on `device`."""
    if trainer.precision not in PRECISIONS:
        raise ValueError(f"trainer.precision={trainer.precision!r} is not one of {', '.join(PRECISIONS)}")
    capability = torch.cuda.get_device_capability(device) if device.type == "cuda" else None
    if trainer.tf32 and (capability is None or capability < AMPERE):
        raise ValueError(
            f"trainer.tf32=true: {_named(device)} has no TF32, only CUDA devices of compute capability 8.0 and above have; "
            "set trainer.tf32=false"
        )
    if trainer.precision != "float32" and capability is not None and capability < AMPERE:
        raise ValueError(f"trainer.precision={trainer.precision}: {_named(device)} has no bf16; set trainer.precision=float32")


def check_attention(model: Any, device: str) -> None:
    """Raises ValueError if `model.attention` cannot run on `device`; before anything is loaded."""
    if model.attention != "flash_attention_2":
        return
    remedy = "use model.attention=sdpa"
    if not device.startswith("cuda"):
        raise ValueError(f"model.attention=flash_attention_2 needs a CUDA device, runtime.device is {device}; {remedy}")
    if find_spec("flash_attn") is None:
        raise ValueError(f"model.attention=flash_attention_2 needs the package flash-attn, which is not installed; {remedy}")
    if model.weights_dtype != "bfloat16":
        raise ValueError(
            f"model.attention=flash_attention_2 needs bfloat16 weights, model.weights_dtype is {model.weights_dtype}; {remedy}"
        )


def _named(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else f"runtime.device={device.type}"
