"""The scripts of slurm/ against a real SLURM of two nodes on this machine: munged, slurmctld and two slurmd (slurm/local_cluster.py).

Everything runs from a committed copy of this tree, so that a developer's changes are what is tested and the tree counts as clean.
"""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

ROOT = Path(__file__).resolve().parents[1]
_spec = importlib.util.spec_from_file_location("local_cluster", ROOT / "slurm/local_cluster.py")
local_cluster = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(local_cluster)

REASON = local_cluster.why_not()
pytestmark = [pytest.mark.slurm, pytest.mark.skipif(REASON is not None, reason=f"no SLURM here: {REASON}")]

CELL = 3
"""Of table2: Random, r=1.00, seed 0. Its budget needs CluSTER's clusters, so its run has a feature pass too."""
TRAINED = 60
"""Steps. The ranks are held still after the first ones where something has to come in the middle."""


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """A running cluster, a clean copy of the tree, small data, and the command line that every run here shares."""
    folder = tmp_path_factory.mktemp("site")
    tree = folder / "tree"
    tree.mkdir()
    (folder / "logs").mkdir()
    for name in ("run.py", "src", "conf", "baselines", "eval", "experiments", "slurm", ".gitignore"):
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, tree / name, ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
        else:
            shutil.copy(source, tree / name)
    git = ["git", "-c", "user.name=t", "-c", "user.email=t@example.org", "-C", str(tree)]
    for command in (["init", "-q"], ["add", "-A"], ["commit", "-q", "-m", "as it is"]):
        subprocess.run([*git, *command], check=True)
    rows = [
        {"instruction": f"Add {i} and {7 * i % 31}.", "output": f"def f{i}():\n    return {'x' * (3 + 11 * i % 37)}"}
        for i in range(40)
    ]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    env = {
        "CLUSTERFT_PARTITION": "",
        "CLUSTERFT_GRES": "",
        "CLUSTERFT_CPUS_PER_TASK": "1",
        "CLUSTERFT_MEM": "100",
        "CLUSTERFT_WARNING_SECONDS": "30",
        "CLUSTERFT_MINUTES": "30",
        "CLUSTERFT_PYTHON": sys.executable,
        "CLUSTERFT_LOGS": str(folder / "logs"),
        "CLUSTERFT_CACHE": str(folder / "cache"),
        "PYTHONPATH": f"{tree}/src:{tree}",
        "GLOO_SOCKET_IFNAME": "lo",
        "COLUMNS": "200",
    }
    small = ["+scale=smoke", "data=jsonl", f"data.path={folder}/rows.jsonl", "data.holdout_rows=8", "data.validation.rows=3"]
    small += ["evaluators=heldout_only", f"trainer.epochs={TRAINED // 2}", f"runtime.assets_dir={ROOT}/assets"]
    with local_cluster.LocalCluster() as cluster:

        def call(*command, **more):
            return cluster.run(*command, env=env | more, cwd=tree)

        yield SimpleNamespace(folder=folder, tree=tree, call=call, small=small, env=env, git=git, daemons=cluster.folder)


@pytest.fixture(scope="module")
def reference(site):
    """The cell made by one process, uninterrupted, without SLURM."""
    runs = site.folder / "reference"
    command = [sys.executable, "run.py", "+experiment=table2", *site.small, f"cell={CELL}"]
    done = site.call(*command, f"runtime.runs_dir={runs}", "runtime.keep_model=true")
    assert done.returncode == 0, done.stdout + done.stderr
    return runs


def wait_for(what, condition, seconds=400.0):
    deadline = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < deadline, f"{what} did not happen in {seconds:.0f} s"
        time.sleep(0.05)
    return found


def states(site, job):
    """{array index, or "-": (state, exit code, restarts)} of a job, by SLURM's own account."""
    shown = site.call("scontrol", "show", "job", "-o", str(job)).stdout
    found = {}
    for line in shown.splitlines():
        facts = dict(word.split("=", 1) for word in line.split() if "=" in word)
        found[facts.get("ArrayTaskId", "-")] = (facts["JobState"], facts["ExitCode"], int(facts["Restarts"]))
    return found


