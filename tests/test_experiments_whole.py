"""`+experiment=all` as a whole: real runs of the tiny model, diagnostics on true gradients, tables, pages, and the same again without runs."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from composed import ROOT, shared_cache
from hydra import compose, initialize_config_dir
from rich.console import Console

from clusterft.app import register_schema
from clusterft.records import RunRecord
from experiments import drive
from experiments.reading import read_table
from experiments.recordstore import Records
from experiments.running import Job, run_jobs
from experiments.spec import expand

pytestmark = pytest.mark.slow


@pytest.fixture
def composing() -> Iterator[None]:
    register_schema()
    with initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):
        yield


def test_some_members_run_render_and_render_again_from_what_is_committed(
    composing: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import run

    monkeypatch.setattr(drive, "ROOT", tmp_path)
    places = [f"runtime.runs_dir={tmp_path}/runs", f"runtime.cache_dir={shared_cache()}", f"runtime.assets_dir={ROOT}/assets"]
    over = ["+experiment=all", "+scale=smoke", "experiment.members=[figure6,table10,table17,variance]", *places]
    over += ["seed=0", "selector.ratio=1.0", "data.max_rows=40"]
    made: list[str] = []

    def counted(cfg: Any) -> RunRecord:
        record = run.one_run(cfg)
        made.append(record.run_id)
        return record

    drive.run_experiment(compose("config", overrides=over), over, run=counted, preflight=run.check, measure=run.measure)
    assert len(made) == len(set(made)) == 2  # CluSTER's run serves all four
    results = tmp_path / "results/smoke"
    cost = json.loads((tmp_path / "runs" / made[0] / "record.json").read_text())["cost"]
    assert cost["training_cpu_seconds"] > 0 and cost["selection_cpu_seconds"] >= 0
    assert {p.name for p in results.iterdir()} >= {
        "README.md",
        "figure6.svg",
        "figure6.png",
        "variance.svg",
        "table10.md",
        "table17.json",
    }
    figure6 = read_table(results / "figure6.json")
    assert figure6.line("CluSTER r=1.00").values["cluster_similarity.p_value"].n == 1
    assert len(list(results.glob("artifacts/*/*.json"))) == 6

    again = tmp_path / "elsewhere"
    shutil.copytree(tmp_path / "results", again / "results")
    monkeypatch.setattr(drive, "ROOT", again)

    def asked(option: str, *more: str) -> None:
        cfg = compose("config", overrides=[*over, f"runtime.runs_dir={again}/none", f"{option}=true", *more])
        drive.run_experiment(cfg, [*over, *more], counted, run.check, run.measure)

    asked("check")
    before = {p.name: p.read_bytes() for p in (again / "results/smoke").iterdir() if p.is_file()}
    for name in ("figure6.md", "figure6.svg", "table10.csv", "README.md"):
        (again / "results/smoke" / name).write_text("something else")
    with pytest.raises(SystemExit):
        asked("check")
    asked("render")  # what a change of the tables' code needs where the runs are not
    assert {p.name: p.read_bytes() for p in (again / "results/smoke").iterdir() if p.is_file()} == before
    with pytest.raises(ValueError, match=r"figure6: the table there .*; variance: the table there .*; nothing was written"):
        asked("render", "trainer.learning_rate=7e-4")  # other runs, whose records are not there
    for changed in ([], ["trainer.learning_rate=7e-4"]):  # a machine without the runs: nothing gets lost
        cfg = compose("config", overrides=[*over, f"runtime.runs_dir={again}/none", *changed])
        drive.finish(drive.drivers(cfg, [*over, *changed]), run.measure, Console(quiet=True))
    assert {p.name: p.read_bytes() for p in (again / "results/smoke").iterdir() if p.is_file()} == before
    shutil.rmtree(again / "results/smoke")
    with pytest.raises(ValueError, match="leave it out to make the runs"):
        asked("render")
    assert len(made) == 2


def test_settings_do_not_replace_a_table_without_runs(composing: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Table 9 comes from code and configuration alone; another folder takes it, and a stranger's docs/ there stay as they are."""
    monkeypatch.setattr(drive, "ROOT", tmp_path)
    mine = tmp_path / "elsewhere"
    (mine / "docs").mkdir(parents=True)
    (mine / "docs/findings.md").write_text("mine")

    def finish(*more: str) -> None:
        over = ["+experiment=table9", "+scale=smoke", f"runtime.runs_dir={tmp_path}/runs", *more]
        drive.finish(drive.drivers(compose("config", overrides=over), over), lambda *_: None, Console(quiet=True))

    finish()
    before = (tmp_path / "results/smoke/table9.md").read_text()
    finish("trainer.workers=8")
    assert (tmp_path / "results/smoke/table9.md").read_text() == before
    finish("trainer.workers=8", f"runtime.results_dir={mine}/results")
    assert "settings of the command line: trainer.workers=8" in (mine / "results/smoke/table9.md").read_text()
    assert (mine / "docs/findings.md").read_text() == "mine"
    (tmp_path / "results/smoke/table9.json").write_text("{")  # a damaged file is no reason to keep it
    finish("trainer.workers=8")
    assert "trainer.workers=8" in (tmp_path / "results/smoke/table9.md").read_text()


