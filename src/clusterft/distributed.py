"""Who am I among the processes, and the few collectives that the stages need.

In come the variables of torchrun or SLURM (or nothing: one process); out comes a `Dist`. No other module reads RANK or
WORLD_SIZE or calls `init_process_group`. Everything that a stage needs of its peers goes through a `Dist`, so that one process,
four gloo ranks on a laptop and several nodes run the same code.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, NoReturn

import torch
import torch.distributed as td

from clusterft.stop_signals import EXIT_PREEMPTED  # noqa: F401  (part of this module's face)

COLLECTIVE_TIMEOUT = timedelta(hours=24)
"""Dead peers are seen by their closed sockets and by the launcher, not by this limit; it must outlast the longest lone stage."""


class Preempted(RuntimeError):
    """The process was asked to stop, wrote a checkpoint and leaves with EXIT_PREEMPTED."""


class RankFailure(RuntimeError):
    """A rank refused to go on; the message names the rank and its reason. Raised on every rank."""


@dataclass(frozen=True)
class Dist:
    """One process of `world`; `local_rank` of `local_world` on its node. With world 1 every collective is the identity."""

    rank: int
    world: int
    device: torch.device
    local_rank: int = 0
    local_world: int = 1

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    def barrier(self) -> None:
        if self.world > 1:
            self.all_reduce_sum(torch.zeros(1))

    def all_reduce_sum(self, tensor: torch.Tensor) -> torch.Tensor:
        """The sum over ranks, in place and returned; the tensor must lie on a device that the backend can send from."""
        if self.world > 1:
            if td.get_backend() == "nccl" and tensor.device.type == "cpu":
                on_device = tensor.to(self.device)
                td.all_reduce(on_device)
                tensor.copy_(on_device)
            else:
                td.all_reduce(tensor)
        return tensor

    def broadcast_object(self, value: Any, src: int = 0) -> Any:
        """The value of rank `src`, on every rank."""
        if self.world == 1:
            return value
        box = [value]
        td.broadcast_object_list(box, src=src, device=self._object_device())
        return box[0]

    def gather_objects(self, value: Any) -> list[Any]:
        """The values of all ranks in rank order, on every rank. For small things: they are pickled."""
        if self.world == 1:
            return [value]
        box: list[Any] = [None] * self.world
        td.all_gather_object(box, value)
        return box

    def raise_together(self, problem: str | None) -> None:
        """Collective: each rank says whether it has a problem; if one has, all raise RankFailure with the lowest's message."""
        for rank, found in enumerate(self.gather_objects(problem)):
            if found is not None:
                raise RankFailure(found if self.world == 1 else f"rank {rank}: {found}")

    def abort(self, message: str) -> NoReturn:
        """Ends this rank; the launcher (or torchrun) then ends the others and shows this message first."""
        raise RankFailure(message if self.world == 1 else f"rank {self.rank}: {message}")

    def _object_device(self) -> torch.device:
        return self.device if td.get_backend() == "nccl" else torch.device("cpu")


def single_process(device: str | torch.device = "cpu") -> Dist:
    """One process, no process group."""
    return Dist(rank=0, world=1, device=torch.device(device))


def check_device(device: str) -> torch.device:
    """Raises ValueError for a device that this machine does not have: nothing falls back to another one."""
    asked = torch.device(device)
    if asked.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(
            f"runtime.device={device} was asked for, but torch {torch.__version__} sees no CUDA device; use runtime.device=cpu"
        )
    if asked.type not in ("cpu", "cuda"):
        raise ValueError(f"runtime.device={device} is not one of cpu, cuda")
    return asked


_SOURCES = {
    "torchrun": {"rank": "RANK", "world": "WORLD_SIZE", "local_rank": "LOCAL_RANK", "local_world": "LOCAL_WORLD_SIZE"},
    "SLURM": {"rank": "SLURM_PROCID", "world": "SLURM_NTASKS", "local_rank": "SLURM_LOCALID"},
}


