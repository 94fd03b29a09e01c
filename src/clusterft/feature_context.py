"""What an extractor is given: the pool as tokens, the model on demand, the ranks it shares the work with.

In come the pool, its encoded rows and the pieces of configuration that change a feature's values; out comes one object that every
extractor (`function(context, spec, writer)`) reads. Nothing here imports torch: the model arrives through `load_model`, once.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np

from clusterft.records import Encoded, Pool


@runtime_checkable
class DistLike(Protocol):
    """The part of `clusterft.distributed.Dist` that feature passes rely on."""

    rank: int
    world: int
    device: Any

    def barrier(self) -> None: ...

    def broadcast_object(self, value: Any, src: int = 0) -> Any: ...


@dataclass(frozen=True)
class SingleProcess:
    """One process that is alone: rank 0 of 1."""

    rank: int = 0
    world: int = 1
    device: str = "cpu"

    def barrier(self) -> None:
        """Nobody to wait for."""

    def broadcast_object(self, value: Any, src: int = 0) -> Any:
        return value


class _Once:
    """Calls `make` at most once and keeps what it returned, also across copies of the context."""

    def __init__(self, make: Callable[[], Any]) -> None:
        self._make, self._made, self._value = make, False, None

    def __call__(self) -> Any:
        if not self._made:
            self._value, self._made = self._make(), True
        return self._value


@dataclass
class FeatureContext:
    """Everything an extractor may look at.

    encoded       tokens of each example, aligned with `pool.examples`
    model_cfg     a `config.ModelConfig` (or node): names the model in the cache key
    max_length    tokens a row was cut at
    token_budget  tokens a batch; changes speed and the last bits of a float, never the key
    load_model    makes the model on first use; the result is kept
    work_dir      folder for an extractor's own artefacts (checkpoints of a warm-up, ...); `compute` sets it for each feature
    places        assets_dir and cache_dir, for extractors that load another model than the run's
    weights       names weights that differ from those of `model_cfg` (a model in training), None where they do not; part of the key
    validation    name -> encoded rows of a target task, for extractors that need one (LESS)

    Raises ValueError if `encoded` is not aligned with the pool.
    """

    pool: Pool
    encoded: Sequence[Encoded]
    model_cfg: Any
    tokenizer: Any
    template: str
    max_length: int
    token_budget: int
    dist: DistLike
    seed: int
    load_model: Callable[[], Any]
    work_dir: Path | None = None
    progress: bool = False
    validation: Mapping[str, Sequence[Encoded]] = field(default_factory=dict)
    weights: str | None = None
    places: Mapping[str, Path] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not isinstance(self.load_model, _Once):
            self.load_model = _Once(self.load_model)
        if len(self.encoded) != len(self.pool):
            raise ValueError(f"{len(self.encoded)} encoded rows for the {len(self.pool)} examples of pool {self.pool.name!r}")
        for position, (example, encoded) in enumerate(zip(self.pool.examples, self.encoded, strict=True)):
            if example.id != encoded.id:
                raise ValueError(
                    f"pool {self.pool.name!r}, position {position}: encoded row {encoded.id} is not of example {example.id}; "
                    "encode the pool that is passed on, in its own order"
                )

    @cached_property
    def tokens_digest(self) -> str:
        """`encoded_digest` of the pool's rows, worked out once: the cache key needs it again and again."""
        return encoded_digest(self.encoded)


def encoded_digest(encoded: Sequence[Encoded]) -> str:
    """16 hex digits of all tokens and labels, whatever the order of the rows: tokenizer, template and cut in one number."""
    digest = hashlib.sha256()
    for row in sorted(encoded, key=lambda e: e.id):
        digest.update(f"{row.id}\x1f{len(row)}\x1f".encode())
        digest.update(np.ascontiguousarray(row.input_ids, np.int32).data)
        digest.update(np.ascontiguousarray(row.labels, np.int32).data)
    return digest.hexdigest()[:16]
