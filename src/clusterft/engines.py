"""Engines of data parallelism: how weights, gradients and optimiser state lie on the ranks (`trainer.engine`).

    ddp              whole weights on every rank, gradients summed in one fixed order, optimiser shared by whole tensors (exchange)
    fsdp             torch's FSDP2: every tensor cut by rows, gathered layer by layer (engine_fsdp)
    deepspeed_zero2  DeepSpeed: optimiser and gradients cut, weights whole (engine_deepspeed)
    deepspeed_zero3  DeepSpeed: weights cut as well

All of them sum gradients over ranks, so that the update is that of the formula in `loss`; none averages. Here are the face that the training
step sees, the engine `ddp`, and what may be combined with what.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from clusterft.accelerated import make_accelerator
from clusterft.carriers import choose_exchange
from clusterft.distributed import Dist
from clusterft.engine_names import check_engine
from clusterft.heads import OutputHead
from clusterft.loss import combine, target_loss
from clusterft.optim import build_optimizer

Writers = dict[str, Callable[[Path], Any]]


class Engine(ABC):
    """What a training step needs. Everything but `begin_worker` and `end_worker` is collective.

    name       as in the configuration
    carrier    how it is carried, for the result
    lockstep   forward and backward are collective too: all ranks must run equally many micro-batches
    n_tensors  trainable parameters
    """

    name: str
    carrier: str
    lockstep = False
    n_tensors: int

    def step_context(self) -> AbstractContextManager:
        """Around all micro-batches of one step."""
        return nullcontext()

    def begin_step(self) -> None:  # noqa: B027  (nothing to do is a fine answer)
        """Before the first micro-batch of a step."""

    def begin_worker(self) -> None:  # noqa: B027  (nothing to do is a fine answer)
        """Before the first micro-batch of a worker that has one."""

    def end_worker(self, *, idle: bool) -> None:  # noqa: B027  (nothing to do is a fine answer)
        """After the last micro-batch of a worker."""

    @abstractmethod
    def loss(self, ids: Tensor, mask: Tensor | None, labels: Tensor, weights: Tensor, denominator: float) -> Tensor:
        """This micro-batch's part of the step's loss (see loss.combine)."""

    @abstractmethod
    def backward(self, loss: Tensor) -> None:
        """Adds its gradient to the step's."""

    @abstractmethod
    def update(self, rate: float, mark: Callable[[], None]) -> float | None:
        """Sums over ranks, clips, steps; returns the norm where it clips. Calls `mark` after the sum and after the optimiser."""

    @abstractmethod
    def writers(self) -> Writers:
        """What this rank writes into a checkpoint: file name -> function(path)."""

    @abstractmethod
    def load(self, path: Path) -> None:
        """Puts weights and optimiser state of a checkpoint back. Raises ValueError if they do not fit."""

    def finish(self) -> None:  # noqa: B027  (nothing to do is a fine answer)
        """Gives the caller's model the trained weights as plain parameters."""

    def close(self) -> None:  # noqa: B027  (nothing to do is a fine answer)
        """Frees what the engine holds; not collective, and also called after an error."""


def make_engine(model: nn.Module, head: OutputHead | None, cfg: Any, dist: Dist, *, first_worker: int, carrier: str) -> Engine:
    """The engine that `trainer.engine` names. Raises ValueError for one that is unknown, absent or does not fit the settings."""
    check_engine(cfg)
    if cfg.engine == "fsdp":
        from clusterft.engine_fsdp import FsdpEngine

        return FsdpEngine(model, head, cfg, dist)
    if cfg.engine.startswith("deepspeed"):
        from clusterft.engine_deepspeed import DeepSpeedEngine

        return DeepSpeedEngine(model, head, cfg, dist)
    return ReplicatedEngine(model, head, cfg, dist, first_worker=first_worker, carrier=carrier)


