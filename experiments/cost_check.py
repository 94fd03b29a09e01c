"""The cost model against runs that were measured: how far off it is, stage by stage."""

from __future__ import annotations

import statistics
from collections.abc import Iterable
from dataclasses import dataclass

from clusterft.records import RunRecord
from experiments.cost_model import H100, TWO_CORES, CostModel
from experiments.cost_passes import own_feature_key

STAGES = ("selection", "training", "evaluation")


@dataclass(frozen=True)
class StageCheck:
    """Predicted against measured wall seconds of one stage.

    predicted, measured        seconds, summed over the runs
    typical_factor, worst_factor  median and largest of max(predicted / measured, measured / predicted) over the runs
    """

    stage: str
    runs: int
    predicted: float
    measured: float
    typical_factor: float
    worst_factor: float


def check(records: Iterable[RunRecord]) -> list[StageCheck]:
    """Predicts every complete run from its configuration alone.

    Of selection each measurement counts once: runs that read the same features repeat the seconds of the run that made them. A selection
    without a pass is not counted, nor a run whose size or method the model does not know. Raises ValueError when nothing is left.
    """
    pairs: dict[str, list[tuple[float, float]]] = {stage: [] for stage in STAGES}
    seen: set[tuple[str, float]] = set()
    for record in records:
        if record.status != "complete":
            continue
        try:
            gpus = record.hardware["gpus"]
            model = CostModel(H100 if gpus else TWO_CORES, devices=len(gpus) or None)
            predicted, feature = model.stages(record.config), own_feature_key(record.config)
        except (KeyError, TypeError):
            continue
        predicted["selection"] *= model.selections(record.config)
        measured = {stage: record.cost.get(f"{stage}_seconds") for stage in STAGES}
        made = (feature, record.cost.get("feature_seconds") or 0.0)
        if made in seen or not feature:
            del measured["selection"]
        seen.add(made)
        for stage, seconds in measured.items():
            if predicted[stage] > 0 and isinstance(seconds, int | float) and 0 < seconds < float("inf"):
                pairs[stage].append((predicted[stage], seconds))
    found = [_compared(stage, both) for stage, both in pairs.items() if both]
    if not found:
        raise ValueError("no complete record whose seconds the cost model can predict")
    return found


def check_markdown(records: Iterable[RunRecord]) -> str:
    """The table of `check` with what its words mean; "" when there is nothing to compare."""
    try:
        found = check(records)
    except ValueError:
        return ""
    rows = [
        "| Stage | Measurements | Predicted (s, all) | Measured (s, all) | Typical factor | Worst factor |",
        "|---|---|---|---|---|---|",
    ]
    for x in found:
        rows.append(
            f"| {x.stage} | {x.runs} | {x.predicted:,.0f} | {x.measured:,.0f} | {x.typical_factor:.2f} | {x.worst_factor:.2f} |"
        )
    text = (
        "`experiments/cost_model.py` predicts a run from its configuration alone: passes and tokens times operations, over the rate of the "
        "device. Beside it stands what these runs measured. A factor is the larger of predicted / measured and measured / predicted; typical "
        "is the median over runs. Shares kept and mean lengths are assumed beforehand, and machines differ. Features that several runs "
        "read were measured once and count once."
    )
    return "\n\n".join(["## The cost model against these runs", text, "\n".join(rows)])


def _compared(stage: str, pairs: list[tuple[float, float]]) -> StageCheck:
    factors = [max(p / m, m / p) for p, m in pairs]
    predicted, measured = (sum(x) for x in zip(*pairs, strict=True))
    return StageCheck(stage, len(pairs), predicted, measured, statistics.median(factors), max(factors))
