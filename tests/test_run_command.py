"""`python run.py` as a person types it: plan, multirun, and every refusal in one sentence."""

import os
import subprocess
import sys

import pytest
from composed import ROOT, shared_cache


def run(*arguments, folder):
    environment = {**os.environ, "CLUSTERFT_CACHE": str(shared_cache()), "OMP_NUM_THREADS": "2", "COLUMNS": "160"}
    command = [sys.executable, "run.py", *arguments, f"runtime.runs_dir={folder}/runs"]
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=600, check=False)


def test_the_plan_starts_nothing(tmp_path):
    done = run("+experiment=table2", "+scale=smoke", "plan=true", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "48 cells" in done.stdout and "--array=0-47" in done.stdout
    assert not (tmp_path / "runs").exists()


@pytest.mark.slow
def test_a_multirun_makes_cells_once_and_the_table_names_the_rest(tmp_path):
    small = ["+experiment=table2", "+scale=smoke", "data.max_rows=32", "trainer.epochs=1"]
    sweep = ["-m", *small, "cell=range(0,2)"]
    first = run(*sweep, folder=tmp_path)
    assert first.returncode == 0, first.stderr
    records = sorted((tmp_path / "runs").glob("*/record.json"))
    assert len(records) == 2
    stamps = [r.stat().st_mtime_ns for r in records]
    assert run(*sweep, folder=tmp_path).returncode == 0
    assert [r.stat().st_mtime_ns for r in records] == stamps
    planned = run(*small, "plan=true", folder=tmp_path)
    assert "2 complete" in planned.stdout and "--array=2-47" in planned.stdout


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["+scale=smoke", "selector=nope"], ["selector/nope", "cluster", "random"]),
        (["+scale=smoke", "model=nope"], ["model/nope", "smollm2_135m"]),
        (["+scale=smoke", "trainer.epoch=1"], ["epoch"]),
        (["+scale=smoke", "+experiment=table2"], ["+scale must come after +experiment"]),
        (["+scale=smoke", "selector.ratio='2'"], ["ratio 2 is outside"]),
        (["+scale=smoke", "seed=007"], ["write seed=7"]),
        (["+experiment=table2", "+scale=smoke", "cell=48"], ["cell=48 is outside 0 ... 47"]),
        (["+experiment=table2"], ["CUDA devices", "+scale=laptop"]),
        (["+scale=smoke", "data=jsonl", "data.path=/nowhere/x.jsonl"], ["/nowhere/x.jsonl"]),
    ],
)
def test_each_mistake_is_one_sentence_and_a_code(tmp_path, arguments, words):
    done = run(*arguments, folder=tmp_path)
    said = done.stdout + done.stderr
    assert done.returncode != 0
    assert all(word in said for word in words), said
    assert "Traceback" not in said
    assert not list((tmp_path / "runs").glob("*/record.json")) or "jsonl" in said


def test_a_misspelt_key_in_an_experiment_file_is_named(tmp_path):
    path = ROOT / "conf/experiment/zz_misspelt.yaml"
    path.write_text("# @package _global_\ntrainer:\n  epocs: 3\n")
    try:
        done = run("+experiment=zz_misspelt", "+scale=smoke", folder=tmp_path)
    finally:
        path.unlink()
    assert done.returncode != 0 and "epocs" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["+scale=smoke", "selector.ratoi=0.5"], "Could not override 'selector.ratoi': there is no such key"),
        (["+scale=smoke", "selector=randm"], "known are cluster, full, ifd, less, random, s2l"),
        (["+experiment=table99"], "Could not find 'experiment/table99'; known are all,"),
    ],
)
def test_hydras_own_refusals_are_one_sentence(tmp_path, arguments, words):
    done = run(*arguments, folder=tmp_path)
    assert done.returncode != 0
    assert done.stderr.startswith("error: ") and words in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1, done.stderr
