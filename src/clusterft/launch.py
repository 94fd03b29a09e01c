"""Starting the processes of one stage, and ending them together.

In come the name of a function and its arguments; P processes call it as `function(dist=Dist, **kwargs)` and one of these
comes out:

    nothing         all ranks returned
    WorkerError     a rank raised: its message first, all others ended within seconds
    Preempted       the ranks wrote a checkpoint on SIGTERM or SIGUSR1 and left with exit code 75

`spawn` forks from a server that has torch and transformers imported already (about a second for four processes after the
server's first start); a single process runs in a child as well, so that memory, threads and signals behave alike. `torchrun`
starts the same entry through torch's own launcher. Also the entry under torchrun or srun: `python -m clusterft.launch
module:function kwargs.json`.
"""

from __future__ import annotations

import importlib
import json
import multiprocessing
import multiprocessing.connection
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
import types
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

from clusterft.distributed import EXIT_PREEMPTED, Preempted

__all__ = ["EXIT_PREEMPTED", "Preempted", "WorkerError", "run"]

PRELOAD = (
    "clusterft.forkserver_guard",
    "torch",
    "torch.distributed",
    "transformers.models.llama.modeling_llama",
    "transformers.optimization",
    "clusterft.launch",
)
GRACE_SECONDS = 3.0
"""How long the other ranks may take to end by themselves after one has failed, before they are killed."""


class WorkerError(RuntimeError):
    """A rank failed. The message begins with the failing rank and its reason; `details` holds its traceback."""

    def __init__(self, message: str, details: str = "") -> None:
        super().__init__(message)
        self.details = details


@dataclass(frozen=True)
class _Report:
    rank: int
    kind: str  # done | error | preempted
    message: str = ""
    details: str = ""
    killed_by: int | None = None


def run(
    entry: str,
    kwargs: Mapping[str, Any],
    *,
    processes: int,
    threads: int,
    device: str = "cpu",
    launcher: str = "spawn",
    nodes: int = 1,
    timeout: timedelta | None = None,
) -> None:
    """Runs `entry` ("package.module:function") in `processes` processes of `threads` threads each, on this node.

    nodes    more than 1 is refused: every node's torchrun calls `python -m clusterft.launch` itself (slurm/multinode.sbatch)

    timeout  limit of one collective; None: clusterft.distributed.COLLECTIVE_TIMEOUT
    Raises WorkerError, Preempted, or ValueError for arguments that make no sense.
    """
    if ":" not in entry:
        raise ValueError(f"entry {entry!r} must read package.module:function")
    if processes < 1 or threads < 1:
        raise ValueError(f"processes={processes} and threads={threads} must be at least 1")
    if nodes != 1:
        raise ValueError(
            f"runtime.nodes={nodes}: one process cannot start ranks on other nodes; submit slurm/multinode.sbatch instead"
        )
    if launcher == "spawn":
        _run_spawned(entry, kwargs, processes, threads, device, timeout)
    elif launcher == "torchrun":
        _run_torchrun(entry, kwargs, processes, threads, device)
    else:
        raise ValueError(f"runtime.launcher={launcher!r} is not one of spawn, torchrun")


# -- spawn ------------------------------------------------------------------------------------------------------------


def _run_spawned(
    entry: str, kwargs: Mapping[str, Any], processes: int, threads: int, device: str, timeout: timedelta | None
) -> None:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(PRELOAD))
    with tempfile.TemporaryDirectory(prefix="clusterft-rendezvous-") as folder, _child_environment(threads):
        children, pipes = [], []
        for rank in range(processes):
            ours, theirs = context.Pipe()
            arguments = (theirs, entry, dict(kwargs), rank, processes, threads, device, f"file://{folder}/store", timeout)
            child = context.Process(target=_child, args=arguments, name=f"rank-{rank}", daemon=False)
            with _without_main_module():
                child.start()
            theirs.close()
            children.append(child)
            pipes.append(ours)
        with _forwarded_signals([child.pid for child in children]) as received:
            try:
                reports = _await(children, pipes)
            finally:
                _end(children)
                for pipe in pipes:
                    pipe.close()
    _judge(reports, received)


@contextmanager
def _without_main_module() -> Iterator[None]:
    """multiprocessing would import the parent's script in every child; the entry is named, so nothing of it is needed."""
    main = sys.modules["__main__"]
    sys.modules["__main__"] = types.ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main


