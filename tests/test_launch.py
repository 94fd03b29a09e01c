"""Starting ranks: they know who they are, fail together, pass signals on; environments that contradict themselves are refused."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import psutil
import pytest
import torch

from clusterft import launch
from clusterft.distributed import Dist, Preempted, check_device, init_from_env, layout_from_env, single_process
from clusterft.ranks import Report, judge

HERE = Path(__file__).parent


# -- entries that run in the ranks ------------------------------------------------------------------------------------


def write_facts(*, dist: Dist, out: str) -> None:
    total = dist.all_reduce_sum(torch.tensor([float(dist.rank)], dtype=torch.float64))
    said = dist.broadcast_object(f"hello from {dist.rank}", src=dist.world - 1)
    facts = {
        "rank": dist.rank,
        "world": dist.world,
        "sum": float(total),
        "said": said,
        "gathered": dist.gather_objects(dist.rank * 10),
        "threads": torch.get_num_threads(),
        "omp": os.environ["OMP_NUM_THREADS"],
        "wait": os.environ.get("OMP_WAIT_POLICY"),
    }
    Path(out, f"{dist.rank}.json").write_text(json.dumps(facts))


def fail_on(*, dist: Dist, rank: int, how: str) -> None:
    if dist.rank == rank:
        if how == "raise":
            raise OSError("no space left on the moon")
        if how == "abort":
            dist.abort("nothing to do")
        if how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        sys.exit(3)
    dist.barrier()


def wait_for_ever(*, dist: Dist, out: str) -> None:
    Path(out, f"up-{dist.rank}").write_text(str(os.getpid()))
    time.sleep(120)


# -- spawn --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("processes", [1, 3])
def test_ranks_know_who_they_are(tmp_path, processes):
    launch.run("test_launch:write_facts", {"out": str(tmp_path)}, processes=processes, threads=1)
    found = [json.loads((tmp_path / f"{r}.json").read_text()) for r in range(processes)]
    assert [f["rank"] for f in found] == list(range(processes))
    assert {f["world"] for f in found} == {processes}
    assert {f["sum"] for f in found} == {sum(range(processes))}
    assert {f["said"] for f in found} == {f"hello from {processes - 1}"}
    assert all(f["gathered"] == [r * 10 for r in range(processes)] for f in found)
    assert {(f["threads"], f["omp"]) for f in found} == {(1, "1")}


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("raise", "rank 1: OSError: no space left on the moon"),
        ("abort", "rank 1: nothing to do"),
        ("kill", r"rank 1: killed by SIGKILL \(out of memory\?\)"),
        ("exit", "rank 1: SystemExit: 3"),
    ],
)
def test_one_failing_rank_ends_all_and_is_named_first(how, words):
    started = time.monotonic()
    with pytest.raises(launch.WorkerError, match=words):
        launch.run("test_launch:fail_on", {"rank": 1, "how": how}, processes=3, threads=1)
    assert time.monotonic() - started < 20


def test_a_warm_start_of_four_processes_is_quick(tmp_path):
    """The server holds torch and transformers: no rank imports them again. About a second on an idle machine."""
    launch.run("test_launch:write_facts", {"out": str(tmp_path)}, processes=1, threads=1)
    started = time.monotonic()
    launch.run("test_launch:write_facts", {"out": str(tmp_path)}, processes=4, threads=1)
    assert time.monotonic() - started < 15


def test_arguments_that_make_no_sense_are_refused():
    with pytest.raises(ValueError, match="module:function"):
        launch.run("test_launch.write_facts", {}, processes=1, threads=1)
    with pytest.raises(ValueError, match="at least 1"):
        launch.run("test_launch:write_facts", {}, processes=0, threads=1)
    with pytest.raises(ValueError, match="spawn, torchrun, srun"):
        launch.run("test_launch:write_facts", {}, processes=1, threads=1, launcher="mpi")
    with pytest.raises(ValueError, match=r"slurm/submit\.sh"):
        launch.run("test_launch:write_facts", {}, processes=1, threads=1, nodes=2)


def script(folder: Path, body: str) -> Path:
    path = folder / "parent.py"
    light = "from clusterft import spawn\nspawn.PRELOAD = ('clusterft.forkserver_guard', 'torch')\n"  # these ranks need no more
    path.write_text(f"import sys\nsys.path.insert(0, {str(HERE)!r})\n{light}{textwrap.dedent(body)}")
    return path


def test_ranks_do_not_import_the_parents_script_and_die_with_it(tmp_path):
    """A script without a main guard works, and after SIGKILL of the parent no rank stays behind."""
    body = f"""
        from clusterft import launch
        open({str(tmp_path / "started")!r}, "a").write("x")
        launch.run("test_launch:wait_for_ever", {{"out": {str(tmp_path)!r}}}, processes=2, threads=1)
    """
    parent = subprocess.Popen([sys.executable, str(script(tmp_path, body))])
    deadline = time.monotonic() + 60
    while not all((tmp_path / f"up-{r}").exists() for r in range(2)):
        assert time.monotonic() < deadline and parent.poll() is None
        time.sleep(0.1)
    parent.kill()
    parent.wait()
    assert (tmp_path / "started").read_text() == "x"
    pids = [int((tmp_path / f"up-{r}").read_text()) for r in range(2)]
    deadline = time.monotonic() + 10
    while any(psutil.pid_exists(pid) for pid in pids):
        assert time.monotonic() < deadline, "ranks outlived their parent"
        time.sleep(0.1)


@pytest.mark.parametrize("to_group", [pytest.param(False, marks=pytest.mark.slow), True])
def test_sigterm_before_training_is_a_preemption_not_a_failure(tmp_path, to_group):
    body = f"""
        from clusterft import launch
        try:
            launch.run("test_launch:wait_for_ever", {{"out": {str(tmp_path)!r}}}, processes=2, threads=1)
        except launch.Preempted:
            sys.exit(launch.EXIT_PREEMPTED)
    """
    parent = subprocess.Popen([sys.executable, str(script(tmp_path, body))], start_new_session=True)
    deadline = time.monotonic() + 60
    while not all((tmp_path / f"up-{r}").exists() for r in range(2)):
        assert time.monotonic() < deadline and parent.poll() is None
        time.sleep(0.1)
    (os.killpg if to_group else os.kill)(parent.pid, signal.SIGTERM)
    assert parent.wait(30) == 75


# -- torchrun -----------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_torchrun_runs_the_same_entry_and_reports_failures(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(HERE))
    launch.run("test_launch:write_facts", {"out": str(tmp_path)}, processes=2, threads=1, launcher="torchrun")
    assert json.loads((tmp_path / "1.json").read_text())["gathered"] == [0, 10]
    with pytest.raises(launch.WorkerError, match="rank 1: OSError: no space left on the moon"):
        launch.run("test_launch:fail_on", {"rank": 1, "how": "raise"}, processes=2, threads=1, launcher="torchrun")


def finish_the_step(*, dist: Dist, out: str) -> None:
    """A rank that answers a signal with what it had begun, and counts how often it was told."""
    told = []
    signal.signal(signal.SIGTERM, lambda *_: told.append(1))
    Path(out, f"up-{dist.rank}").touch()
    while not told:
        time.sleep(0.05)
    time.sleep(2)
    Path(out, f"left-{dist.rank}").write_text(str(len(told)))
    raise Preempted("stopped after the step")


@pytest.mark.slow
def test_under_torchrun_a_signal_to_the_group_reaches_each_rank_once_and_torchrun_not_at_all(tmp_path):
    body = f"""
        from clusterft import launch
        try:
            launch.run("test_launch:finish_the_step", {{"out": {str(tmp_path)!r}}}, processes=2, threads=1, launcher="torchrun")
        except launch.Preempted as stop:
            print(stop)
            sys.exit(launch.EXIT_PREEMPTED)
    """
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(HERE), os.environ.get("PYTHONPATH", "")])}
    command = [sys.executable, str(script(tmp_path, body))]
    parent = subprocess.Popen(command, start_new_session=True, env=environment, stdout=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 120
    while not all((tmp_path / f"up-{r}").exists() for r in range(2)):
        assert time.monotonic() < deadline and parent.poll() is None
        time.sleep(0.1)
    os.killpg(parent.pid, signal.SIGTERM)
    said, _ = parent.communicate(timeout=60)
    assert (parent.returncode, said) == (75, "stopped after the step\n")
    assert [(tmp_path / f"left-{r}").read_text() for r in range(2)] == ["1", "1"]


# -- the environment ------------------------------------------------------------------------------------------------------


def test_layout_from_torchrun_slurm_or_nothing():
    torchrun = {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4"}
    slurm = {"SLURM_PROCID": "3", "SLURM_NTASKS": "4", "SLURM_LOCALID": "1", "SLURM_STEP_ID": "0"}
    assert layout_from_env({}) == ("single", {"rank": 0, "world": 1, "local_rank": 0, "local_world": 1})
    assert layout_from_env(torchrun)[1] == {"rank": 5, "world": 8, "local_rank": 1, "local_world": 4}
    assert layout_from_env(slurm)[0] == "SLURM"
    assert layout_from_env(slurm)[1]["rank"] == 3
    assert layout_from_env({"SLURM_NTASKS": "4", "SLURM_JOB_ID": "1"})[0] == "single"
    under_srun = torchrun | slurm | {"TORCHELASTIC_RUN_ID": "x", "SLURM_NTASKS": "2", "SLURM_PROCID": "1"}
    assert layout_from_env(under_srun) == ("torchrun", {"rank": 5, "world": 8, "local_rank": 1, "local_world": 4})


@pytest.mark.parametrize(
    ("env", "words"),
    [
        ({"RANK": "0"}, "WORLD_SIZE missing"),
        ({"WORLD_SIZE": "4"}, "RANK missing"),
        ({"RANK": "4", "WORLD_SIZE": "4"}, r"RANK=4 is outside 0 \.\.\. WORLD_SIZE-1=3"),
        ({"RANK": "a", "WORLD_SIZE": "4"}, "must be integers"),
        ({"SLURM_PROCID": "1", "SLURM_STEP_ID": "0"}, "SLURM_NTASKS missing"),
        (
            {"RANK": "0", "WORLD_SIZE": "2", "SLURM_PROCID": "1", "SLURM_NTASKS": "2", "SLURM_STEP_ID": "0"},
            "RANK=0 contradicts SLURM_PROCID=1",
        ),
        (
            {"RANK": "1", "WORLD_SIZE": "2", "SLURM_PROCID": "1", "SLURM_NTASKS": "8", "SLURM_STEP_ID": "0"},
            "WORLD_SIZE=2 contradicts SLURM_NTASKS=8",
        ),
        (
            {
                "RANK": "0",
                "WORLD_SIZE": "2",
                "LOCAL_WORLD_SIZE": "2",
                "TORCHELASTIC_RUN_ID": "x",
                "SLURM_PROCID": "1",
                "SLURM_NTASKS": "2",
                "SLURM_STEP_ID": "0",
            },
            "WORLD_SIZE=2 contradicts SLURM_NTASKS=2 times LOCAL_WORLD_SIZE=2",
        ),
    ],
)
def test_contradictions_are_refused_with_the_variables_named(env, words):
    with pytest.raises(ValueError, match=words):
        layout_from_env(env)


def test_srun_without_an_address_is_refused():
    env = {"SLURM_PROCID": "0", "SLURM_NTASKS": "2", "SLURM_STEP_ID": "0"}
    with pytest.raises(ValueError, match="MASTER_ADDR, MASTER_PORT is not set"):
        init_from_env("cpu", env=env)


@pytest.mark.skipif(torch.cuda.is_available(), reason="the machine has the device that must be missing here")
def test_an_absent_device_is_refused_never_replaced():
    with pytest.raises(ValueError, match=r"runtime\.device=cuda was asked for"):
        check_device("cuda")
    with pytest.raises(ValueError, match="not one of cpu, cuda"):
        check_device("meta")
    assert single_process().device == torch.device("cpu")


def test_a_signal_after_the_last_step_still_stops_the_run():
    done = [Report(0, "done"), Report(1, "done")]
    judge(done, set())
    with pytest.raises(Preempted, match="SIGTERM came when the ranks had finished"):
        judge(done, {signal.SIGTERM})
