"""What a checkpoint of training holds, and how it comes back.

    trainer.json                   counters, losses, the sampler's state
    model.safetensors              every trainable parameter by name
    optimizer-RRRRR-of-PPPPP.pt    optimiser state of what rank R updated

Weights and optimiser state are written and read by the engine; `ddp` and `fsdp` store them by name, so that any number of processes can go on.
Dropout needs no generator state (see trainer).
"""

from __future__ import annotations

import json
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from clusterft import checkpoint
from clusterft.allocation import ClusterBatchSampler, ShuffledBatchSampler
from clusterft.distributed import Dist
from clusterft.engines import Engine

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


def save_state(folder: Path, state: TrainState, engine: Engine, sampler: Sampler, dist: Dist) -> float:
    """Collective: writes checkpoint-`state.step`. Returns the seconds it took. Raises OSError on every rank."""
    started = time.perf_counter()
    writers: dict[str, Any] = engine.writers()
    if dist.is_main:
        facts = {
            "state": asdict(state),
            "sampler": _sampler_facts(sampler),
            "parameters": engine.n_tensors,
            "engine": engine.name,
        }
        writers["trainer.json"] = lambda path: path.write_text(json.dumps(facts), encoding="utf-8")
    checkpoint.save(folder, state.step, writers, dist)
    return time.perf_counter() - started


def load_state(path: Path, engine: Engine, sampler: Sampler, *, new_selection: bool = False) -> TrainState:
    """Puts weights and optimiser state back in place and returns the counters, with this resume noted.

    new_selection: the checkpoint was written with the selection before this one, as many rows of it; no interruption to note.
    Raises ValueError if the checkpoint is of another model, other rows, another batch, another seed or another engine.
    """
    facts = json.loads((path / "trainer.json").read_text(encoding="utf-8"))
    there, here = facts["sampler"], _sampler_facts(sampler)
    if there | ({"order": here["order"]} if new_selection else {}) != here:
        raise ValueError(f"{path}: written for {there}, this run has {here}; use another run directory")
    wrote = facts.get("engine", "ddp")  # there was no other one when none was noted
    if wrote != engine.name:
        raise ValueError(f"{path}: written by trainer.engine={wrote}, this run has {engine.name}; use another run directory")
    engine.load(path)
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
