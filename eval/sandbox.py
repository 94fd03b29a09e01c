"""Runs model-written code where it can do no harm, and says how thick the walls are.

    with Sandbox(mode="require", parallel=2) as sandbox:
        print(sandbox.note)                      # "sandbox full" or "sandbox partial: not covered: network, ..."
        for job_id, result in sandbox.run(jobs): ...

What is covered when every wall stands: no network (a network namespace without devices, and no sockets by system-call
filter); nothing of the machine's files but the interpreter's and the installed packages' libraries, read-only; one small
temporary folder in memory; an empty environment; no sight of other processes; no root, no capabilities; limits on memory,
processor time, processes, file size, open files and wall clock; everything dies with the problem, and with the program that
asked.

What is not covered, ever: kernel faults; a solution that tries to deceive the grader (it runs in the process in which evalplus
compares, as everywhere evalplus is used); reading installed packages; slowing the machine within its limits; timing channels.

`mode="require"` refuses to run unless every wall was proved by an attempt to break it; `mode="best_effort"` runs with what
stands and says so in `note`, which evaluators put into their metrics.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import Any

from eval.errors import EvaluationError
from eval.jail import PLANS, Limits

MODES = ("require", "best_effort")


class SandboxError(EvaluationError):
    """The sandbox could not be set up as asked, or its warden died."""


class Sandbox:
    """A warden process and its jails.

    mode      require | best_effort
    parallel  problems at once
    limits    for each problem
    plans     which kinds of jail may be tried, strongest first (`eval.jail.PLANS`)

    Raises SandboxError on entering when a wall that `require` asks for does not stand.
    """

    def __init__(
        self,
        mode: str = "require",
        parallel: int = 1,
        limits: Limits = Limits(),  # noqa: B008  frozen
        plans: Sequence[str] = PLANS,
    ) -> None:
        if mode not in MODES:
            raise ValueError(f"sandbox mode {mode!r} is not one of {', '.join(MODES)}")
        if parallel < 1:
            raise ValueError(f"sandbox: parallel is {parallel}, at least 1 is needed")
        self.mode, self.parallel, self.limits, self.plans = mode, parallel, limits, tuple(plans)
        self.walls: tuple[str, ...] = ()
        self.missing: tuple[str, ...] = ()
        self._process: subprocess.Popen[bytes] | None = None
        self._root = ""

    @property
    def note(self) -> str:
        """How thick the walls are, for a metric's note."""
        return f"sandbox partial: not covered: {', '.join(self.missing)}" if self.missing else "sandbox full"

    def __enter__(self) -> Sandbox:
        if sys.platform != "linux":
            raise SandboxError(
                f"model-written code is run behind Linux namespaces; this is {sys.platform}: score on a Linux machine"
            )
        self._root = tempfile.mkdtemp(prefix="jail-")
        os.chmod(self._root, 0o711)
        os.mkdir(self._root + "/root")
        os.mkdir(self._root + "/open")
        os.chmod(
            self._root + "/open", 0o777
        )  # an escape would be able to write here: the proof of the file wall is that it cannot
        try:
            self._start()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def _start(self) -> None:
        environment = _clean_environment()
        self._process = subprocess.Popen(
            [sys.executable, "-s", "-P", "-B", str(Path(__file__).with_name("warden.py"))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environment,
            cwd="/",
            start_new_session=True,
        )
        first = {"parallel": self.parallel, "limits": asdict(self.limits), "root": self._root + "/root", "plans": self.plans}
        self._send({**first, "environment": [*environment, "LC_CTYPE"]})
        found = self._receive()
        self.walls, self.missing = tuple(found["walls"]), tuple(found["missing"])
        if self.mode == "require" and self.missing:
            why = f" ({found['why']})" if found["why"] else ""
            raise SandboxError(
                f"sandbox=require, but this machine does not give: {', '.join(self.missing)}{why}; allow unprivileged user "
                "namespaces or run as root in a container with CAP_SYS_ADMIN, or set sandbox=best_effort to run with what stands"
            )

    def run(self, jobs: Iterable[Mapping[str, Any]]) -> Iterator[tuple[Any, dict[str, Any]]]:
        """Yields (id, result) in the order in which jobs finish; see `eval.jobs`. Each job has a unique "id" and a "kind".

        A job that was stopped gives {"killed": "wall_clock" | "memory" | "died"}. Raises SandboxError if the warden dies.
        """
        waiting, running = list(jobs), 0
        while waiting or running:
            while waiting and running < 2 * self.parallel:  # a short queue: the pipe never fills in both directions
                self._send(dict(waiting.pop(0)))
                running += 1
            message = self._receive()
            running -= 1
            yield message["id"], message["result"]

    def _send(self, message: Mapping[str, Any]) -> None:
        assert self._process is not None and self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(message).encode() + b"\n")
            self._process.stdin.flush()
        except BrokenPipeError as problem:
            raise SandboxError("the sandbox's warden process died; its messages are on stderr") from problem

    def _receive(self) -> dict[str, Any]:
        assert self._process is not None and self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line.endswith(b"\n"):
            raise SandboxError("the sandbox's warden process died; its messages are on stderr")
        return json.loads(line)

    def close(self) -> None:
        """Ends the warden and everything below it."""
        process, self._process = self._process, None
        if process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            for stream in (process.stdin, process.stdout):
                if stream is not None:
                    stream.close()
            process.wait()
        if self._root:
            shutil.rmtree(self._root, ignore_errors=True)
            self._root = ""


def _clean_environment() -> dict[str, str]:
    """All that the warden is told. evalplus's memory cap is off (-1): the jail's own, which cannot be raised, stands."""
    clean = {
        "PATH": "/usr/bin:/bin",
        "HOME": "/tmp",
        "TMPDIR": "/tmp",
        "LANG": "C.UTF-8",
        "OMP_NUM_THREADS": "1",
        "OPENBLAS_NUM_THREADS": "1",
        "PYTHONHASHSEED": "0",
        "EVALPLUS_MAX_MEMORY_BYTES": "-1",
    }
    if "LD_LIBRARY_PATH" in os.environ:  # some installations of Python do not start without it
        clean["LD_LIBRARY_PATH"] = os.environ["LD_LIBRARY_PATH"]
    return clean
