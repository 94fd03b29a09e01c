"""Engine `fsdp`: torch's FSDP2 (`fully_shard`) with the project's weighted update.

Every tensor is cut by rows over the ranks; decoder blocks are gathered one after the other around their forward and backward; gradients are
summed (never averaged) into each rank's rows after every micro-batch. The optimiser runs on these rows as plain tensors: AdamW
and SGD treat elements apart, Adafactor is `sharded_adafactor`.

A checkpoint holds whole weights and, by name, each rank's rows of the optimiser state, so that any number of ranks can go on. Sums come in
another order than with one process: equal up to rounding, and to the bit with as many ranks as before.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as td
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from clusterft.distributed import Dist
from clusterft.engines import Engine, Writers, check_names, trainable
from clusterft.heads import OutputHead
from clusterft.loss_module import LossModule, release, twin_of
from clusterft.optim import build_optimizer
from clusterft.sharded_adafactor import REPLICATED, ShardedAdafactor


def own_group(dist: Dist) -> bool:
    """Makes a process group of one where there is none, which the sharding libraries need. True: made here, to be left again."""
    if td.is_initialized():
        return False
    td.init_process_group("nccl" if dist.device.type == "cuda" else "gloo", store=td.HashStore(), rank=0, world_size=1)
    return True


def decoder_blocks(model: nn.Module) -> list[nn.Module]:
    """The modules that transformers says must stay whole. Raises ValueError for a model that names none."""
    names = set(getattr(model, "_no_split_modules", None) or ())
    found = [module for module in model.modules() if type(module).__name__ in names]
    if not found:
        raise ValueError(f"trainer.engine=fsdp: {type(model).__name__} does not say what its blocks are (_no_split_modules)")
    return found


def rows_of(n: int, world: int, rank: int) -> slice:
    """Rows of rank `rank` when n are cut as torch.chunk cuts them; the last ranks may have none."""
    size = -(-n // world)
    return slice(min(n, rank * size), min(n, (rank + 1) * size))


class FsdpEngine(Engine):
    """See the module. `model` holds no weights until `finish`."""

    name, carrier, lockstep = "fsdp", "FSDP2", True

    def __init__(self, model: nn.Module, head: OutputHead | None, cfg: Any, dist: Dist) -> None:
        self.model, self.cfg, self.dist = model, cfg, dist
        self._own_group = own_group(dist)
        self.names = [name for name, _ in trainable(model)]
        self.n_tensors = len(self.names)
        self.twin = twin_of(model)
        self.module: Any = LossModule(self.twin, head, cfg.loss_reduction, bf16_autocast=cfg.precision == "bf16_autocast")
        self._shard()
        release(model)
        sharded = dict(self.twin.named_parameters())
        self.sharded: list[Any] = [sharded[name] for name in self.names]
        self.rows = [nn.Parameter(p.to_local().detach()) for p in self.sharded]
        self.optimizer = self._make_optimizer()

    def _shard(self) -> None:
        mesh = init_device_mesh(self.dist.device.type, (self.dist.world,))
        # Half-precision gradients are added in float32 between ranks and rounded once.
        policy = MixedPrecisionPolicy(reduce_dtype=torch.float32)
        for part in [*decoder_blocks(self.twin), self.module]:
            fully_shard(part, mesh=mesh, mp_policy=policy)
        for part in self.module.modules():
            if isinstance(part, FSDPModule):
                part.set_gradient_divide_factor(1.0)
                part.set_force_sum_reduction_for_comms(True)  # gloo has no scaled sums

    def _make_optimizer(self) -> torch.optim.Optimizer:
        options = {"lr": self.cfg.learning_rate, "weight_decay": self.cfg.weight_decay}
        if self.cfg.optimizer == "adafactor":
            return ShardedAdafactor(self.rows, [p.shape for p in self.sharded], self.dist, **options)
        return build_optimizer(self.cfg.optimizer, self.rows, **options)

    def loss(self, ids: Tensor, mask: Tensor | None, labels: Tensor, weights: Tensor, denominator: float) -> Tensor:
        return self.module(ids, mask, labels, weights, denominator)

    def backward(self, loss: Tensor) -> None:
        loss.backward()

    def update(self, rate: float, mark: Callable[[], None]) -> float | None:
        for mine, parameter in zip(self.rows, self.sharded, strict=True):
            mine.grad = torch.zeros_like(mine) if parameter.grad is None else parameter.grad.to_local()
        norm = self._clip() if self.cfg.max_grad_norm is not None else None
        mark()
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.optimizer.step()
        for mine, parameter in zip(self.rows, self.sharded, strict=True):
            mine.grad = parameter.grad = None
        mark()
        return norm

    def _clip(self) -> float:
        squares = torch.stack([mine.grad.double().square().sum() for mine in self.rows])
        norm = float(self.dist.all_reduce_sum(squares).sum().sqrt())
        factor = min(1.0, self.cfg.max_grad_norm / (norm + 1e-6))
        if factor < 1.0:
            for mine in self.rows:
                mine.grad.mul_(factor)
        return norm

    def writers(self) -> Writers:
        """Collective: rank 0 takes the whole weights into its main memory, tensor by tensor."""
        whole: dict[str, Tensor] = {}
        for name, parameter in zip(self.names, self.sharded, strict=True):
            tensor = parameter.detach().full_tensor()
            if self.dist.is_main:
                whole[name] = tensor.cpu().contiguous()
        state = {name: dict(self.optimizer.state[mine]) for name, mine in zip(self.names, self.rows, strict=True)}
        rank, world = self.dist.rank, self.dist.world
        found: Writers = {f"optimizer-{rank:05d}-of-{world:05d}.pt": lambda path: torch.save(state, path)}
        if self.dist.is_main:
            found["model.safetensors"] = lambda path: save_file(whole, path)
        return found

    def load(self, path: Path) -> None:
        rank, world = self.dist.rank, self.dist.world
        with safe_open(path / "model.safetensors", framework="pt") as file, torch.no_grad():
            check_names(path, set(file.keys()), set(self.names))
            for name, parameter, mine in zip(self.names, self.sharded, self.rows, strict=True):
                mine.copy_(file.get_slice(name)[rows_of(parameter.shape[0], world, rank)])
        files = sorted(path.glob("optimizer-*.pt"))
        parts = [torch.load(file, map_location="cpu", weights_only=True, mmap=True) for file in files]
        for name, parameter, mine in zip(self.names, self.sharded, self.rows, strict=True):
            if any(name not in part for part in parts) or not parts:
                raise ValueError(f"{path}: no optimiser state for {name}")
            mine_rows = rows_of(parameter.shape[0], world, rank)
            self.optimizer.state[mine] = {
                key: self._own_part(key, [part[name][key] for part in parts], mine_rows) for key in parts[0][name]
            }

    def _own_part(self, key: str, values: list[Any], rows: slice) -> Any:
        """This rank's rows of a state that was written by any number of ranks."""
        first = values[0]
        if not isinstance(first, Tensor):
            return first
        if key not in REPLICATED:
            first = torch.cat(values)[rows]
        return first.clone() if key == "step" else first.to(self.dist.device, copy=True)

    def finish(self) -> None:
        """Collective: gathers the weights, whole on every rank as they were loaded."""
        self.optimizer.state.clear()
        plain = dict(self.model.named_parameters())
        for name, parameter in self.twin.named_parameters():
            plain[name].data = parameter.detach().full_tensor()

    def close(self) -> None:
        self.optimizer.state.clear()
        self.rows.clear()
        self.sharded.clear()
        self.module = self.twin = None
        if self._own_group:
            td.destroy_process_group()
