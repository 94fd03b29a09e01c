"""Run directories: names, refusals, atomic writes."""

import json
import multiprocessing
from dataclasses import replace

import pytest
from omegaconf import OmegaConf

from clusterft.atomic import write_atomic
from clusterft.records import Metric, RunRecord
from clusterft.store import RunStore, StoreError, identity, run_id


def config(**changes):
    base = {
        "seed": 0,
        "selector": {"ratio": "1.00", "budget": "match_cluster", "rows": None, "_target_": "x"},
        "clustering": {"n_clusters": 4},
        "runtime": {"runs_dir": "a", "processes": 4},
        "trainer": {"workers": 4},
    }
    return OmegaConf.merge(OmegaConf.create(base), changes)


def record(name, **changes):
    whole = RunRecord(
        run_id=name, status="complete", config={}, seed=0, commit="c", dirty=False, packages={}, hardware={}, selection={}, train={},
        metrics=(Metric("humaneval", "pass@1", 0.5, 10),), cost={},
    )  # fmt: skip
    return replace(whole, **changes)


def test_where_and_how_a_run_is_made_does_not_change_its_id():
    assert run_id(config()) == run_id(config(runtime={"runs_dir": "elsewhere", "processes": 1}, cell=3, plan=True))


def test_what_changes_a_result_changes_the_id():
    ids = [
        run_id(c)
        for c in (
            config(),
            config(seed=1),
            config(clustering={"n_clusters": 8}),
            config(selector={"ratio": "0.5"}),
            config(trainer={"workers": 8}),
        )
    ]
    assert len(set(ids)) == 5


@pytest.mark.parametrize("spelling", [0.5, "0.5", "0.50", ".5"])
def test_one_ratio_has_one_id_however_it_is_written(spelling):
    assert run_id(config(selector={"ratio": spelling})) == run_id(config(selector={"ratio": "0.5"}))


def test_full_data_is_one_run_at_every_ratio_and_clustering():
    full = {"budget": "all"}
    assert run_id(config(selector=full)) == run_id(config(selector={**full, "ratio": "0.5"}, clustering={"n_clusters": 8}))


def test_an_option_that_is_off_is_the_same_run_as_one_that_did_not_exist():
    before = config(trainer={"workers": 4})
    assert run_id(config(trainer={"memory": None, "nested": {"deep": None}})) != run_id(config(trainer={"memory": 0}))
    assert run_id(config(trainer={"memory": None})) == run_id(before)


def test_seed_zero_is_not_no_seed():
    assert identity(config(seed=0))["seed"] == 0


def test_config_is_written_first_and_another_configuration_is_refused_by_key(tmp_path):
    store = RunStore(tmp_path)
    folder = store.begin(config())
    assert (folder / "config.yaml").exists()
    (folder / "config.yaml").write_text(OmegaConf.to_yaml(config(clustering={"n_clusters": 8})))
    before = (folder / "config.yaml").read_bytes()
    with pytest.raises(StoreError, match=r"differs in clustering.n_clusters \(4 in the command, 8 on disk\)"):
        store.begin(config())
    assert (folder / "config.yaml").read_bytes() == before


def test_a_record_comes_back_as_it_was_written(tmp_path):
    store = RunStore(tmp_path)
    (tmp_path / "abc").mkdir()
    store.write(record("abc"))
    assert store.read("abc") == record("abc")
    assert [r.run_id for r in store.records()] == ["abc"]
    assert store.read("nothing") is None


def test_a_record_of_another_schema_is_refused_with_the_remedy(tmp_path):
    store = RunStore(tmp_path)
    (tmp_path / "abc").mkdir()
    path = store.write(record("abc"))
    data = json.loads(path.read_text())
    path.write_text(json.dumps({**data, "schema": 99}))
    with pytest.raises(StoreError, match=r"schema 99 is not 1.*move it away"):
        store.read("abc")


def test_nan_never_reaches_a_record_file(tmp_path):
    (tmp_path / "abc").mkdir()
    with pytest.raises(ValueError, match="JSON"):
        RunStore(tmp_path).write(record("abc", cost={"training_seconds": float("nan")}))
    assert not (tmp_path / "abc" / "record.json").exists()
    assert list((tmp_path / "abc").iterdir()) == []


def hold(root, ready, release):
    with RunStore(root).lock("abc"):
        ready.set()
        release.wait(20)


def test_one_process_works_on_a_run_and_its_death_frees_the_lock(tmp_path):
    context = multiprocessing.get_context("spawn")
    ready, release = context.Event(), context.Event()
    other = context.Process(target=hold, args=(tmp_path, ready, release))
    other.start()
    assert ready.wait(60)
    with pytest.raises(StoreError, match="another process"), RunStore(tmp_path).lock("abc"):
        pass
    other.kill()
    other.join()
    with RunStore(tmp_path).lock("abc"):
        pass


def test_a_failed_write_leaves_the_old_file(tmp_path):
    path = tmp_path / "x.json"
    write_atomic(path, "old")
    with pytest.raises(UnicodeEncodeError):
        write_atomic(path, "\ud800")
    assert path.read_text() == "old"
    (tmp_path / "folder").mkdir()
    with pytest.raises(IsADirectoryError):
        write_atomic(tmp_path / "folder", b"written beside it, but there it cannot go")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["folder", "x.json"]


def test_a_written_file_has_the_permissions_of_any_new_file(tmp_path):
    (tmp_path / "plain").write_text("")
    write_atomic(tmp_path / "atomic", b"\x00\xff")
    assert (tmp_path / "atomic").read_bytes() == b"\x00\xff"
    assert (tmp_path / "atomic").stat().st_mode == (tmp_path / "plain").stat().st_mode
