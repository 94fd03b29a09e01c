"""The engines by name, what each can be combined with, and where a run leaves the paper's optimiser. No torch here.

In comes a `TrainerConfig`; out come refusals (one sentence with the reason) and the deviations that a run's record states.
"""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

ENGINES = ("ddp", "fsdp", "deepspeed_zero2", "deepspeed_zero3")
PAPER = {"optimizer": "adafactor", "weight_decay": 0.0, "max_grad_norm": None, "schedule": "linear", "precision": "bf16"}


def is_deepspeed(engine: str) -> bool:
    return engine.startswith("deepspeed_")


def check_engine(cfg: Any) -> None:
    """Raises ValueError for an engine that is unknown, not installed, or cannot run the configured optimiser."""
    if cfg.engine not in ENGINES:
        raise ValueError(f"trainer.engine={cfg.engine!r} is not one of {', '.join(ENGINES)}")
    if not is_deepspeed(cfg.engine):
        return
    if cfg.optimizer == "adafactor":
        raise ValueError(
            f"trainer.engine={cfg.engine} cannot run trainer.optimizer=adafactor: ZeRO cuts all tensors as one flat vector, and Adafactor "
            "needs the rows and columns of whole matrices; use trainer.engine=fsdp, which cuts matrices by rows, or trainer.optimizer=adamw"
        )
    if find_spec("deepspeed") is None:
        raise ValueError(
            f"trainer.engine={cfg.engine} needs the package deepspeed, which is not installed: pip install deepspeed, or use fsdp"
        )


def deviations(cfg: Any) -> tuple[str, ...]:
    """Sentences on where this training leaves the paper's: Adafactor on bf16 weights, no clipping, no decay, linear schedule."""
    found = []
    if cfg.optimizer != PAPER["optimizer"]:
        found.append(f"optimizer {cfg.optimizer} instead of adafactor")
    if cfg.weight_decay != PAPER["weight_decay"]:
        found.append(f"weight decay {cfg.weight_decay:g} instead of 0")
    if cfg.max_grad_norm is not None:
        found.append(f"gradients clipped to norm {cfg.max_grad_norm:g}; the paper does not clip")
    if cfg.schedule != PAPER["schedule"]:
        found.append(f"{cfg.schedule} schedule instead of linear")
    if cfg.precision != PAPER["precision"]:
        products = "bf16" if cfg.precision == "bf16_autocast" else "float32"
        found.append(f"float32 weights and optimiser with products in {products}; the paper trains bf16 weights")
    elif is_deepspeed(cfg.engine):
        found.append("DeepSpeed updates float32 copies of the bf16 weights; the paper updates bf16 weights")
    return tuple(found)
