"""gc lists and removes what no table needs: never a needed run, never a folder that is held, never what it cannot place."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from composed import composed
from omegaconf import OmegaConf

from clusterft.locks import try_lock
from clusterft.records import Metric, RunRecord
from clusterft.store import RunStore, run_id
from experiments import gc
from experiments.recordstore import load_records

CELL = ("+scale=smoke", "selector=cluster", "selector.ratio='1.00'", "seed=0")
POOL = "00112233aabbccdd"


def record(cfg, pool=POOL):
    name = run_id(cfg)
    return RunRecord(
        run_id=name, status="complete", config=OmegaConf.to_container(cfg, resolve=True), seed=cfg.seed, commit="c", dirty=False,
        packages={}, hardware={}, selection={"pool_fingerprint": pool, "budget": 8, "pool_rows": 80}, train={},
        metrics=(Metric("humaneval", "pass@1", 0.5, 10),), cost={"training_seconds": 1.0, "selection_seconds": 1.0},
    )  # fmt: skip


def keep_run(root, cfg, pool=POOL):
    store = RunStore(root)
    folder = store.begin(cfg)
    store.write(record(cfg, pool))
    return folder


def keep_feature(cache, name, pool):
    folder = cache / "features" / name
    folder.mkdir(parents=True)
    (folder / "identity.json").write_text(json.dumps({"pool": pool}))
    (folder / "rows.npy").write_bytes(bytes(1000))
    return folder


@pytest.fixture(scope="module")
def needed():
    return gc.needs("smoke", load_records([]), ["table2"])


@pytest.fixture
def place(tmp_path):
    """A needed run, one that no table has, a folder that is no run, and features of three pools."""
    runs, cache = tmp_path / "smoke", tmp_path / "cache"
    wanted = keep_run(runs, composed("+experiment=table2", *CELL))
    stray = keep_run(runs, composed("+scale=smoke", "selector=cluster", "data.max_rows=70"), pool="ffffffffffffffff")
    (runs / "hydra").mkdir()
    (runs / "hydra" / "note.txt").write_text("mine")
    for name, pool in (("a-1", POOL), ("b-2", "ffffffffffffffff"), ("c-3", "0123012301230123")):
        keep_feature(cache, name, pool)
    return tmp_path, wanted, stray


def test_needed_runs_stay_and_strays_are_listed(place, needed):
    folder, wanted, stray = place
    found = {i.path: i for i in gc.runs(folder / "smoke", needed)}
    assert set(found) == {wanted, stray}
    assert not found[wanted].removable and "table2" in found[wanted].reason
    assert found[stray].removable and found[stray].reason == "no table at this scale has this run"


def test_features_go_only_when_every_run_on_their_pool_is_finished(place, needed):
    folder, wanted, _ = place
    records = load_records([folder / "smoke"])
    by_name = lambda n: {i.path.name: i for i in gc.features(folder / "cache", n, records)}  # noqa: E731
    assert {n: i.removable for n, i in by_name(needed).items()} == {"a-1": False, "b-2": True, "c-3": False}
    only = {wanted.name: needed.configs[wanted.name]}
    done = replace(needed, configs=only, open=frozenset())
    assert {n: i.removable for n, i in by_name(done).items()} == {"a-1": True, "b-2": True, "c-3": False}
    still = replace(needed, configs=only, open=frozenset(only))
    assert {n: i.removable for n, i in by_name(still).items()} == {"a-1": False, "b-2": True, "c-3": False}


def test_without_delete_nothing_is_touched_and_with_it_only_the_stray_goes(place, needed, monkeypatch, capsys):
    folder, wanted, stray = place
    monkeypatch.setattr(gc, "needs", lambda *_: needed)
    arguments = ["--runs", str(folder / "smoke"), "--cache", str(folder / "cache")]
    assert gc.main(arguments) == 0
    assert stray.exists() and "nothing was touched" in capsys.readouterr().out
    lock, _ = try_lock(stray)
    assert gc.main([*arguments, "--delete"]) == 1
    assert stray.exists() and "held by another process" in capsys.readouterr().err
    lock.release()
    assert gc.main([*arguments, "--delete"]) == 0
    assert not stray.exists() and (wanted / "record.json").exists()
    assert sorted(p.name for p in (folder / "smoke").iterdir()) == sorted([wanted.name, "hydra"])
    assert sorted(p.name for p in (folder / "cache/features").iterdir()) == ["a-1", "c-3"]


def test_a_needed_run_is_never_deleted_even_when_asked_to(place, needed):
    folder, wanted, _ = place
    with pytest.raises(ValueError, match=r"is needed: needed by"):
        gc.delete([i for i in gc.runs(folder / "smoke", needed) if i.path == wanted])
    assert (wanted / "record.json").exists()


def test_every_experiment_counts_but_the_one_that_stands_for_all():
    assert {"table1", "table17", "figure4", "figure6"} <= set(gc.every_experiment())
    assert "all" not in gc.every_experiment()


def test_an_unknown_scale_is_refused_with_the_known_ones(tmp_path, capsys):
    (tmp_path / "nowhere").mkdir()
    with pytest.raises(SystemExit):
        gc.main(["--runs", str(tmp_path / "nowhere")])
    assert "not one of paper, laptop" in capsys.readouterr().err
