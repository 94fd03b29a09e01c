"""Configurations composed as run.py does, for tests that run stages in this process."""

from __future__ import annotations

import tempfile
from functools import cache
from pathlib import Path

from hydra import compose, initialize_config_dir
from omegaconf import DictConfig

from clusterft.app import register_schema

ROOT = Path(__file__).resolve().parents[1]


def composed(*overrides: str) -> DictConfig:
    """The configuration of `python run.py OVERRIDES`."""
    register_schema()
    with initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):
        return compose("config", overrides=list(overrides))


@cache
def shared_cache() -> Path:
    """One cache for all tests of this process: the pool is harvested once. Removed when the process ends."""
    holder = tempfile.TemporaryDirectory(prefix="clusterft-cache-")
    _HELD.append(holder)
    return Path(holder.name)


_HELD: list[tempfile.TemporaryDirectory] = []


def smoke(folder: Path, *overrides: str) -> DictConfig:
    """One smoke run whose directories lie in `folder`."""
    places = [f"runtime.runs_dir={folder}/runs", f"runtime.cache_dir={shared_cache()}", f"runtime.assets_dir={ROOT}/assets"]
    return composed("+scale=smoke", *places, *overrides)
