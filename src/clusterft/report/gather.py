"""From arrays and records to `ReportFacts`: counts, samples, histograms, the map, comparisons. No model, no disk, no configuration.

In: the pool with its tokens, a Selection, proxies (n, h) in pool order, the cluster of every row. Out: facts, which do not depend on
the order of the pool's rows.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from clusterft.records import Cost, Encoded, Pool, Selection
from clusterft.report import map2d
from clusterft.report.facts import ClusterFacts, MapFacts, NearDuplicates, NearPair, Overlap, ReportFacts
from clusterft.report.histograms import histogram
from clusterft.report.reasons import reasons_of
from clusterft.report.rules import findings
from clusterft.report.samples import Sampler
from clusterft.report.terms import distinctive_terms
from clusterft.seeding import generator

NEAR = 0.99
"""Cosine from which two proxies count as near-duplicates, unless asked otherwise."""
NEAR_SHOWN = 3
SAMPLES = 3
FULL_CLUSTERS = 16
"""Clusters whose rows are shown; further ones stand in the table only."""
TERM_ROWS = 10_000
_DUPLICATE = re.compile(r"[0-9a-f]{16}-\d+")
"""Ids of rows whose content occurred before (records.Example)."""


@dataclass(frozen=True)
class Rows:
    """The pool as columns: clusters (n,) int with -1 for rows without one, kept (n,) bool, ranked (n,) bool: not refused by the method."""

    clusters: np.ndarray
    kept: np.ndarray
    ranked: np.ndarray

    @property
    def groups(self) -> list[int]:
        """Cluster numbers, or [-1] for a method without clusters."""
        found = np.unique(self.clusters[(self.clusters >= 0) & self.ranked])
        return found.tolist() or [-1]

    def members(self, group: int) -> np.ndarray:
        return np.flatnonzero((self.clusters == group) & self.ranked)


def gather(
    pool: Pool,
    encoded: Sequence[Encoded],
    selection: Selection,
    features: np.ndarray | None,
    *,
    labels: Mapping[str, int] | None = None,
    heldout: Pool | None = None,
    validation_rows: int = 0,
    others: Mapping[str, Selection] | None = None,
    command: str,
    cost: Cost,
    seconds: Mapping[str, float] | None = None,
    losses: np.ndarray | None = None,
    near_threshold: float = NEAR,
) -> ReportFacts:
    """What a report of `selection` says.

    encoded    tokens of the rows in pool order; features: gradient proxies (n, h) likewise, None if there are none: then no map
    labels     id -> cluster of every usable row; needed where the selection has clusters, useful for the others
    heldout    the rows set apart for the loss after training; validation_rows: further ones, for selectors that match rows
    others     further selections from the same pool, by name; cost: measured; seconds: further named wall times
    losses     mean -log p of each row's answer (n,) in nats, NaN where not measured; or None

    Raises ValueError if arrays do not align with the pool, a selection is from another pool, or labels are missing or contradict it.
    """
    _check(pool, encoded, selection, features, labels, losses, others or {})
    rows = _columns(pool, selection, labels)
    sampler = Sampler(pool, encoded, selection, losses)
    usable = None if features is None else map2d.usable_mask(features) & rows.ranked
    lengths = np.array([len(e) for e in encoded])
    facts = ReportFacts(
        pool_name=pool.name,
        pool_fingerprint=pool.fingerprint,
        method=selection.method,
        seed=selection.seed,
        command=command,
        pool_rows=len(pool),
        kept_rows=len(selection.ids),
        heldout_rows=None if heldout is None else len(heldout),
        validation_rows=validation_rows,
        truncated_rows=sum(e.truncated for e in encoded),
        kept_tokens=int(lengths[rows.kept].sum()),
        pool_tokens=int(lengths.sum()),
        duplicates=sum(_DUPLICATE.fullmatch(i) is not None for i in pool.ids),
        value_name="distance" if selection.clusters is not None else "score",
        reasons=reasons_of(pool, heldout, selection),
        clusters=_clusters(pool, selection, rows, sampler),
        clusters_with_samples=min(len(rows.groups), FULL_CLUSTERS),
        histograms=_histograms(encoded, rows, losses),
        map=None
        if usable is None or not map2d.drawable(features, usable)
        else _map(pool, features, rows, usable, selection.seed),
        near=None if usable is None else _near(pool, features, rows, usable, near_threshold, sampler),
        overlaps=_overlaps(pool, selection, others or {}),
        costs=_costs(cost, seconds or {}),
        settings=_settings(selection),
        not_measured=_missing(features, usable, losses, heldout),
    )
    return replace(facts, findings=findings(facts, selection, encoded, rows.kept))


def _check(
    pool: Pool,
    encoded: Sequence[Encoded],
    selection: Selection,
    features: np.ndarray | None,
    labels: Mapping[str, int] | None,
    losses: np.ndarray | None,
    others: Mapping[str, Selection],
) -> None:
    for one in (selection, *others.values()):
        one.check_against(pool)
    if tuple(e.id for e in encoded) != pool.ids:
        raise ValueError(
            f"report: {len(encoded)} encoded rows do not align with the {len(pool)} of {pool.name!r}; pass encode_pool's own"
        )
    if features is not None and (features.ndim != 2 or len(features) != len(pool)):
        raise ValueError(f"report: features have shape {features.shape}, expected ({len(pool)}, h)")
    if losses is not None and losses.shape != (len(pool),):
        raise ValueError(f"report: losses have shape {losses.shape}, expected ({len(pool)},)")
    if selection.clusters is None:
        return
    if labels is None:
        raise ValueError(
            f"report: {selection.method} chose by clusters; pass labels, the cluster of every row, to show what was dropped"
        )
    absent = [i for i in pool.ids if i not in labels and i not in selection.rejected]
    if absent:
        raise ValueError(
            f"report: labels lack {len(absent)} rows of {pool.name!r}, for example {absent[0]}; pass the cluster of every row"
        )
    wrong = [i for i, c in zip(selection.ids, selection.clusters.tolist(), strict=True) if labels.get(i) != c]
    if wrong:
        raise ValueError(
            f"report: labels put row {wrong[0]} in cluster {labels.get(wrong[0])}, the selection elsewhere; select again"
        )


def _columns(pool: Pool, selection: Selection, labels: Mapping[str, int] | None) -> Rows:
    kept = set(selection.ids)
    return Rows(
        clusters=np.array([-1 if labels is None else labels.get(i, -1) for i in pool.ids], dtype=np.int64),
        kept=np.array([i in kept for i in pool.ids]),
        ranked=np.array([i not in selection.rejected for i in pool.ids]),
    )


def _clusters(pool: Pool, selection: Selection, rows: Rows, sampler: Sampler) -> tuple[ClusterFacts, ...]:
    weights = {} if selection.weights is None else dict(zip(selection.ids, selection.weights.tolist(), strict=True))
    terms = _terms(pool, rows)
    out = []
    for place, group in enumerate(rows.groups):
        members = rows.members(group)
        kept, dropped = members[rows.kept[members]], members[~rows.kept[members]]
        own = [weights[pool.examples[i].id] for i in kept.tolist()] if weights else []
        show = SAMPLES if place < FULL_CLUSTERS else 0
        out.append(
            ClusterFacts(
                number=None if group < 0 else group,
                before=len(members),
                kept=len(kept),
                weight=float(np.mean(own)) if own else None,
                terms=terms[place],
                kept_samples=sampler.spread(kept, show),
                dropped_samples=sampler.spread(dropped, show),
            )
        )
    return tuple(out)


def _terms(pool: Pool, rows: Rows) -> list[tuple[str, ...]]:
    places = {group: place for place, group in enumerate(rows.groups)}
    inside = np.flatnonzero(np.isin(rows.clusters, rows.groups) & rows.ranked)
    chosen = inside[map2d.by_hash([pool.examples[i].id for i in inside.tolist()], TERM_ROWS)]
    texts = [" ".join((e.prompt, e.input, e.response)) for e in (pool.examples[i] for i in chosen.tolist())]
    return distinctive_terms(texts, np.array([places[c] for c in rows.clusters[chosen].tolist()], dtype=np.int64), len(places))


def _histograms(encoded: Sequence[Encoded], rows: Rows, losses: np.ndarray | None):
    answers = np.array([e.n_target for e in encoded], dtype=np.float64)
    whole = np.array([len(e) for e in encoded], dtype=np.float64)
    out = [
        histogram("answer", "Length of the answers", "tokens that carry loss", answers, rows.kept, log_scale=True),
        histogram("row", "Length of the rows", "tokens of prompt and answer", whole, rows.kept, log_scale=True),
    ]
    if losses is not None and np.isfinite(losses).any():
        out.append(histogram("loss", "Loss before training", "mean -log p of the answer's tokens, nats", losses, rows.kept))
    return tuple(out)


def _map(pool: Pool, features: np.ndarray, rows: Rows, usable: np.ndarray, seed: int) -> MapFacts:
    inside = np.flatnonzero(usable)
    chosen = inside[map2d.by_hash([pool.examples[i].id for i in inside.tolist()], map2d.MAP_POINTS)]
    points, explained = map2d.project(np.asarray(features[chosen]), seed)
    return MapFacts(points, rows.clusters[chosen], rows.kept[chosen], explained, len(inside))


def _near(pool: Pool, features: np.ndarray, rows: Rows, usable: np.ndarray, threshold: float, sampler: Sampler) -> NearDuplicates:
    pairs = lost = compared = 0
    best: list[tuple[float, str, str, int, int, int]] = []
    for group in rows.groups:
        members = rows.members(group)
        members = members[usable[members]]
        sides = [members[rows.kept[members]], members[~rows.kept[members]]]
        sides = [s[map2d.by_hash([pool.examples[i].id for i in s.tolist()], map2d.SIDE_ROWS)] for s in sides]
        compared += sum(map(len, sides))
        if not all(map(len, sides)):
            continue
        more, rows_lost, closest = map2d.near_pairs(features, *sides, threshold, NEAR_SHOWN)
        pairs, lost = pairs + more, lost + rows_lost
        best += [(-round(c, 6), pool.examples[a].id, pool.examples[b].id, group, a, b) for c, a, b in closest]
    shown = [
        NearPair(-c, None if group < 0 else group, sampler.one(a), sampler.one(b))
        for c, _, _, group, a, b in sorted(best)[:NEAR_SHOWN]
    ]
    return NearDuplicates(threshold, pairs, lost, compared, int(usable.sum()), tuple(shown))


def _overlaps(pool: Pool, selection: Selection, others: Mapping[str, Selection]) -> tuple[Overlap, ...]:
    """A fresh random choice of the same size first, then the others by name."""
    mine, ids = set(selection.ids), np.array(sorted(pool.ids))
    drawn = generator(selection.seed, "report_random").choice(ids, len(mine), replace=False).tolist()
    sets = {"a random choice of the same size": set(drawn)} | {name: set(others[name].ids) for name in sorted(others)}
    return tuple(_overlap(name, mine, other, len(pool)) for name, other in sets.items())


def _overlap(name: str, mine: set[str], other: set[str], n: int) -> Overlap:
    """expected: E|A and B| = |A| |B| / n for independent random choices, put into the Jaccard ratio."""
    shared, chance = len(mine & other), len(mine) * len(other) / n
    union = len(mine) + len(other)
    return Overlap(name, len(other), shared, shared / (union - shared), chance / (union - chance))


def _costs(cost: Cost, seconds: Mapping[str, float]) -> tuple[tuple[str, str], ...]:
    def shown(value: float | None, unit: str) -> str:
        return "not measured" if value is None else f"{value:,.4g} {unit}"

    return (
        ("wall time of the selection", shown(cost.wall_seconds, "s")),
        *((name.replace("_", " "), shown(value, "s")) for name, value in seconds.items()),
        ("processor time", shown(cost.cpu_seconds, "s")),
        ("peak memory", shown(cost.peak_memory_gib, "GiB")),
        ("forward passes", "not measured" if cost.forward_passes is None else f"{cost.forward_passes:,.0f}"),
        ("backward passes", "not measured" if cost.backward_passes is None else f"{cost.backward_passes:,.0f}"),
        ("bytes stored", "not measured" if cost.bytes_stored is None else f"{cost.bytes_stored:,}"),
    )


def _settings(selection: Selection) -> tuple[tuple[str, str], ...]:
    """The short facts of the method; lists (sizes by cluster) stand in the table of clusters already."""
    flat = [
        (k.replace("_", " "), f"{v:.6g}" if isinstance(v, float) else str(v))
        for k, v in sorted(selection.info.items())
        if isinstance(v, str | int | float)
    ]
    return (("method", selection.method), ("seed", str(selection.seed)), ("pool fingerprint", selection.pool_fingerprint), *flat)


def _missing(
    features: np.ndarray | None, usable: np.ndarray | None, losses: np.ndarray | None, heldout: Pool | None
) -> dict[str, str]:
    out = {}
    if features is None or usable is None:
        out["map"] = "This method computed no gradient proxies, so there is no map and no search for near-duplicates."
    elif not map2d.drawable(features, usable):
        out["map"] = "A map needs at least three usable rows with proxies of two numbers."
    if losses is None or not np.isfinite(losses).any():
        out["loss"] = "Losses before training: not measured."
    if heldout is None or not len(heldout):
        out["heldout"] = "No rows were held out."
    return out
