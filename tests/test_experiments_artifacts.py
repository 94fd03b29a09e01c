"""From a real selection of a tiny model to every artifact, and from the artifacts to tables 8, 10 and 17."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hydra import compose, initialize_config_dir

from clusterft import stages
from clusterft.analyse import analyse
from clusterft.app import register_schema
from clusterft.store import RunStore
from experiments.artifacts import SCHEMAS, read_artifact
from experiments.measures import MAKERS, make_artifact

CONF = Path(__file__).resolve().parents[1] / "conf"


def test_every_artifact_has_a_maker() -> None:
    assert set(MAKERS) == set(SCHEMAS)


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One feature store for both runs: the second finds the gradients of the first."""
    return tmp_path_factory.mktemp("cache")


@pytest.mark.slow
@pytest.mark.parametrize("selector", ["cluster", "random"])
def test_every_artifact_of_a_real_run(selector: str, cache: Path, tmp_path: Path) -> None:
    register_schema()
    with initialize_config_dir(str(CONF), version_base="1.3"):
        places = [f"runtime.cache_dir={cache}", f"runtime.runs_dir={tmp_path}/runs"]
        cfg = compose("config", overrides=["+scale=smoke", f"selector={selector}", "selector.ratio='0.50'", "seed=1", *places])
    ready = stages.prepare(cfg)
    selection, _ = stages.select(cfg, ready, tmp_path / "run")
    run = analyse(cfg, tmp_path / "run", ready)
    assert run.gradients.shape == (len(ready.pool), 2048)
    assert sorted(ready.pool.ids[i] for i in run.kept) == sorted(selection.ids)
    assert sorted(i for step in run.steps for part in step for i in part) == sorted(run.kept.tolist())
    if selector == "cluster":
        assert np.array_equal(run.clusters[run.kept], selection.clusters)  # the clusters are those that the selector saw
    for name in MAKERS if selector == "cluster" else ("worker_similarity",):
        make_artifact(name, run, tmp_path / "run", "run")
        assert read_artifact(tmp_path / "run/artifacts", name) is not None


@pytest.mark.slow
def test_two_processes_take_the_gradients_that_one_takes(tmp_path: Path) -> None:
    """Each takes every second row; the same rows to the last bit, threads being the same."""
    register_schema()
    found = {}
    for processes in (1, 2):
        home = tmp_path / str(processes)
        layout = [f"runtime.feature_processes={processes}", "runtime.feature_threads=1"]
        with initialize_config_dir(str(CONF), version_base="1.3"):
            places = [f"runtime.cache_dir={home}/cache", f"runtime.runs_dir={home}/runs"]
            cfg = compose("config", overrides=["+scale=smoke", "selector=random", "selector.ratio='0.50'", *layout, *places])
        run_dir, ready = RunStore(home / "runs").begin(cfg), stages.prepare(cfg)
        stages.select(cfg, ready, run_dir)
        found[processes] = analyse(cfg, run_dir, ready).gradients
        accounts = list((home / "cache/features").glob("true_gradient-*/account-*"))
        assert len(accounts) == processes
    assert np.array_equal(found[1], found[2])
