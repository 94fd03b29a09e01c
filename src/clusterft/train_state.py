"""What a checkpoint of training holds, and how it comes back.

    trainer.json                   counters, losses, the sampler's state
    model.safetensors              every trainable parameter by name
    optimizer-RRRRR-of-PPPPP.pt    optimiser state of the tensors that rank R owned, by parameter name

Optimiser state is stored by name, so that any number of processes can read it back: who owned a tensor before does not matter.
Dropout needs no generator state (see trainer).
"""

from __future__ import annotations

import json
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import nn

from clusterft import checkpoint
from clusterft.allocation import ClusterBatchSampler, ShuffledBatchSampler
from clusterft.distributed import Dist
from clusterft.exchange import LocalExchange

Sampler = ClusterBatchSampler | ShuffledBatchSampler


@dataclass
class TrainState:
    """Counters of a run over all its parts. `step`: global steps completed."""

    step: int = 0
    tokens: int = 0
    target_tokens: int = 0
    losses: list[float | None] = field(default_factory=list)
    wall_seconds: float = 0.0
    checkpoint_seconds: float = 0.0
    phases: dict[str, float] = field(default_factory=dict)
    resumed_from: list[int] = field(default_factory=list)

    def advance(self, loss: float | None, tokens: int, targets: int, seconds: float, phases: dict[str, float]) -> None:
        self.step += 1
        self.tokens += tokens
        self.target_tokens += targets
        self.losses.append(loss)
        self.wall_seconds += seconds
        for name, value in phases.items():
            self.phases[name] = self.phases.get(name, 0.0) + value


def save_state(
    folder: Path,
    state: TrainState,
    model: nn.Module,
    exchange: LocalExchange,
    optimizer: torch.optim.Optimizer | None,
    sampler: Sampler,
    dist: Dist,
) -> float:
    """Collective: writes checkpoint-`state.step`. Returns the seconds it took. Raises OSError on every rank."""
    started = time.perf_counter()
    writers: dict[str, Any] = {
        f"optimizer-{dist.rank:05d}-of-{dist.world:05d}.pt": lambda path: torch.save(_named_state(exchange, optimizer), path)
    }
    if dist.is_main:
        facts = {"state": asdict(state), "sampler": _sampler_facts(sampler), "parameters": len(exchange.layout.names)}
        tensors = dict(zip(exchange.layout.names, (p.detach() for p in exchange.parameters), strict=True))
        writers["model.safetensors"] = lambda path: save_file({k: v.contiguous() for k, v in tensors.items()}, path)
        writers["trainer.json"] = lambda path: path.write_text(json.dumps(facts), encoding="utf-8")
    checkpoint.save(folder, state.step, writers, dist)
    return time.perf_counter() - started


def load_state(
    path: Path,
    exchange: LocalExchange,
    optimizer: torch.optim.Optimizer | None,
    sampler: Sampler,
    *,
    new_selection: bool = False,
) -> TrainState:
    """Puts weights and optimiser state back in place and returns the counters, with this resume noted.

    new_selection: the checkpoint was written with the selection before this one, as many rows of it; no interruption to note.
    Raises ValueError if the checkpoint is of another model, other rows, another batch or another seed.
    """
    facts = json.loads((path / "trainer.json").read_text(encoding="utf-8"))
    there, here = facts["sampler"], _sampler_facts(sampler)
    if there | ({"order": here["order"]} if new_selection else {}) != here:
        raise ValueError(f"{path}: written for {there}, this run has {here}; use another run directory")
    tensors = load_file(path / "model.safetensors")
    if set(tensors) != set(exchange.layout.names):
        odd = min(set(tensors) ^ set(exchange.layout.names))
        raise ValueError(f"{path}: its parameters are not those of this model, for example {odd}")
    with torch.no_grad():
        for name, parameter in zip(exchange.layout.names, exchange.parameters, strict=True):
            parameter.copy_(tensors[name])
    exchange.dist.barrier()
    if optimizer is not None:
        _load_optimizer(path, exchange, optimizer)
    state = TrainState(**facts["state"])
    if not new_selection:
        state.resumed_from.append(state.step)
    return state


def _sampler_facts(sampler: Sampler) -> dict[str, Any]:
    return {
        "kind": type(sampler).__name__,
        "rows": sampler.n_rows,
        "global_batch": sampler.global_batch,
        "order": sampler.fingerprint(),
    }


def _named_state(exchange: LocalExchange, optimizer: torch.optim.Optimizer | None) -> dict[str, Any]:
    if optimizer is None:
        return {}
    return {exchange.layout.names[i]: dict(optimizer.state[exchange.parameters[i]]) for i in exchange.owned}


def _load_optimizer(path: Path, exchange: LocalExchange, optimizer: torch.optim.Optimizer) -> None:
    named: dict[str, Any] = {}
    for file in sorted(path.glob("optimizer-*.pt")):
        named |= torch.load(file, map_location=exchange.dist.device, weights_only=True)
    for i in exchange.owned:
        name = exchange.layout.names[i]
        if name not in named:
            raise ValueError(f"{path}: no optimiser state for {name}")
        optimizer.state[exchange.parameters[i]] = named[name]
