"""Starting the processes of one stage, and ending them together.

In come the name of a function and its arguments; P processes call it as `function(dist=Dist, **kwargs)` and one of these
comes out:

    nothing         all ranks returned
    WorkerError     a rank raised: its message first, all others ended within seconds
    Preempted       the ranks wrote a checkpoint on SIGTERM or SIGUSR1 and left with exit code 75

`spawn` forks from a server that has torch and transformers imported already (about a second for four processes after the
server's first start); a single process runs in a child as well, so that memory, threads and signals behave alike. `torchrun`
starts the same entry through torch's own launcher, `srun` one torchrun on every node of a SLURM job (see `nodes`). Also the entry under torchrun or srun: `python -m clusterft.launch
module:function kwargs.json`.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
import traceback
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any, NoReturn

from clusterft.distributed import EXIT_PREEMPTED, Preempted
from clusterft.nodes import LAUNCHERS, attend, run_on_nodes, start_torchrun
from clusterft.ranks import Report, WorkerError, forwarded_signals, judge, resolve
from clusterft.spawn import run_spawned

__all__ = ["EXIT_PREEMPTED", "Preempted", "WorkerError", "run"]


def run(
    entry: str,
    kwargs: Mapping[str, Any],
    *,
    processes: int,
    threads: int,
    device: str = "cpu",
    launcher: str = "spawn",
    nodes: int = 1,
    scratch: Path | None = None,
    timeout: timedelta | None = None,
) -> None:
    """Runs `entry` ("package.module:function") in `processes` processes of `threads` threads each, over all nodes together.

    launcher spawn | torchrun on this node; srun: `processes / nodes` on each node of the SLURM job that this process is in
    scratch  for srun: a folder that all nodes see
    timeout  for spawn, limit of one collective; None: clusterft.distributed.COLLECTIVE_TIMEOUT
    Raises WorkerError, Preempted, or ValueError for arguments that make no sense.
    """
    if ":" not in entry:
        raise ValueError(f"entry {entry!r} must read package.module:function")
    if processes < 1 or threads < 1:
        raise ValueError(f"processes={processes} and threads={threads} must be at least 1")
    if nodes != 1 and launcher != "srun":
        raise ValueError(f"runtime.nodes={nodes}: launcher {launcher} starts ranks on this node only; use srun (slurm/submit.sh)")
    if launcher == "srun":
        places = {"nodes": nodes, "threads": threads, "device": device, "scratch": scratch}
        run_on_nodes(entry, kwargs, processes=processes, **places)
    elif launcher == "spawn":
        run_spawned(entry, kwargs, processes, threads, device, timeout)
    elif launcher == "torchrun":
        _run_torchrun(entry, kwargs, processes, threads, device)
    else:
        raise ValueError(f"runtime.launcher={launcher!r} is not one of {', '.join(LAUNCHERS)}")


def _run_torchrun(entry: str, kwargs: Mapping[str, Any], processes: int, threads: int, device: str) -> None:
    """One node through torch.distributed.run; it picks a free port and ends all ranks when one fails.

    Signals go to the ranks, past torchrun, which would leave them 30 seconds for a step and a checkpoint.
    """
    with tempfile.TemporaryDirectory(prefix="clusterft-torchrun-") as folder:
        arguments = Path(folder) / "kwargs.json"
        arguments.write_text(json.dumps(dict(kwargs)), encoding="utf-8")
        reports = Path(folder) / "reports"
        reports.mkdir()
        command = ["--standalone", f"--nproc-per-node={processes}", "-m", "clusterft.launch", entry, str(arguments)]
        child = start_torchrun([*command, "--device", device, "--reports", str(reports)], threads)
        with forwarded_signals([]) as received:
            code = attend(child, received)
        if code == 0:
            judge([], received)
            return
        found = sorted((json.loads(p.read_text(encoding="utf-8")) for p in reports.glob("*.json")), key=lambda r: r["time"])
        judge([Report(r["rank"], r["kind"], r["message"], r["details"]) for r in found], received)
        if code == EXIT_PREEMPTED:
            raise Preempted("stopped by a signal")
        raise WorkerError(f"torchrun ended with exit code {code} and no rank said why")


def main(argv: list[str] | None = None) -> NoReturn:
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
        resolve(options.entry)(dist=dist, **json.loads(options.kwargs.read_text(encoding="utf-8")))
        distributed.leave_group()
        _leave(0)
    except distributed.Preempted as stop:
        report, code = Report(rank, "preempted", str(stop)), distributed.EXIT_PREEMPTED
    except Exception as error:
        report, code = Report(rank, "error", f"{type(error).__name__}: {error}", traceback.format_exc()), 1
    print(f"rank {rank}: {report.message}", file=sys.stderr, flush=True)
    if options.reports is not None:
        facts = {"rank": rank, "kind": report.kind, "message": report.message, "details": report.details, "time": time.time()}
        (options.reports / f"{rank}.json").write_text(json.dumps(facts), encoding="utf-8")
    _leave(code)


def _leave(code: int) -> NoReturn:
    """Without the interpreter's shutdown: threads of a communication library that still run abort the process there now and then."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    main()
