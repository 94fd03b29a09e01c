"""Is the margin of a loss small against what training gained? If not, "no worse" is said of almost any run.

Comparison + RunRecords of the reference ► margin_notes ► at most one sentence
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from clusterft.records import RunRecord
from eval.compare_text import is_loss
from eval.comparison import Comparison
from eval.verdict import NO_WORSE, WORSE

LARGE_SHARE = 0.25
"""A margin above this share of the gain is large."""


def margin_notes(c: Comparison, reference: Sequence[RunRecord]) -> list[str]:
    """A warning where the margin in nats exceeds a quarter of what training gained on the reference side, else nothing.

    Gained is the training loss of the first step minus that of the last, averaged over the complete runs. Nothing is said if a
    record lacks either, or if no loss was judged other than worse.
    """
    kinds = {r.verdict.kind for r in c.rows if is_loss(r)} - {WORSE}
    gains = [_gain(r) for r in reference if r.status == "complete"]
    if not kinds or not gains or any(g is None for g in gains):
        return []
    margin = next(r.margin for r in c.rows if is_loss(r))
    gain = sum(g for g in gains if g is not None) / len(gains)
    if margin <= LARGE_SHARE * gain:
        return []
    says = "says" if NO_WORSE in kinds else "would say"
    measured = f"training loss of {c.reference}, first step minus last: {gain:+.4f} nats"
    if gain <= 0:
        return [f"by its own training loss the reference gained nothing ({measured}): 'no worse' {says} little here"]
    share = 100 * margin / gain
    return [
        f"the margin of {margin:g} nats is {share:,.0f} % of what training gained ({measured}): 'no worse' {says} little here"
    ]


def _gain(run: RunRecord) -> float | None:
    first, last = (run.train.get(key) for key in ("first_loss", "last_loss"))
    if not isinstance(first, (int, float)) or not isinstance(last, (int, float)) or not math.isfinite(first - last):
        return None
    return first - last
