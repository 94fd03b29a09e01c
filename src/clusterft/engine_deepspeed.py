"""Engines `deepspeed_zero2` and `deepspeed_zero3`: DeepSpeed's partitions with the project's weighted update.

DeepSpeed averages over ranks; every loss is multiplied by their number, so that gradients are sums. It divides by nothing else: micro-batches
are counted here, not by it (see deepspeed_config).

A checkpoint holds whole weights (rank 0) and each rank's flat partitions with their optimiser state. A partition's borders depend on the number of
ranks, so another number is refused.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as td
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from clusterft.deepspeed_config import deepspeed_config
from clusterft.distributed import Dist
from clusterft.engine_fsdp import own_group
from clusterft.engines import Engine, Writers, check_names, trainable
from clusterft.heads import OutputHead
from clusterft.loss_module import LossModule, release, twin_of
from clusterft.optim import build_optimizer


class DeepSpeedEngine(Engine):
    """See the module. `model` holds no weights until `finish`."""

    carrier, lockstep = "DeepSpeed", True

    def __init__(self, model: nn.Module, head: OutputHead | None, cfg: Any, dist: Dist) -> None:
        import deepspeed

        self.name, self.stage = cfg.engine, int(cfg.engine[-1])
        self.model, self.cfg, self.dist = model, cfg, dist
        self._own_group, self._zero = own_group(dist), deepspeed.zero
        self.names = [name for name, _ in trainable(model)]
        self.n_tensors = len(self.names)
        self.twin = twin_of(model)
        module = LossModule(self.twin, head, cfg.loss_reduction, bf16_autocast=cfg.precision == "bf16_autocast")
        release(model)
        os.environ.setdefault("LOCAL_RANK", str(dist.local_rank))  # DeepSpeed insists on it, also in a group that is made already
        if dist.device.type == "cpu":
            deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # else it compiles C++ before its first collective
        deepspeed.init_distributed(dist_backend=td.get_backend(), auto_mpi_discovery=False, verbose=False)
        parameters = [p for _, p in trainable(self.twin)]
        optimizer = build_optimizer(cfg.optimizer, parameters, lr=cfg.learning_rate, weight_decay=cfg.weight_decay)
        self.engine: Any = deepspeed.initialize(
            model=module,
            model_parameters=parameters,
            optimizer=optimizer,
            config=deepspeed_config(cfg, on_gpu=dist.device.type == "cuda"),
        )[0]
        self.parameters = [p for _, p in trainable(self.twin)]

    @property
    def _partitions(self) -> list[Tensor]:
        """This rank's flat float32 vectors that the optimiser steps."""
        zero = self.engine.optimizer
        return zero.single_partition_of_fp32_groups if self.stage == 2 else zero.fp32_partitioned_groups_flat

    def loss(self, ids: Tensor, mask: Tensor | None, labels: Tensor, weights: Tensor, denominator: float) -> Tensor:
        return self.engine(ids, mask, labels, weights, denominator)

    def backward(self, loss: Tensor) -> None:
        self.engine.backward(loss * self.dist.world)

    def update(self, rate: float, mark: Callable[[], None]) -> float | None:
        mark()
        for group in self.engine.optimizer.param_groups:
            group["lr"] = rate
        self.engine.step()
        mark()
        return float(self.engine.get_global_grad_norm()) if self.cfg.max_grad_norm is not None else None

    def _whole(self, parameter: nn.Parameter) -> Any:
        """Around reading a parameter's whole value; collective in stage 3."""
        return self._zero.GatheredParameters([parameter]) if self.stage == 3 else nullcontext()

    def writers(self) -> Writers:
        """Collective: rank 0 takes the whole weights into its main memory, tensor by tensor."""
        whole: dict[str, Tensor] = {}
        for name, parameter in zip(self.names, self.parameters, strict=True):
            with self._whole(parameter):
                if self.dist.is_main:
                    whole[name] = parameter.detach().cpu().clone()
        inner = self.engine.optimizer.optimizer
        parts = [{"weights": part.detach(), "state": dict(inner.state[part])} for part in self._partitions]
        rank, world = self.dist.rank, self.dist.world
        found: Writers = {f"optimizer-{rank:05d}-of-{world:05d}.pt": lambda path: torch.save(parts, path)}
        if self.dist.is_main:
            found["model.safetensors"] = lambda path: save_file(whole, path)
        return found

    def load(self, path: Path) -> None:
        """Raises ValueError for a checkpoint of another number of ranks."""
        rank, world = self.dist.rank, self.dist.world
        written = len(list(path.glob("optimizer-*.pt")))
        if written != world:
            raise ValueError(
                f"{path}: written by {written} processes, this run has {world}; with trainer.engine={self.name} the cut depends on "
                f"their number: go on with runtime.processes={written}, or use trainer.engine=fsdp"
            )
        inner = self.engine.optimizer.optimizer
        parts = torch.load(path / f"optimizer-{rank:05d}-of-{world:05d}.pt", map_location=self.dist.device, weights_only=True)
        with torch.no_grad():
            for mine, part in zip(self._partitions, parts, strict=True):
                mine.data.copy_(part["weights"])
                inner.state[mine] = part["state"]
        tensors = load_file(path / "model.safetensors")
        check_names(path, set(tensors), set(self.names))
        for name, parameter in zip(self.names, self.parameters, strict=True):
            with self._writable(parameter), torch.no_grad():
                parameter.copy_(tensors[name])

    def _writable(self, parameter: nn.Parameter) -> Any:
        """Around setting a parameter's whole value: in stage 3, what rank 0 sets is cut and handed out at the end."""
        return self._zero.GatheredParameters([parameter], modifier_rank=0) if self.stage == 3 else nullcontext()

    def finish(self) -> None:
        plain = dict(self.model.named_parameters())
        for name, parameter in self.twin.named_parameters():
            with self._whole(parameter):
                plain[name].data = parameter.detach().clone()

    def close(self) -> None:
        self.engine.destroy()
        self.engine = self.twin = None
        self.parameters.clear()
        if self._own_group:
            td.destroy_process_group()
