"""Short trainings that some features need: S2L's proxy, LESS's LoRA warm-up, IFD's pre-experience.

In come a model, rows and a recipe; the model is trained in place, and `on_step` sees it after every update. One plain loop, full
replicas: the rows of a step are cut into micro-batches by tokens, dealt to ranks, and their gradients are added in the order of
the micro-batches. Any number of ranks therefore does the same arithmetic, to the last bit.

The order of rows is drawn over sorted ids: a permuted pool trains the same model.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from clusterft.batching import TokenRow, plan_batches, row_of_encoded
from clusterft.feature_context import DistLike
from clusterft.optim import build_optimizer, learning_rate
from clusterft.proxy_pass import PRECISIONS
from clusterft.records import Encoded
from clusterft.row_losses import LossPass
from clusterft.seeding import generator, seed_hash


@dataclass(frozen=True)
class Recipe:
    """How to train.

    batch_rows    rows an update, over all ranks
    warmup_ratio  share of the updates with a rising learning rate; rounded up
    precision     float32 | bf16_autocast: float32 weights; bf16 (= bfloat16): weights and products in bfloat16

    The loss is the mean over a step's rows of each row's mean over its response tokens.
    """

    epochs: int
    batch_rows: int
    learning_rate: float
    schedule: str
    warmup_ratio: float
    weight_decay: float
    precision: str
    seed: int

    def __post_init__(self) -> None:
        if self.epochs < 1 or self.batch_rows < 1:
            raise ValueError(f"epochs is {self.epochs} and batch_rows {self.batch_rows}; both must be at least 1")
        if self.precision not in PRECISIONS:
            raise ValueError(f"precision {self.precision!r} of a training is not one of {', '.join(PRECISIONS)}")

    def steps_per_epoch(self, n_rows: int) -> int:
        """Updates an epoch; the last one may have fewer rows. Independent of the number of ranks."""
        return -(-n_rows // self.batch_rows)

    def rates(self, n_rows: int) -> list[float]:
        """The learning rate of every update."""
        total = self.epochs * self.steps_per_epoch(n_rows)
        warmup = math.ceil(self.warmup_ratio * total)
        at = learning_rate(self.schedule, lr=self.learning_rate, warmup_steps=warmup, total_steps=total)
        return [at(step) for step in range(total)]


OnStep = Callable[[int, torch.optim.Optimizer], None]


def train_rows(
    model: Any,
    rows: Sequence[Encoded],
    recipe: Recipe,
    *,
    dist: DistLike,
    token_budget: int,
    on_step: OnStep | None = None,
    state_file: Path | None = None,
) -> list[float]:
    """Trains the parameters of `model` that require a gradient with AdamW; returns the loss of every update of this call.

    on_step(step, optimizer) is called after update `step` (1-based) on every rank. With `state_file` the state after each epoch
    is kept there and an interrupted training goes on from it, with the same result. Raises ValueError if a row has no response
    token.
    """
    bad = [r.id for r in rows if not r.n_target]
    if bad:
        raise ValueError(f"{len(bad)} of {len(rows)} rows to train on have no response token, for example id {bad[0]}")
    parameters = [p for p in model.parameters() if p.requires_grad]
    optimizer = build_optimizer("adamw", parameters, lr=recipe.learning_rate, weight_decay=recipe.weight_decay)
    rates = recipe.rates(len(rows))
    wanted = torch.bfloat16 if recipe.precision in ("bf16", "bfloat16") else torch.float32
    if model.dtype != wanted:
        raise ValueError(f"training in {recipe.precision} needs weights in {wanted}, the model has {model.dtype}; load it so")
    if not any(rates):
        raise ValueError(
            f"{len(rows)} rows make {len(rates)} updates, all of them warm-up at learning rate 0; "
            f"lower batch_rows, now {recipe.batch_rows}"
        )
    ready = LossPass(model, autocast=recipe.precision == "bf16_autocast")
    model.train()
    start = _resume(state_file, parameters, optimizer)
    losses = []
    for step, batch in enumerate(_batches(rows, recipe), 1):
        if step <= start:
            continue
        for group in optimizer.param_groups:
            group["lr"] = rates[step - 1]
        losses.append(_accumulate(ready, batch, parameters, dist, token_budget, recipe, step))
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if on_step is not None:
            on_step(step, optimizer)
        if state_file is not None and step % recipe.steps_per_epoch(len(rows)) == 0:
            _save(state_file, step, parameters, optimizer, dist)
    ready.restore()
    return losses


def _batches(rows: Sequence[Encoded], recipe: Recipe) -> Iterator[list[Encoded]]:
    """The rows of every update: each epoch a new permutation of the rows in the order of their ids."""
    ordered = sorted(rows, key=lambda r: r.id)
    for epoch in range(recipe.epochs):
        order = generator(recipe.seed, "warmup-order", epoch).permutation(len(ordered))
        for at in range(0, len(ordered), recipe.batch_rows):
            yield [ordered[i] for i in order[at : at + recipe.batch_rows]]


def _accumulate(
    ready: LossPass,
    batch: Sequence[Encoded],
    parameters: Sequence[nn.Parameter],
    dist: DistLike,
    token_budget: int,
    recipe: Recipe,
    step: int,
) -> float:
    """Leaves the gradient of the batch's mean loss in the parameters, the same on every rank. Returns the loss."""
    rows = [row_of_encoded(r) for r in batch]
    plan = plan_batches([len(r) for r in rows], [r.id for r in batch], token_budget)
    total = 0.0
    for first in range(0, len(plan), dist.world):
        mine: list[Tensor] | None = None
        if first + dist.rank < len(plan):
            seed = seed_hash(recipe.seed, "warmup-dropout", step, first + dist.rank)
            chosen = [rows[i] for i in plan[first + dist.rank]]
            mine = _gradients(ready, chosen, len(batch), parameters, seed)
        for owner in range(min(dist.world, len(plan) - first)):
            loss, *gradients = _from_rank(owner, mine, parameters, dist)
            for parameter, gradient in zip(parameters, gradients, strict=True):
                parameter.grad = gradient if parameter.grad is None else parameter.grad.add_(gradient)
            total += float(loss)
    return total