def test_a_narrowed_plan_names_its_own_cells_and_another_cell_is_refused(composing: None, tmp_path: Path) -> None:
    over = ["+experiment=table2", "+scale=smoke", "seed=1", f"runtime.runs_dir={tmp_path}/runs"]
    (one,) = drive.drivers(compose("config", overrides=over), over)
    whole = one.plan(Records(), costs=False)
    assert {c.cell.seed for c in one.narrow(whole).cells} == {1}
    assert one.narrow(whole).missing_array == ",".join(str(c.index) for c in expand(one.spec) if c.seed == 1)
    with pytest.raises(ValueError, match=r"cell=0 is .* seed=0, which the command line leaves out"):
        one.wanted(whole, 0)


@pytest.mark.parametrize("asked", ["", "file/below", "/proc/nope"])
def test_a_results_folder_that_cannot_be_is_refused_before_any_run(composing: None, tmp_path: Path, asked: str) -> None:
    (tmp_path / "file").write_text("")
    folder = f"{tmp_path}/{asked}" if asked.startswith("file") else asked
    over = ["+experiment=table2", "+scale=smoke", f"runtime.runs_dir={tmp_path}/runs", f"runtime.results_dir={folder}"]

    def never(*_: Any) -> Any:
        pytest.fail("a run began")

    with pytest.raises(ValueError, match=r"runtime\.results_dir"):
        drive.run_experiment(compose("config", overrides=over), over, never, lambda cfg: None, never)


def test_one_failed_run_does_not_stop_the_others_and_three_in_a_row_do(tmp_path: Path) -> None:
    from clusterft.store import write_atomic

    def failing(names: set[str]) -> Any:
        def run(cfg: Any) -> RunRecord:
            name = cfg["name"]
            status = "failed" if name in names else "complete"
            cost = {"selection_seconds": 0.0, "training_seconds": 0.0}
            selection = {"budget": 1, "pool_rows": 2}
            record = RunRecord(name, status, {}, 0, "", False, {}, {}, selection, {}, (), cost)
            (tmp_path / name).mkdir()
            write_atomic(tmp_path / name / "record.json", json.dumps(record.to_json()))
            if status == "failed":
                raise RuntimeError(f"{name} broke")
            return record

        return run

    def jobs(names: str) -> list[Job]:
        return [Job(name, name, lambda name=name: {"name": name}) for name in names]

    console = Console(file=open("/dev/null", "w"))  # noqa: SIM115
    failed = run_jobs(jobs("abcd"), tmp_path, failing({"b", "c"}), lambda cfg: None, console)
    assert failed == ["b (run b) failed: b broke", "c (run c) failed: c broke"]
    with pytest.raises(RuntimeError, match="g broke"):
        run_jobs(jobs("efgh"), tmp_path, failing({"e", "f", "g"}), lambda cfg: None, console)
    assert not (tmp_path / "h").exists()
    with pytest.raises(RuntimeError, match="i broke"):
        run_jobs(jobs("i"), tmp_path, failing({"i"}), lambda cfg: None, console)