@contextmanager
def _child_environment(threads: int) -> Iterator[None]:
    """Variables that libraries read once at import: set before the fork server starts, restored afterwards."""
    wanted = {"OMP_NUM_THREADS": str(threads), "OMP_WAIT_POLICY": "PASSIVE", "TOKENIZERS_PARALLELISM": "false"}
    before = {name: os.environ.get(name) for name in wanted}
    os.environ.update(wanted)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def _child(
    pipe: Any,
    entry: str,
    kwargs: dict,
    rank: int,
    world: int,
    threads: int,
    device: str,
    rendezvous: str,
    timeout: timedelta | None,
) -> None:
    """A rank's life: join, call, report, leave."""
    from clusterft import distributed

    threading.Thread(target=_die_with_parent, args=(pipe,), daemon=True).start()
    for number in (signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, signal.SIG_DFL)
    # Forked from the server: nothing of the environment set above is inherited by a server that is already running.
    os.environ.update({"OMP_NUM_THREADS": str(threads), "GLOO_SOCKET_IFNAME": os.environ.get("GLOO_SOCKET_IFNAME", "lo")})
    code = 1
    try:
        dist = _join(rank, world, threads, device, rendezvous, timeout)
        _resolve(entry)(dist=dist, **kwargs)
        report, code = _Report(rank, "done"), 0
    except distributed.Preempted as stop:
        report, code = _Report(rank, "preempted", str(stop)), distributed.EXIT_PREEMPTED
    except BaseException as error:  # a rank's last act is to say why, KeyboardInterrupt and SystemExit included
        report = _Report(rank, "error", f"{type(error).__name__}: {error}", traceback.format_exc())
    pipe.send(report)
    if code == 0:
        distributed.leave_group()
        return
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # peers may still be in a collective with us: no destructor may wait for them


def _join(rank: int, world: int, threads: int, device: str, rendezvous: str, timeout: timedelta | None) -> Any:
    import torch

    from clusterft import distributed

    torch.set_num_threads(threads)
    if world == 1:
        return distributed.single_process(distributed.check_device(device))
    limit = distributed.COLLECTIVE_TIMEOUT if timeout is None else timeout
    return distributed.join_group(device, rendezvous, rank=rank, world=world, local_rank=rank, local_world=world, timeout=limit)


def _die_with_parent(pipe: Any) -> None:
    """The parent never sends anything: reading ends when it is gone, however it died."""
    try:
        pipe.recv()
    except (EOFError, OSError):
        os._exit(1)


def _resolve(entry: str) -> Any:
    module, _, name = entry.partition(":")
    return getattr(importlib.import_module(module), name)


def _await(children: list[Any], pipes: list[Any]) -> list[_Report]:
    """Reports in order of arrival. Returns when all have reported, or GRACE_SECONDS after the first bad one."""
    reports: list[_Report] = []
    open_ranks = set(range(len(children)))
    deadline = None
    while open_ranks and (deadline is None or time.monotonic() < deadline):
        waiting = {pipes[r]: r for r in open_ranks} | {children[r].sentinel: r for r in open_ranks}
        ready = multiprocessing.connection.wait(
            list(waiting), timeout=None if deadline is None else max(0.0, deadline - time.monotonic())
        )
        for rank in sorted({waiting[one] for one in ready}):
            reports.append(_read_report(rank, children[rank], pipes[rank]))
            open_ranks.discard(rank)
        if deadline is None and any(r.kind != "done" for r in reports):
            deadline = time.monotonic() + (GRACE_SECONDS if any(r.kind == "error" for r in reports) else 60.0)
    return reports


def _read_report(rank: int, child: Any, pipe: Any) -> _Report:
    try:
        if pipe.poll(0.2):
            return pipe.recv()
    except (EOFError, ConnectionResetError):
        pass
    child.join(1.0)
    code = child.exitcode
    if code is not None and code < 0:
        hint = " (out of memory?)" if code == -signal.SIGKILL else ""
        return _Report(rank, "error", f"killed by {signal.Signals(-code).name}{hint}", killed_by=-code)
    return _Report(rank, "error", f"ended with exit code {code} and no word")


def _end(children: list[Any]) -> None:
    for child in children:
        child.join(0.0)
        if child.exitcode is None:
            child.join(GRACE_SECONDS)
        if child.exitcode is None:
            child.kill()
    for child in children:
        child.join()


