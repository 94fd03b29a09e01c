"""A smoke run up to its trained model, with re-selection, in this process or in one that kills itself at a named moment."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

from composed import composed
from omegaconf import DictConfig

from clusterft import adaptive, stages
from clusterft.store import RunStore

ROOT = Path(__file__).resolve().parents[1]
MOMENTS = ("before_choosing", "before_header", "before_training")


def adaptive_cfg(folder: Path, cache: Path, *overrides: str) -> DictConfig:
    """Smoke scale with one thread everywhere: bits are compared."""
    places = [f"runtime.runs_dir={folder}", f"runtime.cache_dir={cache}", f"runtime.assets_dir={ROOT}/assets"]
    threads = ["runtime.feature_threads=1", "runtime.threads_per_process=1"]
    return composed("+scale=smoke", "selector=cluster", "selector.ratio='0.50'", *places, *threads, *overrides)


def trained(folder: Path, cache: Path, *overrides: str) -> Path:
    """The run directory after selection and training. The same call goes on where an interrupted one stopped."""
    cfg = adaptive_cfg(folder, cache, *overrides)
    ready = stages.prepare(cfg)
    run_dir = RunStore(folder).begin(cfg)
    stages.select(cfg, ready, run_dir)
    adaptive.train(cfg, run_dir, ready)
    return run_dir


def kill_before(moment: str) -> None:
    """This process will send itself SIGKILL when it comes to `moment` of a re-selection."""

    def killed(*_: Any, **__: Any) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    if moment == "before_choosing":  # features are whole
        adaptive.generator = killed
    elif moment == "before_header":  # rows and cost are written
        adaptive.write_selection = killed
    else:
        start = stages.run_on_workers
        stages.run_on_workers = lambda cfg, stage, **k: (
            killed() if k.get("segment") and stage == "train" else start(cfg, stage, **k)
        )


if __name__ == "__main__":
    kill_before(sys.argv[1])
    trained(Path(sys.argv[2]), Path(sys.argv[3]), *sys.argv[4:])
