"""Ranks on several nodes of one SLURM job.

    run.py in the batch script ► srun, one task a node ► `python -m clusterft.nodes` ► torchrun ► clusterft.launch, one a rank

run.py composes and freezes the run alone, on the first node of the job. In come an entry and its arguments, written below a folder that
all nodes see; out come the ranks' reports from there, and `ranks.judge` says how the stage ended. A signal does not go through
torchrun, which would give the ranks 30 seconds: each node's agent hands it to its ranks, and a checkpoint may take its time.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil

from clusterft.overrides import UserError
from clusterft.ranks import Report, WorkerError, is_echo, judge
from clusterft.stop_signals import EXIT_PREEMPTED, WATCHED

LAUNCHERS = ("spawn", "torchrun", "srun")


def check_layout(runtime: Any, env: Mapping[str, str]) -> None:
    """Raises UserError for a number of nodes, processes and a launcher that do not fit each other or SLURM's variables."""
    if runtime.launcher not in LAUNCHERS:
        raise UserError(f"runtime.launcher={runtime.launcher!r} is not one of {', '.join(LAUNCHERS)}")
    _check_one_composer(env)
    nodes = runtime.nodes
    if nodes < 1:
        raise UserError(f"runtime.nodes={nodes}: at least one node is needed")
    if nodes > 1 and runtime.launcher != "srun":
        raise UserError(
            f"runtime.nodes={nodes} with runtime.launcher={runtime.launcher}: only runtime.launcher=srun starts ranks on other "
            "nodes; slurm/submit.sh TABLE --nodes N sets both"
        )
    for key in ("processes", "feature_processes"):
        count = runtime[key]
        if count % nodes and not (key == "feature_processes" and count == 1):
            raise UserError(f"runtime.{key}={count} cannot be shared evenly by runtime.nodes={nodes}; use a multiple of it")
    if runtime.launcher == "srun":
        check_allocation(nodes, env)


def check_allocation(nodes: int, env: Mapping[str, str]) -> None:
    """Raises UserError unless this process is in a SLURM job of exactly `nodes` nodes."""
    if "SLURM_JOB_ID" not in env:
        raise UserError("runtime.launcher=srun needs a SLURM job, and SLURM_JOB_ID is not set; submit with slurm/submit.sh")
    given = env.get("SLURM_JOB_NUM_NODES", env.get("SLURM_NNODES", "?"))
    if given != str(nodes):
        raise UserError(f"runtime.nodes={nodes} contradicts SLURM_JOB_NUM_NODES={given}: ask for as many nodes as the job has")


def _check_one_composer(env: Mapping[str, str]) -> None:
    """One process a run composes: copies of it would each start all workers."""
    copies = [("srun", "SLURM_STEP_NUM_TASKS")] if "SLURM_STEP_ID" in env else []
    copies += [("torchrun", "WORLD_SIZE")] if "RANK" in env else []
    for starter, name in copies:
        if env.get(name, "1") != "1":
            raise UserError(
                f"{starter} started {env[name]} copies of this command ({name}={env[name]}); start it once, it starts its workers "
                "itself: runtime.processes, runtime.nodes"
            )