_ECHOES = ("Connection closed by peer", "Connection reset by peer", "Broken pipe", "DistBackendError", "DistNetworkError")


def _judge(reports: list[_Report], received: set[int]) -> None:
    """Raises for the first bad report; a rank that only lost its connection to a failing peer comes after that peer.

    received: signals that this process was sent and passed on. A rank that such a signal ended before it could answer with a
    checkpoint (still loading, already saving) was stopped, it did not fail.
    """
    if signal.SIGINT in received:
        raise KeyboardInterrupt
    errors = [r for r in reports if r.kind == "error"]
    stopped = [r for r in reports if r.kind == "preempted" or r.killed_by in received]
    if stopped and received:
        raise Preempted(stopped[0].message)
    if errors:
        first = min(errors, key=lambda r: any(echo in r.message for echo in _ECHOES))
        named = first.message if f"rank {first.rank}:" in first.message else f"rank {first.rank}: {first.message}"
        raise WorkerError(named, first.details)
    if stopped:
        raise Preempted(stopped[0].message)


@contextmanager
def _forwarded_signals(pids: list[int]) -> Iterator[set[int]]:
    """SIGTERM, SIGUSR1 and SIGINT of the parent reach every rank; yields those seen. Only a main thread can catch them."""
    received: set[int] = set()
    if threading.current_thread() is not threading.main_thread():
        yield received
        return

    def forward(number: int, _frame: Any) -> None:
        received.add(number)
        for pid in pids:
            try:
                os.kill(pid, number)
            except ProcessLookupError:
                continue

    before = {number: signal.signal(number, forward) for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)}
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


# -- torchrun ---------------------------------------------------------------------------------------------------------


def _run_torchrun(entry: str, kwargs: Mapping[str, Any], processes: int, threads: int, device: str) -> None:
    """One node through torch.distributed.run; it picks a free port and ends all ranks when one fails."""
    with tempfile.TemporaryDirectory(prefix="clusterft-torchrun-") as folder:
        arguments = Path(folder) / "kwargs.json"
        arguments.write_text(json.dumps(dict(kwargs)), encoding="utf-8")
        reports = Path(folder) / "reports"
        reports.mkdir()
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
        command += ["-m", "clusterft.launch", entry, str(arguments), "--device", device, "--reports", str(reports)]
        environment = {**os.environ, "OMP_NUM_THREADS": str(threads), "OMP_WAIT_POLICY": "PASSIVE"}
        child = subprocess.Popen(command, env=environment)
        with _forwarded_signals([child.pid]) as received:
            code = child.wait()
        if code == 0:
            return
        found = sorted((json.loads(p.read_text(encoding="utf-8")) for p in reports.glob("*.json")), key=lambda r: r["time"])
        _judge([_Report(r["rank"], r["kind"], r["message"], r["details"]) for r in found], received)
        if code == EXIT_PREEMPTED:
            raise Preempted("stopped by a signal")
        raise WorkerError(f"torchrun ended with exit code {code} and no rank said why")


def main(argv: list[str] | None = None) -> int:
    """`python -m clusterft.launch module:function kwargs.json [--device cpu] [--reports folder]`: one rank, or alone."""
    import argparse

    from clusterft import distributed

    parser = argparse.ArgumentParser(prog="python -m clusterft.launch", description="Runs an entry as one rank.")
    parser.add_argument("entry")
    parser.add_argument("kwargs", type=Path)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--reports", type=Path)
    options = parser.parse_args(argv)
    rank = int(os.environ.get("RANK", "0"))
    try:
        dist = distributed.init_from_env(options.device)
        rank = dist.rank
        _resolve(options.entry)(dist=dist, **json.loads(options.kwargs.read_text(encoding="utf-8")))
        distributed.leave_group()
        return 0
    except distributed.Preempted as stop:
        report, code = _Report(rank, "preempted", str(stop)), distributed.EXIT_PREEMPTED
    except Exception as error:
        report, code = _Report(rank, "error", f"{type(error).__name__}: {error}", traceback.format_exc()), 1
    print(f"rank {rank}: {report.message}", file=sys.stderr, flush=True)
    if options.reports is not None:
        facts = {"rank": rank, "kind": report.kind, "message": report.message, "details": report.details, "time": time.time()}
        (options.reports / f"{rank}.json").write_text(json.dumps(facts), encoding="utf-8")
    os._exit(code)


if __name__ == "__main__":
    sys.exit(main())
