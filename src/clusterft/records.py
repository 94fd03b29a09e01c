"""The records that pass between stages: what a stage hands on, and nothing else.

In comes plain data (text, numpy arrays, numbers); out come frozen dataclasses that are checked when they are made, so that a
later stage never has to ask whether ids are unique or weights finite. Axis letters used throughout the package: n rows of the
pool, m rows selected, q rows kept a cluster, k clusters, w workers, h hidden size, t tokens.

    data ► Pool ► prompting ► Encoded ► features ► choose ► Selection ► trainer ► evaluator ► Metric ► RunRecord

This module imports neither torch nor Hydra: tables are built from records on a laptop in seconds.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from types import MappingProxyType
from typing import Any

import numpy as np

IGNORE_INDEX = -100
"""Label of a token that carries no loss (prompt, padding): torch's and transformers' convention."""

RECORD_SCHEMA = 1
"""Version of record.json. Raised when a field changes its meaning; readers refuse what they do not know."""


@dataclass(frozen=True, slots=True)
class Turn:
    """One message of a conversation. `role` is system, user or assistant; `supervised` says whether its tokens carry loss."""

    role: str
    text: str
    supervised: bool = False


@dataclass(frozen=True, slots=True)
class Example:
    """One instruction with its answer.

    id        from content (see `content_id`), never a row number; an exact duplicate gets the suffix -2, -3, ...
    prompt    the instruction as text, before any template
    response  the answer as text, before any template
    input     the optional input block of Alpaca-style rows; "" when there is none
    source    file, hub id or module that the row came from
    line      1-based physical line (or row) in `source`
    turns     the whole conversation when it has more than one exchange or a system message, else empty
    meta      further fields that a report or a baseline may want (group, category, ...); never part of the id
    """

    id: str
    prompt: str
    response: str
    input: str = ""
    source: str = ""
    line: int = 0
    turns: tuple[Turn, ...] = ()
    meta: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))


@dataclass(frozen=True, slots=True)
class Rejection:
    """A row that was set aside. `reason` is a short snake_case word that can be counted; `detail` is for a person."""

    source: str
    line: int
    reason: str
    detail: str = ""


def content_id(prompt: str, response: str, input: str = "", turns: Sequence[Turn] = ()) -> str:
    """16 hex digits of the SHA-256 of the content. The same text gives the same id in any file, any order, any process."""
    digest = hashlib.sha256()
    for part in (prompt, input, response, *(f"{t.role}\x1f{t.text}\x1f{t.supervised}" for t in turns)):
        encoded = part.encode("utf-8", "surrogatepass")
        digest.update(len(encoded).to_bytes(8, "little"))
        digest.update(encoded)
    return digest.hexdigest()[:16]


def fingerprint_ids(ids: Sequence[str]) -> str:
    """16 hex digits that name a set of ids. Independent of order: a permuted pool is the same pool."""
    digest = hashlib.sha256()
    for one in sorted(ids):
        digest.update(one.encode("ascii"))
        digest.update(b"\n")
    return digest.hexdigest()[:16]


@dataclass(frozen=True)
class Pool:
    """The rows one may choose from, in source order, with a table of what was set aside.

    Raises ValueError if ids repeat.
    """

    name: str
    examples: tuple[Example, ...]
    rejected: tuple[Rejection, ...] = ()
    fingerprint: str = ""

    def __post_init__(self) -> None:
        ids = [e.id for e in self.examples]
        if len(set(ids)) != len(ids):
            raise ValueError(f"pool {self.name!r}: {len(ids) - len(set(ids))} ids occur more than once")
        object.__setattr__(self, "fingerprint", fingerprint_ids(ids))

    def __len__(self) -> int:
        return len(self.examples)

    @property
    def ids(self) -> tuple[str, ...]:
        return tuple(e.id for e in self.examples)


@dataclass(frozen=True, slots=True)
class Encoded:
    """One example as tokens: `input_ids` (t,) int32 and `labels` (t,) int32, IGNORE_INDEX where no loss is taken.

    Position t of `labels` is the token at position t (not shifted); the model predicts it from position t-1.
    `truncated` says that tokens were cut off at the maximum length.
    """

    id: str
    input_ids: np.ndarray
    labels: np.ndarray
    truncated: bool = False

    @property
    def n_target(self) -> int:
        """Number of tokens that carry loss (position 0 cannot be predicted and never counts)."""
        return int((self.labels[1:] != IGNORE_INDEX).sum())

    def __len__(self) -> int:
        return len(self.input_ids)


@dataclass(frozen=True)
class Cost:
    """What a stage cost, measured. Zero means measured as nothing; None means not measured."""

    wall_seconds: float = 0.0
    cpu_seconds: float | None = None
    peak_memory_gib: float | None = None
    flops: float | None = None
    forward_passes: float | None = None
    backward_passes: float | None = None
    bytes_stored: int | None = None


@dataclass(frozen=True)
class Selection:
    """Which rows were chosen, with the numbers that training needs.

    ids        m chosen ids; the order is the method's own (ranking methods: best first), training does not depend on it
    clusters   (m,) int32 cluster of each row, 0 ... k-1, or None for methods without clusters
    weights    (m,) float64 loss weight of each row, mean 1, or None for weight 1 everywhere
    distances  (m,) float64 distance to the own centroid, or None
    scores     for methods that score the pool: id -> finite score, for every id that was not rejected
    rejected   id -> reason, for pool rows that the method refused to rank
    info       small JSON-able facts for reports: cluster sizes before and after, objective, ...

    Raises ValueError when arrays do not align, ids repeat, a value is not finite or weights do not average 1.
    """

    method: str
    pool_fingerprint: str
    ids: tuple[str, ...]
    budget: int
    seed: int
    clusters: np.ndarray | None = None
    weights: np.ndarray | None = None
    distances: np.ndarray | None = None
    scores: Mapping[str, float] = field(default_factory=dict)
    rejected: Mapping[str, str] = field(default_factory=dict)
    info: Mapping[str, Any] = field(default_factory=dict)
    cost: Cost = field(default_factory=Cost)

    def __post_init__(self) -> None:
        m = len(self.ids)
        if m == 0:
            raise ValueError(f"{self.method}: the selection is empty")
        if len(set(self.ids)) != m:
            raise ValueError(f"{self.method}: {m - len(set(self.ids))} ids were selected more than once")
        if m != self.budget:
            raise ValueError(f"{self.method}: {m} rows selected, budget is {self.budget}")
        for name in ("clusters", "weights", "distances"):
            value = getattr(self, name)
            if value is None:
                continue
            if value.shape != (m,):
                raise ValueError(f"{self.method}: {name} has shape {value.shape}, expected ({m},)")
            if not np.isfinite(value).all():
                raise ValueError(f"{self.method}: {name} has {int((~np.isfinite(value)).sum())} values that are not finite")
        if self.weights is not None and not math.isclose(float(self.weights.mean()), 1.0, rel_tol=0, abs_tol=1e-9):
            raise ValueError(f"{self.method}: weights average {float(self.weights.mean())!r}, expected 1")
        bad = [i for i, s in self.scores.items() if not math.isfinite(s)]
        if bad:
            raise ValueError(f"{self.method}: {len(bad)} scores are not finite, for example id {bad[0]}")

    def check_against(self, pool: Pool) -> None:
        """Raises ValueError if this selection was made from another pool or names ids that the pool lacks."""
        if self.pool_fingerprint != pool.fingerprint:
            raise ValueError(
                f"selection by {self.method} was made from pool {self.pool_fingerprint}, but {pool.name!r} is {pool.fingerprint}"
            )
        missing = set(self.ids) - set(pool.ids)
        if missing:
            raise ValueError(f"selection by {self.method} names {len(missing)} ids that {pool.name!r} lacks, e.g. {min(missing)}")


@dataclass(frozen=True)
class Metric:
    """One number about a trained model.

    unit "fraction" means a value in [0, 1] (accuracy, pass@1); "nats" means a mean negative log-likelihood, at least 0.
    n is the number of problems or rows behind the value, stderr its binomial or bootstrap standard error.
    dataset_hash names the exact problems: metrics with different hashes are never put into one column.
    """

    task: str
    name: str
    value: float
    n: int
    stderr: float | None = None
    unit: str = "fraction"
    dataset_hash: str = ""
    note: str = ""

    def __post_init__(self) -> None:
        if self.unit not in ("fraction", "nats"):
            raise ValueError(f"{self.task}/{self.name}: unit {self.unit!r} is not one of fraction, nats")
        if not math.isfinite(self.value) or self.value < 0 or (self.unit == "fraction" and self.value > 1):
            raise ValueError(f"{self.task}/{self.name}: value {self.value!r} is out of range for unit {self.unit}")
        if self.n < 1:
            raise ValueError(f"{self.task}/{self.name}: n is {self.n}")


@dataclass(frozen=True)
class RunRecord:
    """What record.json holds. Only `status: complete` is ever put into a table."""

    run_id: str
    status: str
    config: Mapping[str, Any]
    seed: int
    commit: str
    dirty: bool
    packages: Mapping[str, str]
    hardware: Mapping[str, Any]
    selection: Mapping[str, Any]
    train: Mapping[str, Any]
    metrics: tuple[Metric, ...]
    cost: Mapping[str, Any]
    error: str | None = None
    schema: int = RECORD_SCHEMA
    inputs: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)  # see clusterft.inputs

    def to_json(self) -> dict[str, Any]:
        data = asdict(self)
        return data if self.inputs else {key: value for key, value in data.items() if key != "inputs"}

    @classmethod
    def from_json(cls, data: Any) -> RunRecord:
        """Raises ValueError if this is no record, or of a schema that this version does not know."""
        if not isinstance(data, Mapping):
            raise ValueError("it holds no record")
        if data.get("schema") != RECORD_SCHEMA:
            raise ValueError(f"record schema {data.get('schema')!r} is not {RECORD_SCHEMA}")
        for name, kind in _RECORD_TYPES.items():
            value = data.get(name, {} if name == "inputs" else None)
            if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
                raise ValueError(f"its {name} is {value!r}")
        if not all(isinstance(m, Mapping) for m in data["metrics"]):
            raise ValueError("its metrics are no list of objects")
        return cls(**{**data, "metrics": tuple(Metric(**m) for m in data["metrics"])})


def parse_record(data: Any) -> tuple[RunRecord, dict[str, Any]]:
    """A record from parsed JSON without its metrics that are no finite numbers, and these as "task/name" -> value.

    For readers that name such a metric and go on; `RunRecord.from_json` refuses it. Raises ValueError for anything else that is wrong.
    """
    if not isinstance(data, Mapping) or not isinstance(data.get("metrics"), list):
        return RunRecord.from_json(data), {}
    odd = [m for m in data["metrics"] if isinstance(m, Mapping) and not is_number(m.get("value"))]
    RunRecord.from_json({**data, "metrics": [{**m, "value": 0.0} for m in odd]})  # but for their value they have to be metrics
    good = [m for m in data["metrics"] if not any(m is one for one in odd)]
    return RunRecord.from_json({**data, "metrics": good}), {f"{m['task']}/{m['name']}": m.get("value") for m in odd}


def is_number(value: Any) -> bool:
    """Whether a value out of JSON is a finite number that a float holds. Neither true nor false is one."""
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1e300


_RECORD_TYPES = {"run_id": str, "status": str, "config": Mapping, "seed": int, "commit": str, "dirty": bool, "metrics": list}
_RECORD_TYPES |= dict.fromkeys(("packages", "hardware", "selection", "train", "cost", "inputs"), Mapping)