def layout_from_env(env: Mapping[str, str]) -> tuple[str, dict[str, int]]:
    """(source, {rank, world, local_rank, local_world}) from torchrun's variables, else srun's, else one process.

    Under `srun torchrun` SLURM counts agents, not ranks: torchrun's variables win there, and they do so only where its own mark
    (TORCHELASTIC_RUN_ID) is present. Both complete, without the mark and not equal, is a contradiction.

    Raises ValueError when variables are incomplete, out of range or contradict each other.
    """
    found = {source: _read(env, source, names) for source, names in _SOURCES.items()}
    torchrun, slurm = found["torchrun"], found["SLURM"]
    if torchrun and slurm and "TORCHELASTIC_RUN_ID" not in env:
        for key in ("rank", "world"):
            if torchrun[key] != slurm[key]:
                a, b = _SOURCES["torchrun"][key], _SOURCES["SLURM"][key]
                raise ValueError(
                    f"{a}={torchrun[key]} contradicts {b}={slurm[key]}: unset one of them, or start with torchrun under srun"
                )
    if torchrun:
        if slurm and "SLURM_STEP_ID" in env:
            _check_agents(env, torchrun, slurm)
        return "torchrun", torchrun
    # salloc, or sbatch without srun, sets SLURM_NTASKS for one plain process: only a step has SLURM_STEP_ID.
    if slurm and "SLURM_STEP_ID" in env:
        return "SLURM", slurm
    return "single", {"rank": 0, "world": 1, "local_rank": 0, "local_world": 1}


def _check_agents(env: Mapping[str, str], torchrun: Mapping[str, int], slurm: Mapping[str, int]) -> None:
    """srun starts one torchrun a task: their ranks together are the world. Raises ValueError if they are not."""
    local = torchrun["local_world"]
    if "LOCAL_WORLD_SIZE" in env and "TORCHELASTIC_RUN_ID" in env and local * slurm["world"] != torchrun["world"]:
        raise ValueError(
            f"WORLD_SIZE={torchrun['world']} contradicts SLURM_NTASKS={slurm['world']} times LOCAL_WORLD_SIZE={local}: give every "
            "torchrun of the step the same --nnodes and address, or start a single one"
        )


def _read(env: Mapping[str, str], source: str, names: Mapping[str, str]) -> dict[str, int]:
    present = {key: env[name] for key, name in names.items() if name in env}
    if "rank" not in present and ("world" not in present or source == "SLURM"):
        return {}
    missing = [names[key] for key in ("rank", "world") if key not in present]
    if missing:
        raise ValueError(f"{source}: {', '.join(names[k] for k in present)} set, but {', '.join(missing)} missing")
    try:
        values = {key: int(text) for key, text in present.items()}
    except ValueError as error:
        raise ValueError(f"{source}: rank variables must be integers, got {present}") from error
    if not 0 <= values["rank"] < values["world"]:
        raise ValueError(f"{source}: {names['rank']}={values['rank']} is outside 0 ... {names['world']}-1={values['world'] - 1}")
    values.setdefault("local_rank", values["rank"])
    values.setdefault("local_world", values["world"])
    return values


def init_from_env(device: str, *, timeout: timedelta = COLLECTIVE_TIMEOUT, env: Mapping[str, str] | None = None) -> Dist:
    """Joins the process group that torchrun or srun describes, or returns a single process.

    srun needs MASTER_ADDR and MASTER_PORT set by the batch script (slurm/multinode.sbatch does). Raises ValueError with the
    variable's name when the environment contradicts itself or lacks them.
    """
    env = os.environ if env is None else env
    source, layout = layout_from_env(env)
    base = check_device(device)
    if layout["world"] == 1:
        return single_process(base)
    lacking = [name for name in ("MASTER_ADDR", "MASTER_PORT") if name not in env]
    if lacking:
        raise ValueError(
            f"{source} describes {layout['world']} ranks, but {', '.join(lacking)} is not set; start through torchrun"
        )
    init = f"tcp://{env['MASTER_ADDR']}:{env['MASTER_PORT']}" if source == "SLURM" else "env://"
    return join_group(device, init, timeout=timeout, **layout)


def join_group(
    device: str,
    init_method: str,
    *,
    rank: int,
    world: int,
    local_rank: int,
    local_world: int,
    timeout: timedelta = COLLECTIVE_TIMEOUT,
) -> Dist:
    """Initialises torch.distributed: nccl for cuda, gloo for cpu. Raises ValueError if this rank's device is absent."""
    target = check_device(device)
    if target.type == "cuda":
        if local_rank >= torch.cuda.device_count():
            raise ValueError(
                f"local rank {local_rank} has no GPU: this node has {torch.cuda.device_count()}; start that many processes"
            )
        target = torch.device("cuda", local_rank)
        torch.cuda.set_device(target)
    backend = "nccl" if target.type == "cuda" else "gloo"
    td.init_process_group(backend, init_method=init_method, rank=rank, world_size=world, timeout=timeout)
    return Dist(rank=rank, world=world, device=target, local_rank=local_rank, local_world=local_world)


def leave_group() -> None:
    """Destroys the process group if there is one."""
    if td.is_available() and td.is_initialized():
        td.destroy_process_group()
