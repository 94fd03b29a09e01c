"""From scores to a selection: what every ranking baseline shares.

In come scores in pool order, a reason for each row that may not be ranked, and a budget; out comes a `Selection`, best row
first. Ties go to the smaller id, so the result depends neither on the order of the pool nor on the sort; a smaller budget is a
prefix of a larger one. A score that is not finite is never ranked (in torch's descending sort NaN would come first).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from clusterft.budget import require_rows
from clusterft.records import Pool, Selection

UNSEEDED = -1
"""`Selection.seed` as a selector leaves it: the runner, which made the generator, writes the run's seed in."""


def set_aside_nonfinite(ids: tuple[str, ...], scores: np.ndarray, reasons: Mapping[str, str]) -> dict[str, str]:
    """id -> reason: those given, and `nonfinite` for every other row whose score (n,) is NaN or infinite."""
    found = {one: "nonfinite" for one, score in zip(ids, scores, strict=True) if not np.isfinite(score)}
    return {**found, **reasons}


def best_first(ids: tuple[str, ...], scores: np.ndarray, excluded: Mapping[str, str]) -> list[str]:
    """Ids by falling score, ties by id, without `excluded`."""
    ranked = [(-float(score), one) for one, score in zip(ids, scores, strict=True) if one not in excluded]
    return [one for _, one in sorted(ranked)]


def ranked_selection(
    method: str,
    pool: Pool,
    scores: np.ndarray,
    budget: int,
    *,
    reasons: Mapping[str, str] | None = None,
    info: Mapping[str, Any] | None = None,
) -> Selection:
    """The `budget` rows of highest score.

    scores (n,) in pool order; reasons id -> why the row may not be ranked. Raises ValueError, with both numbers, if `budget`
    exceeds the rows that can be ranked.
    """
    if scores.shape != (len(pool),):
        raise ValueError(f"{method}: {scores.shape} scores for a pool of {len(pool)} rows; compute the feature again")
    require_rows(method, budget, len(pool))
    rejected = set_aside_nonfinite(pool.ids, scores, reasons or {})
    order = best_first(pool.ids, scores, rejected)
    require_ranked(method, budget, len(order), rejected)
    return Selection(
        method=method,
        pool_fingerprint=pool.fingerprint,
        ids=tuple(order[:budget]),
        budget=int(budget),
        seed=UNSEEDED,
        scores={one: float(score) for one, score in zip(pool.ids, scores, strict=True) if one not in rejected},
        rejected=rejected,
        info={**(info or {}), "rejected": count_reasons(rejected)},
    )


def require_ranked(method: str, budget: int, ranked: int, rejected: Mapping[str, str]) -> None:
    """Raises ValueError if fewer rows can be ranked than the budget asks for, with both numbers and what was set aside."""
    if budget > ranked:
        raise ValueError(
            f"{method}: a budget of {budget} rows, but only {ranked} can be chosen "
            f"({len(rejected)} rejected: {count_reasons(rejected)}); lower the budget"
        )


def count_reasons(rejected: Mapping[str, str]) -> dict[str, int]:
    """reason -> how many rows, sorted by reason."""
    counts: dict[str, int] = {}
    for reason in sorted(rejected.values()):
        counts[reason] = counts.get(reason, 0) + 1
    return counts
