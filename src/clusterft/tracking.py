"""Weights & Biases as one more reader of the metrics lines; metrics.jsonl is written in any case.

In comes `runtime.wandb` (auto, online, offline, disabled) and the run's id; out comes a function to pass to `train(on_step=...)`
on rank 0. The tracker's run id is the run's own, so that a resumed run stays one run. Nothing is imported unless it is asked for.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

MODES = ("auto", "online", "offline", "disabled")
PROJECT = "clusterft"


class Tracker(Protocol):
    def __call__(self, line: dict[str, Any]) -> None: ...


def check_mode(mode: str) -> str:
    """The mode to use: `auto` means offline where wandb is installed and disabled where it is not.

    Raises ValueError for an unknown mode, or for one that asks for the package wandb where it is not installed.
    """
    if mode not in MODES:
        raise ValueError(f"runtime.wandb={mode!r} is not one of {', '.join(MODES)}")
    installed = importlib.util.find_spec("wandb") is not None
    if mode == "auto":
        return "offline" if installed else "disabled"
    if mode != "disabled" and not installed:
        raise ValueError(f"runtime.wandb={mode} needs the package wandb, which is not installed; use runtime.wandb=disabled")
    return mode


@contextmanager
def wandb_tracker(mode: str, *, run_id: str, folder: Path, config: Mapping[str, Any]) -> Iterator[Tracker | None]:
    """Yields what to call with each metrics line, or None if disabled; closes the tracker's run at the end."""
    mode = check_mode(mode)
    if mode == "disabled":
        yield None
        return
    import wandb

    folder.mkdir(parents=True, exist_ok=True)
    run = wandb.init(project=PROJECT, id=run_id, resume="allow", mode=mode, dir=str(folder), config=dict(config))
    try:
        yield lambda line: run.log({k: v for k, v in line.items() if isinstance(v, int | float)}, step=line["step"])
    finally:
        run.finish()