def trainable(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """Names and trainable parameters in the model's order, tied ones once."""
    return [(name, p) for name, p in model.named_parameters() if p.requires_grad]


def check_names(path: Path, found: set[str], expected: set[str]) -> None:
    """Raises ValueError unless a checkpoint's parameters are the model's."""
    if found != expected:
        raise ValueError(f"{path}: its parameters are not those of this model, for example {min(found ^ expected)}")


class ReplicatedEngine(Engine):
    """`ddp`: precision and backward by accelerate; see exchange for the order of sums and who updates what."""

    name = "ddp"

    def __init__(
        self, model: nn.Module, head: OutputHead | None, cfg: Any, dist: Dist, *, first_worker: int, carrier: str
    ) -> None:
        self.model, self.head, self.cfg, self.dist = model, head, cfg, dist
        self.accelerator = make_accelerator(cfg.precision, dist)
        # On a GPU each virtual worker's own gradient buffer would cost a model's worth of memory: sum as they come there.
        ordered = dist.device.type == "cpu"
        kind = choose_exchange(dist, carrier)
        self.exchange = kind(trainable(model), dist, first_worker=first_worker, ordered=ordered)
        self.carrier = self.exchange.carrier
        self.n_tensors = len(self.exchange.layout.names)
        mine = [self.exchange.parameters[i] for i in self.exchange.owned]
        options = {"lr": cfg.learning_rate, "weight_decay": cfg.weight_decay}
        self.optimizer = build_optimizer(cfg.optimizer, mine, **options) if mine else None

    def step_context(self) -> AbstractContextManager:
        """One autocast region for all micro-batches: weights are cast once a step."""
        return self.accelerator.autocast()

    def begin_step(self) -> None:
        self.exchange.begin_step()

    def begin_worker(self) -> None:
        self.exchange.begin_worker()

    def end_worker(self, *, idle: bool) -> None:
        self.exchange.end_worker(idle=idle)

    def loss(self, ids: Tensor, mask: Tensor | None, labels: Tensor, weights: Tensor, denominator: float) -> Tensor:
        reduction = self.cfg.loss_reduction
        losses, tokens = target_loss(self.model, self.head, ids, mask, labels, reduction)
        return combine(losses, tokens, weights, reduction=reduction, denominator=denominator)

    def backward(self, loss: Tensor) -> None:
        with torch.autocast(self.dist.device.type, enabled=False):  # outside of the region, as torch asks
            self.accelerator.backward(loss)

    def update(self, rate: float, mark: Callable[[], None]) -> float | None:
        shard = self.exchange.reduce()
        self.exchange.set_gradients(shard)
        norm = self._clip() if self.cfg.max_grad_norm is not None else None
        mark()
        if self.optimizer is not None:
            for group in self.optimizer.param_groups:
                group["lr"] = rate
            self.optimizer.step()
        for i in self.exchange.owned:
            self.exchange.parameters[i].grad = None
        mark()
        self.exchange.release(shard)
        self.exchange.publish()
        return norm

    def _clip(self) -> float:
        """Scales the owned gradients to a global norm of max_grad_norm. Squares are added in the model's order everywhere."""
        squares = torch.zeros(len(self.exchange.parameters), dtype=torch.float64)
        for i in self.exchange.owned:
            squares[i] = float(self.exchange.parameters[i].grad.double().square().sum())
        norm = float(self.dist.all_reduce_sum(squares).sum().sqrt())
        factor = min(1.0, self.cfg.max_grad_norm / (norm + 1e-6))
        if factor < 1.0:
            for i in self.exchange.owned:
                self.exchange.parameters[i].grad.mul_(factor)
        return norm

    def writers(self) -> Writers:
        exchange, dist = self.exchange, self.dist
        named = (
            {}
            if self.optimizer is None
            else {exchange.layout.names[i]: dict(self.optimizer.state[exchange.parameters[i]]) for i in exchange.owned}
        )
        found: Writers = {f"optimizer-{dist.rank:05d}-of-{dist.world:05d}.pt": lambda path: torch.save(named, path)}
        if dist.is_main:
            tensors = dict(zip(exchange.layout.names, (p.detach() for p in exchange.parameters), strict=True))
            found["model.safetensors"] = lambda path: save_file({k: v.contiguous() for k, v in tensors.items()}, path)
        return found

    def load(self, path: Path) -> None:
        names, parameters = self.exchange.layout.names, self.exchange.parameters
        tensors = load_file(path / "model.safetensors")
        check_names(path, set(tensors), set(names))
        with torch.no_grad():
            for name, parameter in zip(names, parameters, strict=True):
                parameter.copy_(tensors[name])
        self.dist.barrier()
        named: dict[str, Any] = {}
        if self.optimizer is None:
            return
        for file in sorted(path.glob("optimizer-*.pt")):
            named |= torch.load(file, map_location=self.dist.device, weights_only=True)
        for i in self.exchange.owned:
            if names[i] not in named:
                raise ValueError(f"{path}: no optimiser state for {names[i]}")
            self.optimizer.state[parameters[i]] = named[names[i]]

    def close(self) -> None:
        self.exchange.close()
