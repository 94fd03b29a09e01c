"""What to look out for: measured facts against stated thresholds.

In: facts, the selection, tokens. Out: `Finding`s, warnings first. A threshold is a rule of thumb that says when to look; the text says so
by giving the number that was found beside it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from clusterft.records import Encoded, Selection
from clusterft.report.facts import Finding, Histogram, ReportFacts

SMALL_CLUSTER = 0.25  # of the mean size
LOW_SHARE = 0.1
FEW_ROWS = 500
TRUNCATED = 0.05
REJECTED = 0.05
DUPLICATES = 0.01
HEAVY_WEIGHT = 2.0
LENGTH_SHIFT = 1.5
LOSS_SHIFT = 1.5
SHORT_ANSWER = 4  # tokens
SHORT_SHARE = 0.2
THIN_MAP = 0.2


def findings(facts: ReportFacts, selection: Selection, encoded: Sequence[Encoded], kept: np.ndarray) -> tuple[Finding, ...]:
    """Every rule that applies. encoded aligns with kept (n,) bool."""
    found = [rule(facts) for rule in RULES]
    found += [weights(selection), short_answers(encoded, kept)]
    return tuple(sorted((f for f in found if f is not None), key=lambda f: f.level != "warning"))


def small_cluster(facts: ReportFacts) -> Finding | None:
    if not facts.clustered or len(facts.clusters) < 2:
        return None
    smallest = min(facts.clusters, key=lambda c: (c.before, c.number))
    mean = sum(c.before for c in facts.clusters) / len(facts.clusters)
    if smallest.before >= SMALL_CLUSTER * mean:
        return None
    return Finding(
        "small_cluster",
        "warning",
        f"Cluster {smallest.number} has {smallest.before:,} rows; the mean is {mean:,.0f}.",
        f"a cluster below {SMALL_CLUSTER:g} of the mean size",
        "With equal shares the smallest cluster limits how much every cluster keeps. Read its rows: a handful of odd ones may be better "
        "removed; otherwise use fewer clusters, or ask for a number of rows, which fills up from the larger clusters.",
    )


def low_share(facts: ReportFacts) -> Finding | None:
    if facts.share >= LOW_SHARE:
        return None
    return Finding(
        "low_share",
        "warning",
        f"{100 * (facts.share):.1f} % of the rows were kept.",
        f"a share below {100 * LOW_SHARE:.0f} %",
        "Compare with a random choice of the same size before you trust it: at small shares the spread between seeds is large.",
    )


def few_rows(facts: ReportFacts) -> Finding | None:
    if facts.kept_rows >= FEW_ROWS:
        return None
    return Finding(
        "few_rows",
        "note",
        f"{facts.kept_rows:,} rows were kept.",
        f"fewer than {FEW_ROWS} rows",
        "That is few optimiser steps at common batch sizes; train with several seeds and look at the spread.",
    )


def truncated(facts: ReportFacts) -> Finding | None:
    share = facts.truncated_rows / facts.pool_rows
    if share <= TRUNCATED:
        return None
    return Finding(
        "truncated",
        "warning",
        f"{facts.truncated_rows:,} rows ({100 * share:.1f} %) were cut at the maximum length.",
        f"more than {100 * TRUNCATED:.0f} % of the rows cut",
        "A model that only sees cut answers learns to stop late or never. Raise the maximum length or set long rows aside.",
    )


def many_rejected(facts: ReportFacts) -> Finding | None:
    read = facts.pool_rows + (facts.heldout_rows or 0) + facts.validation_rows + facts.set_aside
    if facts.set_aside <= REJECTED * read:
        return None
    return Finding(
        "many_rejected",
        "warning",
        f"{facts.set_aside:,} of {read:,} rows ({100 * (facts.set_aside / read):.1f} %) were set aside while reading.",
        f"more than {100 * REJECTED:.0f} % set aside",
        "See the reasons below. Often one wrong field name or encoding is behind most of them.",
    )


def zero_proxies(facts: ReportFacts) -> Finding | None:
    bad = sum(r.count for r in facts.reasons if r.stage == "ranking")
    if not bad:
        return None
    return Finding(
        "not_ranked",
        "warning",
        f"Rows that the method refused to rank: {bad:,} (see below).",
        "any such row",
        "A row with a zero proxy has nothing to learn: its answer is empty after the cut, or the model predicts it perfectly already.",
    )


def duplicates(facts: ReportFacts) -> Finding | None:
    if facts.duplicates <= DUPLICATES * facts.pool_rows:
        return None
    return Finding(
        "duplicates",
        "note",
        f"{facts.duplicates:,} rows ({100 * (facts.duplicates / facts.pool_rows):.1f} %) repeat an earlier row word for word.",
        f"more than {100 * DUPLICATES:.0f} % exact duplicates",
        "They were treated as rows of their own. Remove them first if that is not meant.",
    )


def answer_length(facts: ReportFacts) -> Finding | None:
    return _shift(
        facts, "answer", LENGTH_SHIFT, "tokens", "Scores that depend on length (style, verbosity) may move by that alone."
    )


def loss_level(facts: ReportFacts) -> Finding | None:
    advice = "Rows of high loss are hard, or wrong: read the kept examples before you train on them."
    return _shift(facts, "loss", LOSS_SHIFT, "nats", advice)


def _shift(facts: ReportFacts, key: str, limit: float, unit: str, advice: str) -> Finding | None:
    chart: Histogram | None = next((h for h in facts.histograms if h.key == key), None)
    if chart is None or not chart.kept_median or not chart.dropped_median:
        return None
    ratio = chart.kept_median / chart.dropped_median
    if 1 / limit <= ratio <= limit:
        return None
    return Finding(
        f"{key}_shift",
        "note",
        f"{chart.title}: the median is {chart.kept_median:,.4g} {unit} in kept rows and {chart.dropped_median:,.4g} in dropped ones.",
        f"medians that differ by more than a factor of {limit:g}",
        advice,
    )


def no_heldout(facts: ReportFacts) -> Finding | None:
    if facts.heldout_rows:
        return None
    return Finding(
        "no_heldout",
        "note",
        "No rows were held out." if facts.heldout_rows == 0 else "Whether rows were held out is not known here.",
        "at least one held-out row",
        "Without held-out rows you cannot see whether the subset lost anything. Hold some out before you select.",
    )


def thin_map(facts: ReportFacts) -> Finding | None:
    if facts.map is None or sum(facts.map.explained) >= THIN_MAP:
        return None
    return Finding(
        "thin_map",
        "note",
        f"The map shows {100 * (sum(facts.map.explained)):.1f} % of the variance of the proxies.",
        f"less than {100 * THIN_MAP:.0f} % shown",
        "Clusters that overlap on the map may be well apart in the other dimensions: do not judge them by the picture.",
    )


def weights(selection: Selection) -> Finding | None:
    if selection.weights is None or selection.weights.max() <= HEAVY_WEIGHT:
        return None
    share = float((selection.weights > HEAVY_WEIGHT).mean())
    return Finding(
        "heavy_weights",
        "warning",
        f"The largest loss weight is {selection.weights.max():.3g}; {100 * share:.1f} % of the kept rows weigh more than {HEAVY_WEIGHT:g}.",
        f"a weight above {HEAVY_WEIGHT:g}",
        "Few rows then carry much of the gradient, and its noise grows. Keep more rows of the large clusters, or use weights of their root.",
    )


def short_answers(encoded: Sequence[Encoded], kept: np.ndarray) -> Finding | None:
    targets = np.array([e.n_target for e in encoded])[kept]
    share = float((targets <= SHORT_ANSWER).mean())
    if share <= SHORT_SHARE:
        return None
    return Finding(
        "short_answers",
        "note",
        f"{100 * share:.1f} % of the kept answers have at most {SHORT_ANSWER} tokens.",
        f"more than {100 * SHORT_SHARE:.0f} % of them",
        "The proxy of a short answer is a mean of few terms and lies far out by noise alone; peripheral choice prefers such rows.",
    )


RULES: tuple[Callable[[ReportFacts], Finding | None], ...] = (
    small_cluster,
    low_share,
    zero_proxies,
    many_rejected,
    truncated,
    few_rows,
    duplicates,
    answer_length,
    loss_level,
    no_heldout,
    thin_map,
)
