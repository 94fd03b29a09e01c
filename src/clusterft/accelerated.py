"""This rank's `accelerate.Accelerator`: what the training loop stands on for device, precision and backward.

In come the rank's place and `trainer.precision`; out comes an Accelerator that agrees with both. Batches, model and optimiser do not
go through its `prepare`: that averages gradients over ranks and accumulation steps, where the weighted update needs their plain
sum over workers (see engines), and it knows no workers apart from processes.

An Accelerator reads the environment, and with it whatever `accelerate config` or a shell has left there; for the time of its making it sees
this rank's place and nothing else of its kind, so that no variable changes how a run computes.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch

from clusterft.distributed import Dist

if TYPE_CHECKING:
    from accelerate import Accelerator

MIXED_PRECISION = {"float32": "no", "bf16_autocast": "bf16", "bf16": "no"}
"""trainer.precision -> accelerate's name; pure bf16 weights need no mixing."""


def make_accelerator(precision: str, dist: Dist) -> Accelerator:
    """The Accelerator of a rank whose process group exists already.

    Accelerate keeps one state a process: what an earlier run in this process left is dropped first. Raises RuntimeError if
    accelerate sees other ranks or another device than `dist`.
    """
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state(reset_partial_state=True)
    with _environment(dist):
        made = Accelerator(cpu=dist.device.type == "cpu", mixed_precision=MIXED_PRECISION[precision])
    found = (made.num_processes, made.process_index, made.device.type)
    if found != (dist.world, dist.rank, dist.device.type):
        raise RuntimeError(
            f"accelerate sees (ranks, rank, device) {found}, the run has {(dist.world, dist.rank, dist.device.type)}"
        )
    return made


@contextmanager
def _environment(dist: Dist) -> Iterator[None]:
    before = dict(os.environ)
    for name in before:
        if name.startswith(("ACCELERATE_", "PMI_", "OMPI_", "MV2_")):
            del os.environ[name]
    # Without a number of its own accelerate would set as many threads as it thinks right.
    os.environ.setdefault("OMP_NUM_THREADS", str(torch.get_num_threads()))
    if dist.world > 1:
        place = {"RANK": dist.rank, "WORLD_SIZE": dist.world, "LOCAL_RANK": dist.local_rank, "LOCAL_WORLD_SIZE": dist.local_world}
        os.environ.update(
            {name: str(value) for name, value in place.items()} | {"MASTER_ADDR": before.get("MASTER_ADDR", "127.0.0.1")}
        )
    else:
        for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
            os.environ.pop(name, None)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)