def ended(site, job):
    """The states of a job's tasks once none of them waits or runs."""

    def over():
        found = states(site, job)
        return found if all(s in ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT") for s, _, _ in found.values()) else None

    return wait_for(f"the end of job {job}", over)


def ended_after_requeue(site, job):
    """As `ended`, for a task that was requeued. SLURM lets it wait for two minutes; here it goes on once its first turn is over.

    Over: no process of it is left on either node, and the second has passed, for slurmd refuses what starts in the second of a kill.
    """

    def over():
        steps = [p for p in psutil.process_iter(["cmdline"]) if any(f"slurmstepd: [{job}." in w for w in p.info["cmdline"] or ())]
        return states(site, job)["3"][::2] == ("PENDING", 1) and not steps

    wait_for("the requeue", over)
    time.sleep(2.0)
    site.call("scontrol", "update", f"jobid={job}_3", "starttime=now")
    wait_for("the second turn", lambda: states(site, job)["3"][0] != "PENDING")
    return ended(site, job)


def logs(site):
    """What the jobs printed, and the last that SLURM's daemons said."""
    told = [(p.name, p.read_text()) for p in sorted((site.folder / "logs").glob("*.log"))]
    told += [(p.name, "\n".join(p.read_text().splitlines()[-60:])) for p in sorted(site.daemons.glob("slurm*.log"))]
    return "\n".join(f"--- {name}\n{text}" for name, text in told)


def record_of(runs):
    (path,) = runs.glob("*/record.json")
    return json.loads(path.read_text())


def facts(record):
    """A record without what a clock, a launcher or a machine's load says."""
    train = {
        k: record["train"][k] for k in ("steps", "total_steps", "tokens", "target_tokens", "first_loss", "last_loss", "mean_loss")
    }
    kept = {k: v for k, v in record.items() if k not in ("cost", "train", "config", "hardware")}
    return kept | {"train": train, "config": {k: v for k, v in record["config"].items() if k not in ("runtime", "cell")}}


def assert_same_run(runs, reference):
    ours, theirs = record_of(runs), record_of(reference)
    assert facts(ours) == facts(theirs)
    weights = [next(folder.glob("*/train/model/model.safetensors")).read_bytes() for folder in (runs, reference)]
    assert weights[0] == weights[1]
    lines = [
        [json.loads(line) for line in next(folder.glob("*/train/metrics.jsonl")).read_text().splitlines()]
        for folder in (runs, reference)
    ]
    assert [(line["step"], line["loss"]) for line in lines[0]] == [(line["step"], line["loss"]) for line in lines[1]]
    return ours


def test_an_array_holds_exactly_the_missing_cells_and_one_that_fails_stops_no_other(site, reference):
    runs = site.folder / "array"
    shutil.copytree(reference, runs)  # cell 3 is complete
    arguments = ["table2", *site.small, "seed=0", "selector=random", f"runtime.runs_dir={runs}"]

    (site.tree / "run.py").write_text((site.tree / "run.py").read_text() + "# changed\n")
    refused = site.call("slurm/submit.sh", *arguments)
    assert refused.returncode == 2 and "uncommitted changes" in refused.stderr and " M run.py" in refused.stderr
    subprocess.run([*site.git, "checkout", "-q", "run.py"], check=True)

    dry = site.call("slurm/submit.sh", *arguments, "--dry-run")
    assert dry.returncode == 0, dry.stderr
    command = next(line for line in dry.stdout.splitlines() if line.startswith("would submit: sbatch"))
    assert "--array=6\\,9 " in command and " --requeue " in command and " --signal=B:USR1@30 " in command
    assert site.call("squeue", "-h").stdout == ""

    held = site.call("slurm/submit.sh", *arguments, CLUSTERFT_SBATCH_OPTIONS="--hold")
    assert held.returncode == 0, held.stderr
    job = held.stdout.split("submitted as job ")[1].split()[0]
    assert f"scancel {job}" in held.stdout and "slurm/status.sh table2" in held.stdout
    again = site.call("slurm/submit.sh", *arguments)
    assert "queued      2  [6,9]" in again.stdout and "nothing is left to submit" in again.stdout
    beyond = site.call("sbatch", "--parsable", "--array=48", "--mem=100", f"--output={site.folder}/logs/beyond.log",
                       "slurm/array.sbatch", "+experiment=table2", *site.small, f"runtime.runs_dir={runs}").stdout.strip()  # fmt: skip

    from composed import composed

    from clusterft.store import run_id

    doomed = run_id(composed("+experiment=table2", *site.small, "selector=random", "selector.ratio='0.50'", "seed=0"))
    (runs / doomed).mkdir()
    (runs / doomed / "train").write_text("a file where a folder belongs")
    site.call("scontrol", "release", job)
    found = ended(site, job)
    assert {i: (s, c) for i, (s, c, _) in found.items()} == {"6": ("COMPLETED", "0:0"), "9": ("FAILED", "2:0")}, logs(site)
    assert ended(site, beyond)["48"][:2] == ("FAILED", "2:0")
    assert "cell=48 is outside 0 ... 47" in (site.folder / "logs/beyond.log").read_text()
    records = {p.parent.name: json.loads(p.read_text())["status"] for p in runs.glob("*/record.json")}
    assert sorted(records.values()) == ["complete", "complete", "failed"] and records[doomed] == "failed"
    status = site.call("slurm/status.sh", *arguments).stdout
    assert "done        2  [3,6]" in status and "failed      1  [9]" in status and status.endswith("the rest: --array=9\n")


def test_two_nodes_with_two_ranks_each_give_what_one_process_gives(site, reference):
    runs = site.folder / "nodes"
    command = ["sbatch", "--parsable", "--nodes=2", "--array=3", "--mem=100", f"--output={site.folder}/logs/nodes.log"]
    command += [
        "slurm/multinode.sbatch",
        "+experiment=table2",
        *site.small,
        f"runtime.runs_dir={runs}",
        "runtime.keep_model=true",
    ]
    command += ["runtime.processes=4", "runtime.feature_processes=4", f"runtime.cache_dir={site.folder}/cache-nodes"]
    job = site.call(*command).stdout.strip()
    assert ended(site, job)["3"][:2] == ("COMPLETED", "0:0"), logs(site)
    record = assert_same_run(runs, reference)
    assert record["train"]["carrier"] == "messages"  # not the shared memory of one host
    assert not list(runs.glob("*/.launch-*"))
    # Every rank of both nodes made its part of the features.
    assert len(list((site.folder / "cache-nodes/features").glob("gradient_proxy-*/account-0-*.json"))) == 4


def ranks_in_training(site, job, runs):
    """The processes of a job's ranks, once the first step is done, stopped: they are in the middle of training now."""

    def has_begun():
        begun = any(p.stat().st_size for p in runs.glob("*/train/metrics.jsonl"))
        assert begun or states(site, job)["3"][0] in ("PENDING", "CONFIGURING", "RUNNING"), logs(site)
        return begun

    wait_for("training", has_begun)
    found = [p for p in psutil.process_iter(["cmdline"]) if is_rank(p, str(runs))]
    for rank in found:
        rank.suspend()
    assert found
    return found


def is_rank(process, runs):
    """Started by torchrun, which names the run's folder, or forked for the run.py that names it."""
    try:
        words = " ".join(process.info["cmdline"] or ())
        if "clusterft.launch" in words:
            return runs in words and "torch.distributed.run" not in words and "clusterft.nodes" not in words
        above = process.parents()[1:2] if "multiprocessing.forkserver" in words else []
        return any(runs in " ".join(one.cmdline()) for one in above)
    except psutil.Error:
        return False


def submit_cell(site, script, name, runs, *more):
    """The cell of the reference in another folder, as an array of one task."""
    command = ["sbatch", "--parsable", "--array=3", "--mem=100", "--requeue", "--signal=B:USR1@30", *more]
    command += [f"--output={site.folder}/logs/{name}.log", f"slurm/{script}", "+experiment=table2", *site.small]
    command += [f"runtime.runs_dir={runs}", "runtime.keep_model=true", f"runtime.processes={2 if more else 1}"]
    return site.call(*command).stdout.strip()


@pytest.mark.parametrize("script", ["array.sbatch", pytest.param("multinode.sbatch", marks=pytest.mark.nightly)])
def test_a_preempted_task_is_requeued_and_ends_as_if_nothing_had_been(site, reference, script):
    runs = site.folder / f"preempted-{script}"
    job = submit_cell(site, script, f"preempted-{script}", runs, *(["--nodes=2"] if script == "multinode.sbatch" else []))
    held = ranks_in_training(site, job, runs)
    urgent = site.call(
        "sbatch", "--parsable", "--partition=high", "--nodes=2", "--exclusive", "--output=/dev/null", "--wrap=true"
    )
    wait_for("the preemption", lambda: "PreemptTime=None" not in site.call("scontrol", "show", "job", "-o", f"{job}_3").stdout)
    for rank in held:
        rank.resume()
    assert ended(site, urgent.stdout.strip())["-"][0] == "COMPLETED"
    assert not list(runs.glob("*/record.json"))  # it had to stop for the other one
    assert ended_after_requeue(site, job)["3"] == ("COMPLETED", "0:0", 1), logs(site)
    (step,) = assert_same_run(runs, reference)["train"]["resumed_from"]
    assert 0 < step < TRAINED


@pytest.mark.slow
def test_a_warning_before_the_time_limit_ends_in_a_requeue_too(site, reference):
    """SLURM sends --signal=B:USR1 to the batch script alone, which is what scancel --batch does here."""
    runs = site.folder / "warned"
    job = submit_cell(site, "multinode.sbatch", "warned", runs, "--nodes=2")
    held = ranks_in_training(site, job, runs)
    site.call("scancel", "--batch", "--signal=USR1", f"{job}_3")
    try:
        wait_for("the agents' notes", lambda: len(list(runs.glob("*/.launch-*/reports/signal-*.json"))) == 2, seconds=30.0)
    finally:
        for rank in held:
            rank.resume()
    assert ended_after_requeue(site, job)["3"] == ("COMPLETED", "0:0", 1), logs(site)
    assert assert_same_run(runs, reference)["train"]["resumed_from"]


@pytest.mark.slow
def test_a_sweep_runs_as_slurm_jobs(site):
    runs = site.folder / "sweep"
    sweep = [sys.executable, "run.py", "-m", "+experiment=table2", *site.small, "trainer.epochs=1", "selector=random", "seed=0"]
    done = site.call(*sweep, "selector.ratio=0.5,0.75", "hydra/launcher=submitit_slurm", f"runtime.runs_dir={runs}")
    assert done.returncode == 0, done.stdout + done.stderr
    records = [json.loads(p.read_text()) for p in runs.glob("*/record.json")]
    assert sorted((float(r["config"]["selector"]["ratio"]), r["status"]) for r in records) == [
        (0.5, "complete"),
        (0.75, "complete"),
    ]
    (script,) = runs.glob("hydra/multirun-*/submitit/*/*submission.sh")
    asked = script.read_text()
    assert "--array=0-1" in asked and "--cpus-per-task=1" in asked and "--time=30" in asked and "--partition" not in asked


def test_no_daemon_stays_behind():
    """The cluster of this module is another one: this one starts, stops, and every one of its processes is gone."""
    with local_cluster.LocalCluster() as cluster:
        pids = [daemon.pid for daemon in cluster._daemons]
        assert len(pids) == 4 and all(os.path.exists(f"/proc/{pid}") for pid in pids)
    assert not any(os.path.exists(f"/proc/{pid}") for pid in pids)
    assert not cluster.folder.exists() and not cluster._leftovers()