def _gradients(
    ready: LossPass, rows: Sequence[TokenRow], n_step: int, parameters: Sequence[nn.Parameter], seed: int
) -> list[Tensor]:
    """[this micro-batch's part of the loss, its gradient for every parameter]. Dropout depends on `seed` and nothing else."""
    device = ready.device
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.manual_seed(seed)
        loss = ready.losses(rows).sum() / n_step
        gradients = torch.autograd.grad(loss, parameters)
    return [loss.detach(), *gradients]


def _from_rank(owner: int, mine: list[Tensor] | None, parameters: Sequence[nn.Parameter], dist: DistLike) -> list[Tensor]:
    """The tensors of rank `owner`, on every rank."""
    if dist.world == 1:
        assert mine is not None
        return mine
    if owner == dist.rank:
        assert mine is not None
        tensors = [t.contiguous() for t in mine]
    else:
        tensors = [torch.empty((), device=parameters[0].device), *(torch.empty_like(p) for p in parameters)]
    for tensor in tensors:
        torch.distributed.broadcast(tensor, src=owner)
    return [t.clone() for t in tensors] if owner == dist.rank else tensors


def _save(file: Path, step: int, parameters: Sequence[nn.Parameter], optimizer: torch.optim.Optimizer, dist: DistLike) -> None:
    if dist.rank == 0:
        temporary = file.with_suffix(".tmp")
        torch.save({"step": step, "parameters": [p.detach() for p in parameters], "optimizer": optimizer.state_dict()}, temporary)
        os.replace(temporary, file)
    dist.barrier()


def _resume(file: Path | None, parameters: Sequence[nn.Parameter], optimizer: torch.optim.Optimizer) -> int:
    """Loads the kept state, if there is one. Returns the number of updates already made."""
    if file is None or not file.exists():
        return 0
    state = torch.load(file, map_location="cpu", weights_only=True)
    with torch.no_grad():
        for parameter, kept in zip(parameters, state["parameters"], strict=True):
            parameter.copy_(kept)
    optimizer.load_state_dict(state["optimizer"])
    return int(state["step"])
