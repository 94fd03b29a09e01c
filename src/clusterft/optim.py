"""Optimisers and learning-rate schedules, as the Hugging Face Trainer configures them.

In come names and numbers of `TrainerConfig`; out come a torch optimiser over (a share of) the parameters and a plain function
step -> learning rate. The schedule holds no state: a resumed run computes the same rates as an uninterrupted one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

import torch
from torch import nn

OPTIMIZERS = ("adafactor", "adamw", "sgd")
SCHEDULES = ("linear", "cosine", "constant")


def build_optimizer(name: str, parameters: Iterable[nn.Parameter], *, lr: float, weight_decay: float) -> torch.optim.Optimizer:
    """Adafactor as the Trainer sets it (no relative step, no parameter scaling; clip threshold 1, decay -0.8), AdamW or SGD.

    Adafactor is transformers' own, whose every tensor is updated apart from the others: ranks may share the tensors among them.
    Raises ValueError for an unknown name.
    """
    params = list(parameters)
    if name == "adafactor":
        from transformers.optimization import Adafactor

        return Adafactor(
            params,
            lr=lr,
            eps=(1e-30, 1e-3),
            clip_threshold=1.0,
            decay_rate=-0.8,
            beta1=None,
            weight_decay=weight_decay,
            scale_parameter=False,
            relative_step=False,
            warmup_init=False,
        )
    if name == "adamw":
        return torch.optim.AdamW(params, lr=lr, betas=(0.9, 0.999), eps=1e-8, weight_decay=weight_decay, foreach=False)
    if name == "sgd":
        return torch.optim.SGD(params, lr=lr, weight_decay=weight_decay, foreach=False)
    raise ValueError(f"trainer.optimizer={name!r} is not one of {', '.join(OPTIMIZERS)}")


def learning_rate(schedule: str, *, lr: float, warmup_steps: int, total_steps: int) -> Callable[[int], float]:
    """step (0-based) -> learning rate, as transformers' `get_scheduler`: linear warm-up from 0, then decay to 0 at the end.

    Raises ValueError for an unknown name or a negative warm-up.
    """
    if schedule not in SCHEDULES:
        raise ValueError(f"trainer.schedule={schedule!r} is not one of {', '.join(SCHEDULES)}")
    if warmup_steps < 0:
        raise ValueError(f"trainer.warmup_steps={warmup_steps} is negative")

    def at(step: int) -> float:
        if step < warmup_steps:
            return lr * (step / max(1, warmup_steps))
        if schedule == "constant":
            return lr
        progress = (step - warmup_steps) / max(1, total_steps - warmup_steps)
        if schedule == "linear":
            return lr * max(0.0, 1.0 - progress)
        return lr * max(0.0, 0.5 * (1.0 + math.cos(math.pi * progress)))

    return at
