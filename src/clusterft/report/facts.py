"""What a report knows: frozen records of plain numbers, texts and small arrays. Nothing here is escaped; `html` and `markdown` do that.

Axis letters: n rows of the pool, k clusters, p points on the map, b bins.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np


@dataclass(frozen=True, slots=True)
class Place:
    """Where a row stands: short file name, 1-based line, and what was found there (may be "")."""

    file: str
    line: int
    detail: str = ""

    def __str__(self) -> str:
        return f"{self.file}:{self.line}"


@dataclass(frozen=True, slots=True)
class Reason:
    """Rows that were set aside for one reason. `stage` is reading (the row was unusable) or ranking (the method refused it)."""

    reason: str
    stage: str
    count: int
    places: tuple[Place, ...]


@dataclass(frozen=True, slots=True)
class Part:
    """A piece of a row's text, cut to an excerpt; `more` characters were left out."""

    label: str
    text: str
    more: int = 0


@dataclass(frozen=True, slots=True)
class Sample:
    """A row that the report shows. tokens, answer_tokens after truncation; value is the distance or score, None if there is none."""

    id: str
    place: Place
    tokens: int
    answer_tokens: int
    value: float | None
    loss: float | None
    parts: tuple[Part, ...]


@dataclass(frozen=True, slots=True)
class ClusterFacts:
    """One cluster. number is None for the whole pool of a method without clusters; weight is the mean loss weight of its kept rows."""

    number: int | None
    before: int
    kept: int
    weight: float | None
    terms: tuple[str, ...] = ()
    kept_samples: tuple[Sample, ...] = ()
    dropped_samples: tuple[Sample, ...] = ()

    @property
    def name(self) -> str:
        return "all rows" if self.number is None else f"cluster {self.number}"

    @property
    def share(self) -> float:
        return self.kept / self.before


@dataclass(frozen=True)
class Histogram:
    """Counts (b,) of kept and dropped rows between edges (b+1,); medians are None where there are no rows."""

    key: str
    title: str
    unit: str
    edges: np.ndarray
    kept: np.ndarray
    dropped: np.ndarray
    kept_median: float | None
    dropped_median: float | None
    log_scale: bool = False


@dataclass(frozen=True)
class MapFacts:
    """First two principal components of the proxies: points (p, 2), clusters (p,) int (-1: none), kept (p,) bool.

    explained  share of the variance along each axis; total: the usable rows that the p points stand for
    """

    points: np.ndarray
    clusters: np.ndarray
    kept: np.ndarray
    explained: tuple[float, float]
    total: int


@dataclass(frozen=True, slots=True)
class NearPair:
    cosine: float
    cluster: int | None
    kept: Sample
    dropped: Sample


@dataclass(frozen=True, slots=True)
class NearDuplicates:
    """Pairs (kept, dropped) in one cluster with cosine of at least `threshold`; `dropped_rows` counts each dropped row once.

    compared  rows that were looked at, `of` the usable rows; fewer where a large cluster was sampled
    """

    threshold: float
    pairs: int
    dropped_rows: int
    compared: int
    of: int
    shown: tuple[NearPair, ...]


@dataclass(frozen=True, slots=True)
class Overlap:
    """How much another selection shares. expected: Jaccard of two independent random choices of these sizes."""

    name: str
    rows: int
    shared: int
    jaccard: float
    expected: float


@dataclass(frozen=True, slots=True)
class Finding:
    """Something to look out for. level: warning (act before training) or note; fact is measured, rule states the threshold."""

    key: str
    level: str
    fact: str
    rule: str
    advice: str


@dataclass(frozen=True)
class ReportFacts:
    """Everything that report.html and report.md show.

    lengths, losses and the map are None or missing where nothing was measured; `not_measured` then says why, by name.
    """

    pool_name: str
    pool_fingerprint: str
    method: str
    seed: int
    command: str
    pool_rows: int
    kept_rows: int
    heldout_rows: int | None
    validation_rows: int
    truncated_rows: int
    kept_tokens: int
    pool_tokens: int
    duplicates: int
    value_name: str
    reasons: tuple[Reason, ...]
    clusters: tuple[ClusterFacts, ...]
    clusters_with_samples: int
    histograms: tuple[Histogram, ...]
    map: MapFacts | None
    near: NearDuplicates | None
    overlaps: tuple[Overlap, ...]
    costs: tuple[tuple[str, str], ...]
    settings: tuple[tuple[str, str], ...] = ()
    not_measured: dict[str, str] = field(default_factory=dict)
    findings: tuple[Finding, ...] = ()

    @property
    def share(self) -> float:
        return self.kept_rows / self.pool_rows

    @property
    def set_aside(self) -> int:
        return sum(r.count for r in self.reasons if r.stage == "reading")

    @property
    def clustered(self) -> bool:
        return self.clusters[0].number is not None