def run_on_nodes(
    entry: str, kwargs: Mapping[str, Any], *, processes: int, nodes: int, threads: int, device: str, scratch: Path | None
) -> None:
    """Runs `entry` in `processes` ranks, `processes / nodes` on each node of this job. scratch: a folder that all nodes see.

    Raises UserError outside of such a job, WorkerError, Preempted, ValueError for arguments that make no sense.
    """
    check_allocation(nodes, os.environ)
    if processes % nodes:
        raise ValueError(f"processes={processes} cannot be shared evenly by nodes={nodes}")
    if scratch is None:
        raise ValueError("launcher=srun needs a scratch folder on a file system that all nodes share")
    folder = Path(tempfile.mkdtemp(dir=scratch.absolute(), prefix=".launch-"))
    try:
        (folder / "reports").mkdir()
        (folder / "kwargs.json").write_text(json.dumps(dict(kwargs)), encoding="utf-8")
        address, port = rendezvous()
        step = ["srun", f"--nodes={nodes}", f"--ntasks={nodes}", "--ntasks-per-node=1", "--kill-on-bad-exit=1", "--overlap"]
        if "SLURM_CPUS_PER_TASK" in os.environ:  # since SLURM 22.05 a step no longer inherits it
            step.append(f"--cpus-per-task={os.environ['SLURM_CPUS_PER_TASK']}")
        agent = [sys.executable, "-m", "clusterft.nodes", entry, str(folder), "--device", device, "--threads", str(threads)]
        agent += ["--nodes", str(nodes), "--local-ranks", str(processes // nodes), "--address", address, "--port", str(port)]
        child = subprocess.Popen([*step, *agent], stdin=subprocess.DEVNULL, start_new_session=True)
        with _warned_step(child) as received:
            code = child.wait()
        _conclude(folder / "reports", code, received)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def rendezvous() -> tuple[str, int]:
    """(address of this node as SLURM's daemons reach it, a port that is free on it). Raises UserError off the first node.

    Ranks meet on the first node; only there can a port be tried, so the run is started there: batch scripts are.
    """
    here, names = os.environ.get("SLURMD_NODENAME"), os.environ.get("SLURM_JOB_NODELIST", "")
    listed = subprocess.run(["scontrol", "show", "hostnames", names], capture_output=True, text=True, check=True).stdout.split()
    if not listed or here != listed[0]:
        raise UserError(
            f"this process runs on {here or 'no node of the job'}, the job's first node is {listed[0] if listed else 'unknown'}: "
            "start it from the batch script, which SLURM runs there"
        )
    shown = subprocess.run(["scontrol", "show", "node", "-o", here], capture_output=True, text=True, check=True).stdout
    facts = dict(word.split("=", 1) for word in shown.split() if "=" in word)
    with socket.socket() as free:
        free.bind(("", 0))
        return facts.get("NodeAddr", here), free.getsockname()[1]


@contextmanager
def _warned_step(child: subprocess.Popen) -> Iterator[set[int]]:
    """SIGTERM and SIGUSR1 reach the step as SIGUSR1: srun would take SIGTERM as an order to kill it. SIGINT ends the step."""
    received: set[int] = set()
    if threading.current_thread() is not threading.main_thread():
        yield received
        return

    def warn(number: int, _frame: Any) -> None:
        received.add(number)
        if child.poll() is None:
            child.send_signal(signal.SIGTERM if number == signal.SIGINT else signal.SIGUSR1)

    before = {number: signal.signal(number, warn) for number in (*WATCHED, signal.SIGINT)}
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _conclude(folder: Path, code: int, received: set[int]) -> None:
    """Raises what the ranks' reports and the agents' notes of signals say; nothing if all went well."""
    if code == 0:
        judge([], received)
        return
    written = {p.stem: json.loads(p.read_text(encoding="utf-8")) for p in folder.glob("*.json")}
    notes = [written.pop(name) for name in list(written) if name.startswith("signal-")]
    found = sorted(written.values(), key=lambda r: r["time"])
    failed = min((r["time"] for r in found if r["kind"] == "error" and not is_echo(r["message"])), default=float("inf"))
    # SLURM ends the rest of a failed step with signals: those came after the failure and are not a wish to stop.
    received = received | {n["number"] for n in notes if n["time"] < failed}
    # A rank that a signal ended while it was loading left no word; its peers' lost connections are no failure then.
    told = [r for r in found if not (received and is_echo(r["message"]))]
    judge([Report(r["rank"], r["kind"], r["message"], r["details"]) for r in told], received)
    raise WorkerError(f"srun ended with exit code {code} and no rank said why; the job's log has what it printed")


# -- the agent: one a node ------------------------------------------------------------------------------------------------


def main(argv: Sequence[str] | None = None) -> int:
    """One node's part: checks who it is, starts torchrun, hands SIGTERM and SIGUSR1 to the ranks."""
    parser = argparse.ArgumentParser(prog="python -m clusterft.nodes", description="Starts the ranks of one node, under srun.")
    parser.add_argument("entry")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--device", required=True)
    for name in ("threads", "nodes", "local-ranks", "port"):
        parser.add_argument(f"--{name}", type=int, required=True)
    parser.add_argument("--address", required=True)
    options = parser.parse_args(argv)
    problem = agent_problem(options, os.environ)
    if problem is not None:
        print(f"error: {problem}", file=sys.stderr, flush=True)
        return 2
    node, reports = int(os.environ["SLURM_NODEID"]), options.folder / "reports"
    noted: list[int] = []

    def note(number: int, _frame: Any) -> None:
        if not noted:  # when it came decides whether it was a wish to stop or SLURM's answer to a failure
            _write(reports / f"signal-{node}.json", number=number, time=time.time())
        noted.append(number)

    for number in WATCHED:
        signal.signal(number, note)
    command = [f"--nnodes={options.nodes}", f"--node-rank={node}", f"--nproc-per-node={options.local_ranks}"]
    command += [f"--master-addr={options.address}", f"--master-port={options.port}", "-m", "clusterft.launch", options.entry]
    command += [str(options.folder / "kwargs.json"), "--device", options.device, "--reports", str(reports)]
    code = attend(start_torchrun(command, options.threads), noted)
    if noted and code != 0:
        return EXIT_PREEMPTED
    ranks = range(node * options.local_ranks, (node + 1) * options.local_ranks)
    if code != 0 and (silent := [r for r in ranks if not (reports / f"{r}.json").exists()]):
        message = f"ended without a word on node {os.environ['SLURMD_NODENAME']} (out of memory?)"
        _write(reports / f"node-{node}.json", rank=silent[0], kind="error", message=message, details="", time=time.time())
    return 1 if code < 0 else code


def _write(path: Path, **facts: Any) -> None:
    path.write_text(json.dumps(facts), encoding="utf-8")


def agent_problem(options: argparse.Namespace, env: Mapping[str, str]) -> str | None:
    """What contradicts SLURM's variables on this node, in one sentence; None if nothing does."""
    for name, wanted in (("SLURM_NNODES", options.nodes), ("SLURM_NTASKS", options.nodes)):
        if env.get(name) != str(wanted):
            return f"{name}={env.get(name, 'not set')} contradicts runtime.nodes={wanted}: one task a node is needed"
    if env.get("SLURM_NODEID") != env.get("SLURM_PROCID"):
        return f"SLURM_NODEID={env.get('SLURM_NODEID')} contradicts SLURM_PROCID={env.get('SLURM_PROCID')}: one task a node is needed"
    if not (options.folder / "kwargs.json").is_file():
        return (
            f"{options.folder} is not visible on node {env.get('SLURMD_NODENAME', socket.gethostname())}: set runtime.runs_dir to a "
            "folder on a file system that all nodes share"
        )
    return None


def start_torchrun(arguments: Sequence[str], threads: int) -> subprocess.Popen:
    """torchrun in a session of its own: SLURM, `timeout` and a terminal signal whole process groups, and `attend` tells the ranks."""
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads), "OMP_WAIT_POLICY": "PASSIVE"}
    return subprocess.Popen([sys.executable, "-m", "torch.distributed.run", *arguments], env=environment, start_new_session=True)


def attend(torchrun: subprocess.Popen, noted: Collection[int]) -> int:
    """Waits for torchrun and returns its exit code. Every rank hears of a noted signal once, also one that starts after it came.

    noted: signals, filled by a handler; the first is passed on.
    """
    told: set[int] = set()
    while True:
        try:
            return torchrun.wait(0.2)
        except subprocess.TimeoutExpired:
            if not noted:
                continue
        number = next(iter(noted))
        for rank in _ranks_of(torchrun):
            if rank.pid not in told:
                told.add(rank.pid)
                with suppress(psutil.NoSuchProcess):
                    rank.send_signal(number)


def _ranks_of(torchrun: subprocess.Popen) -> list[psutil.Process]:
    try:
        return psutil.Process(torchrun.pid).children()
    except psutil.NoSuchProcess:
        return []


if __name__ == "__main__":
    sys.exit(main())
