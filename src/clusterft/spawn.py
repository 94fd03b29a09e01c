"""Ranks forked from a server that has torch and transformers imported already.

In come an entry and P; every rank joins a group over a rendezvous file (no port that could be taken), calls the entry, says
through a pipe how it went, and leaves. The parent waits for words and deaths, gives the others a moment once one has failed,
then ends them. A rank whose parent is gone ends itself.
"""

from __future__ import annotations

import multiprocessing
import multiprocessing.connection
import os
import signal
import sys
import tempfile
import threading
import time
import traceback
import types
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

from clusterft.ranks import Report, forwarded_signals, judge, pass_on, resolve
from clusterft.stop_signals import WATCHED

PRELOAD = (
    "clusterft.forkserver_guard",
    "torch",
    "torch.distributed",
    "transformers.models.llama.modeling_llama",
    "transformers.optimization",
    "clusterft.spawn",
    # What wandb imports late costs rank 0 of every cell seconds that all ranks wait for. Absent is fine: the server skips what it cannot import.
    "wandb.sdk.launch.inputs.internal",
)
GRACE_SECONDS = 3.0
"""How long the other ranks may take to end by themselves after one has failed, before they are killed."""


def run_spawned(
    entry: str, kwargs: Mapping[str, Any], processes: int, threads: int, device: str, timeout: timedelta | None
) -> None:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([*PRELOAD, entry.partition(":")[0]])  # heard by a server that has not started yet
    with tempfile.TemporaryDirectory(prefix="clusterft-rendezvous-") as folder, _child_environment(threads):
        children, pipes, pids = [], [], []
        with forwarded_signals(pids) as received:
            try:
                for rank in range(processes):
                    place = (rank, processes, threads, device, f"file://{folder}/store", timeout, dict(os.environ))
                    child, pipe = _start(context, entry, dict(kwargs), *place)
                    children.append(child)
                    pipes.append(pipe)
                    pids.append(child.pid)
                for number in received.copy():  # came while ranks were being started; hearing it twice does no harm
                    pass_on(number, pids)
                reports = _await(children, pipes)
            finally:
                _end(children)
                for pipe in pipes:
                    pipe.close()
    judge(reports, received)


def _start(context: Any, entry: str, kwargs: dict, rank: int, *place: Any) -> tuple[Any, Any]:
    """Forks one rank: (process, our end of its pipe)."""
    ours, theirs = context.Pipe()
    child = context.Process(target=_child, args=(theirs, entry, kwargs, rank, *place), name=f"rank-{rank}", daemon=False)
    with _without_main_module():
        child.start()
    theirs.close()
    return child, ours


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
    wanted = {
        "OMP_NUM_THREADS": str(threads),
        "OMP_WAIT_POLICY": "PASSIVE",
        "THP_MEM_ALLOC_ENABLE": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }
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
    environment: dict[str, str],
) -> None:
    """A rank's life: join, call, report, leave."""
    from clusterft import distributed

    threading.Thread(target=_die_with_parent, args=(pipe,), daemon=True).start()
    # A server that was running already knows nothing of what the parent's environment has become.
    os.environ.clear()
    os.environ.update({"GLOO_SOCKET_IFNAME": "lo"} | environment)
    code = 1
    try:
        # Blocked by forkserver_guard. One that waits already is raised right here, where it is answered.
        signal.pthread_sigmask(signal.SIG_UNBLOCK, (*WATCHED, signal.SIGINT))
        dist = _join(rank, world, threads, device, rendezvous, timeout)
        resolve(entry)(dist=dist, **kwargs)
        report, code = Report(rank, "done"), 0
    except distributed.Preempted as stop:
        report, code = Report(rank, "preempted", str(stop)), distributed.EXIT_PREEMPTED
    except BaseException as error:  # a rank's last act is to say why, KeyboardInterrupt and SystemExit included
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal and the parent both send it
        report = Report(rank, "error", f"{type(error).__name__}: {error}", traceback.format_exc())
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


def _await(children: list[Any], pipes: list[Any]) -> list[Report]:
    """Reports in order of arrival. Returns when all have reported, or GRACE_SECONDS after the first bad one."""
    reports: list[Report] = []
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


def _read_report(rank: int, child: Any, pipe: Any) -> Report:
    try:
        if pipe.poll(0.2):
            return pipe.recv()
    except (EOFError, ConnectionResetError):
        pass
    child.join(1.0)
    code = child.exitcode
    if code is not None and code < 0:
        hint = " (out of memory?)" if code == -signal.SIGKILL else ""
        return Report(rank, "error", f"killed by {signal.Signals(-code).name}{hint}", killed_by=-code)
    return Report(rank, "error", f"ended with exit code {code} and no word")


def _end(children: list[Any]) -> None:
    for child in children:
        child.join(0.0)
        if child.exitcode is None:
            child.join(GRACE_SECONDS)
        if child.exitcode is None:
            child.kill()
    for child in children:
        child.join()
