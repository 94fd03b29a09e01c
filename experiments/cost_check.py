"""The cost model against runs that were measured: how far off it is, stage by stage."""

from __future__ import annotations

import statistics
from collections.abc import Iterable
from dataclasses import dataclass

from clusterft.records import RunRecord
from experiments.cost_model import H100, TWO_CORES, CostModel

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
    """Predicts every complete run from its configuration alone. A selection without a pass of a model is not counted.

    A run whose size the configuration does not tell is left out. Raises ValueError when nothing is left.
    """
    pairs: dict[str, list[tuple[float, float]]] = {stage: [] for stage in STAGES}
    for record in records:
        if record.status != "complete":
            continue
        try:
            predicted = CostModel(H100 if record.hardware["gpus"] else TWO_CORES).stages(record.config)
        except (KeyError, TypeError):
            continue
        for stage in STAGES:
            seconds = record.cost[f"{stage}_seconds"]
            if predicted[stage] > 0 and seconds > 0 and (stage != "selection" or record.cost.get("forward_passes")):
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
        "| Stage | Runs | Predicted (s, all) | Measured (s, all) | Typical factor | Worst factor |",
        "|---|---|---|---|---|---|",
    ]
    for x in found:
        rows.append(
            f"| {x.stage} | {x.runs} | {x.predicted:,.0f} | {x.measured:,.0f} | {x.typical_factor:.2f} | {x.worst_factor:.2f} |"
        )
    text = (
        "`experiments/cost_model.py` predicts a run from its configuration alone: passes and tokens times operations, over the rate of the "
        "device. Beside it stands what these runs measured. A factor is the larger of predicted / measured and measured / predicted; typical "
        "is the median over runs. Shares kept and mean lengths are assumed beforehand, and machines differ."
    )
    return "\n\n".join(["## The cost model against these runs", text, "\n".join(rows)])


def _compared(stage: str, pairs: list[tuple[float, float]]) -> StageCheck:
    factors = [max(p / m, m / p) for p, m in pairs]
    predicted, measured = (sum(x) for x in zip(*pairs, strict=True))
    return StageCheck(stage, len(pairs), predicted, measured, statistics.median(factors), max(factors))
