"""When training stops to choose anew: the segments of a run and their limits, worked out before the first step.

In come the sampler's settings, the number of epochs, the rows of the first selection and the global batch; out come `Segment`s,
half-open ranges of global steps. Between two of them `clusterft.adaptive` computes features, clusters and a selection with the
model as it then is.

The first selection fixes the number of rows m, and every later one keeps exactly m rows. So the total number of steps, and with it
the learning rate of each, is known in advance; every step holds as many rows as it would without re-selection; and runs with and
without it differ in which rows they see, not in how many. The balance rule q = floor(r n_min) would give another m each time, since
the smallest cluster changes.

A step keeps its place in its epoch: step s takes what the selection in force has at (s div S, s mod S), S steps an epoch. Within an
epoch that two selections share, a row of both may therefore come twice and a row of the later one not at all; from the next epoch on
every row comes once.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

KEYS = ("reselect_every_epochs", "reselect_every_steps")


@dataclass(frozen=True)
class Segment:
    """Global steps begin ... end - 1, trained on selection `number` (0: the one made before training)."""

    number: int
    begin: int
    end: int


def period(sampler_cfg: Any) -> tuple[str, int] | None:
    """(key, value) of the re-selection that is asked for, or None. Raises ValueError for both keys or a value below 1."""
    given = {key: getattr(sampler_cfg, key) for key in KEYS if getattr(sampler_cfg, key) is not None}
    if not given:
        return None
    if len(given) > 1:
        raise ValueError("sampler.reselect_every_epochs and sampler.reselect_every_steps are both set; set one of them to null")
    ((key, value),) = given.items()
    if value < 1:
        raise ValueError(f"sampler.{key}={value} must be at least 1, or null for one selection before training")
    return key, value


def segments(sampler_cfg: Any, *, epochs: int, rows: int, global_batch: int) -> tuple[Segment, ...]:
    """The segments of a training on `rows` rows; a single one without re-selection.

    Raises ValueError as `period` does, and for a period that training never reaches.
    """
    steps_per_epoch = -(-rows // global_batch)
    total, asked = epochs * steps_per_epoch, period(sampler_cfg)
    if asked is None:
        return (Segment(0, 0, total),)
    key, value = asked
    every = value * steps_per_epoch if key == "reselect_every_epochs" else value
    if every >= total:
        raise ValueError(
            f"sampler.{key}={value} is never reached: training has {total} steps, {steps_per_epoch} an epoch, on {rows} rows; "
            "use a smaller value, or null for one selection before training"
        )
    return tuple(Segment(n, begin, min(begin + every, total)) for n, begin in enumerate(range(0, total, every)))


def check_reselection(sampler_cfg: Any, selector: Any, *, epochs: int) -> None:
    """What can be refused before any work. Raises ValueError as `period` does, for a selector whose features do not follow the
    model, and for epochs that are too few."""
    asked = period(sampler_cfg)
    if asked is None:
        return
    key, value = asked
    if not getattr(selector, "follows_model", False):
        raise ValueError(
            f"sampler.{key}={value}: selector {selector.name} does not follow the model in training, so choosing anew would give "
            "nothing new; use selector=cluster, or set it to null"
        )
    if key == "reselect_every_epochs" and value >= epochs:
        raise ValueError(
            f"sampler.{key}={value} is never reached in trainer.epochs={epochs}; use sampler.reselect_every_steps or more epochs"
        )


def selection_folder(run_dir: Path, number: int) -> Path:
    """Where selection `number` of a run lies: `selection` and, for those made during training, `selection/1`, `selection/2`, ..."""
    return run_dir / "selection" if number == 0 else run_dir / "selection" / str(number)
