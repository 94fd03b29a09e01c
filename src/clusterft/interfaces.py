"""The seams: what a selector, a sampler and an evaluator must offer. At most three methods each.

A selector is `features` + `choose`. Features are model work (forward passes, gradients, loss trajectories): expensive, sharded
over ranks, cached, resumable. `choose` is pure: arrays in, a Selection out; seeded; no model, no disk, no configuration.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np

from clusterft.records import Cost, Encoded, Metric, Pool, Selection


@dataclass(frozen=True)
class FeatureSpec:
    """A named, cacheable piece of model work on a pool.

    extractor  "package.module:function", called as function(context, spec, writer); see clusterft.features
    params     everything that changes the values; part of the cache key, so JSON-able
    version    raised by the extractor's author when its values change
    """

    name: str
    extractor: str
    params: Mapping[str, Any] = field(default_factory=dict)
    version: int = 1


@dataclass(frozen=True)
class Feature:
    """A computed feature. rows: (n, d) array or memory map in pool order; extra: small named arrays (validation rows, ...)."""

    rows: np.ndarray
    extra: Mapping[str, np.ndarray] = field(default_factory=dict)
    cost: Cost = field(default_factory=Cost)


@runtime_checkable
class Selector(Protocol):
    """Chooses rows of a pool."""

    name: str

    def feature_specs(self) -> Sequence[FeatureSpec]:
        """What must exist before `choose`; empty for random and full."""

    def choose(self, pool: Pool, features: Mapping[str, Feature], budget: int, rng: np.random.Generator) -> Selection:
        """Chooses exactly `budget` rows. Pure; the result does not depend on the order of the pool's rows."""


@runtime_checkable
class Sampler(Protocol):
    """Orders the selected rows into steps for one rank."""

    def batches(self, epoch: int) -> Iterator[list[int]]:
        """This rank's micro-batches of `epoch`, as positions in the selection."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None: ...


@runtime_checkable
class Evaluator(Protocol):
    """Scores a saved model.

    An evaluator with the class attribute `sharded = True` shares its work over the ranks of `EvalContext.dist`; the others are called in
    one process whatever runtime.evaluation_processes says.
    """

    def evaluate(self, checkpoint_dir: Path, out_dir: Path) -> list[Metric]:
        """Writes per-problem results under `out_dir` and returns the summary numbers."""


@dataclass(frozen=True)
class EvalContext:
    """What every evaluator is given when it is made: evaluators are built as `instantiate(node, context=EvalContext(...))`.

    heldout / heldout_groups  encoded held-out rows and the family of each (macro averages), aligned
    precision                 float32 | bf16_autocast | bf16, as in training
    dist                      the ranks that evaluate together (distributed.Dist), or None for one process
    """

    model: Any  # config.ModelConfig node of the trained model (its weights come from checkpoint_dir)
    template: str
    max_length: int
    assets_dir: Path
    device: str
    precision: str
    threads: int
    heldout: Sequence[Encoded] = ()
    heldout_groups: Sequence[str] = ()
    progress: bool = False
    dist: Any = None
