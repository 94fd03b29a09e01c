"""The small clean process that forks a jail for every problem. Started by `eval.sandbox`; speaks JSON lines on stdin and stdout.

It holds no secret: it is started with an empty environment and no open files, has evalplus and numpy imported and nothing else,
so that a fork of it costs milliseconds and gives model-written code nothing to find. Three generations:

    warden ─fork► keeper (enters the namespaces) ─fork► init (first process inside, trusted) ─evalplus forks► the solution

Only init holds the pipe for the result, and it closes itself in everything that init forks. Each generation dies with the one
above it, so killing the keeper, or the evaluating program, leaves nothing behind.

First line in: {"parallel", "limits", "root", "plans", "environment"}; first line out: see `_best_plan`.
Then any number of {"id", "kind", ...} in and {"id", "result"} out, in the order in which they finish.
"""

from __future__ import annotations

import importlib
import json
import multiprocessing
import os
import selectors
import shutil
import signal
import socket
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import psutil

from eval import jail, jobs

_POLL_SECONDS = 0.1
_KERNEL_LISTS_CHILDREN = os.path.exists(f"/proc/self/task/{os.getpid()}/children")
_PRELOADED = (
    "evalplus.eval",
    "evalplus.gen.util",
    "multiprocessing.popen_fork",
    "multiprocessing.sharedctypes",
    "math",
    "re",
    "string",
)


@dataclass
class Cell:
    """One running problem: its keeper, the pipe its result comes through, and when it must be over."""

    job_id: Any
    keeper: int
    pipe: int
    deadline: float
    text: bytes = b""
    reason: str = ""


@dataclass
class Warden:
    parallel: int
    limits: jail.Limits
    root: str
    plan: str = jail.PLANS[0]
    started: int = 0
    cells: dict[int, Cell] = field(default_factory=dict)
    selector: selectors.BaseSelector = field(default_factory=selectors.DefaultSelector)

    def start(self, job: dict[str, Any]) -> None:
        """Forks a keeper for one job."""
        self.started += (
            1  # the last problem's processes may still be dying: a user of its own keeps their count out of this one's
        )
        reading, writing = os.pipe()
        keeper = os.fork()
        if keeper == 0:
            _keep(job, self, self.started, writing)
        os.close(writing)
        cell = Cell(job["id"], keeper, reading, time.monotonic() + self.limits.wall_seconds)
        self.cells[reading] = cell
        self.selector.register(reading, selectors.EVENT_READ)

    def collect(self, timeout: float) -> list[tuple[Any, dict[str, Any]]]:
        """Waits up to `timeout` seconds; returns the results that came, killing what ran over its wall clock or memory."""
        done = []
        for key, _ in self.selector.select(timeout):
            cell = self.cells.get(key.fd)
            if cell is None:
                continue
            piece = os.read(cell.pipe, 1 << 16)
            cell.text += piece
            if not piece or cell.text.endswith(b"\n"):
                done.append((cell.job_id, self._finish(cell)))
        for cell in list(self.cells.values()):
            cell.reason = cell.reason or self._excess(cell)
            if cell.reason:
                done.append((cell.job_id, self._finish(cell)))
        return done

    def _excess(self, cell: Cell) -> str:
        if time.monotonic() > cell.deadline:
            return "wall_clock"
        if _tree_bytes(cell.keeper) > self.limits.memory_gib * 2**30:
            return "memory"
        return ""

    def _finish(self, cell: Cell) -> dict[str, Any]:
        """Ends the cell with everything in it and gives its result, or the reason why there is none."""
        self.selector.unregister(cell.pipe)
        os.close(cell.pipe)
        del self.cells[cell.pipe]
        for kill in (os.killpg, os.kill):  # without a process namespace the group is the best there is
            try:
                kill(cell.keeper, signal.SIGKILL)
            except ProcessLookupError:
                continue
        os.waitpid(cell.keeper, 0)
        if cell.text.endswith(b"\n"):
            return json.loads(cell.text)
        return {"killed": cell.reason or "died"}


def _tree_bytes(pid: int) -> int:
    """Resident bytes of a process and all its descendants; shared pages count once a process, so this errs on the strict side."""
    total = 0
    try:
        with open(f"/proc/{pid}/statm") as f:
            resident, shared = (int(x) for x in f.read().split()[1:3])
        total = (resident - shared) * os.sysconf("SC_PAGE_SIZE")
        children = _children(pid)
    except (FileNotFoundError, ProcessLookupError):
        return total
    return total + sum(_tree_bytes(child) for child in children)


def _children(pid: int) -> list[int]:
    """Direct children, from the kernel's list or, where it was built without, from a look at every process."""
    if not _KERNEL_LISTS_CHILDREN:
        try:
            return [child.pid for child in psutil.Process(pid).children()]
        except psutil.NoSuchProcess:
            return []
    with open(f"/proc/{pid}/task/{pid}/children") as f:
        return [int(child) for child in f.read().split()]


def _keep(job: dict[str, Any], warden: Warden, slot: int, result_pipe: int) -> None:
    """The keeper: puts up the walls, forks init, waits for it. Never returns."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    keep = os.dup2(result_pipe, 3, inheritable=False) if result_pipe != 3 else 3
    try:
        os.closerange(4, 1 << 16)
        null = os.open(os.devnull, os.O_RDWR)
        for stream in (0, 1, 2):
            os.dup2(null, stream)
        os.close(null)
        with open("/proc/self/oom_score_adj", "w") as f:
            f.write("1000")
        standing = jail.enter(warden.root, warden.limits, slot, warden.plan)
        init = os.fork()
        if init == 0:
            _be_init(job, standing, keep)
        jail.die_with_parent()
        os.close(keep)
        os.waitpid(init, 0)
    except OSError as problem:
        _write_all(keep, json.dumps({"error": f"jail: {problem}"}).encode() + b"\n")
    finally:
        os._exit(0)


def _be_init(job: dict[str, Any], standing: set[str], result_pipe: int) -> None:
    """The first process inside: runs the job and writes its result. Never returns."""
    try:
        os.register_at_fork(after_in_child=lambda: os.close(result_pipe))
        standing = jail.become_init(standing)
        result = jobs.run(job)
        if job["kind"] == "prove":
            result["standing"] = sorted(standing)
        _write_all(result_pipe, json.dumps(result).encode() + b"\n")
    except OSError as problem:
        _write_all(result_pipe, json.dumps({"error": f"jail: {problem}"}).encode() + b"\n")
    finally:
        os._exit(0)


def _write_all(pipe: int, data: bytes) -> None:
    while data:
        data = data[os.write(pipe, data) :]


def _best_plan(warden: Warden, plans: list[str], environment: list[str]) -> dict[str, Any]:
    """Takes the strongest plan whose jail can be entered. Returns {"plan", "walls": proved, "missing": the others, "why":
    ...}.
    """
    why = []
    for plan in plans:
        warden.plan = plan
        found = _prove_walls(warden, environment)
        if not found["why"]:
            break
        why.append(found["why"])
    return {**found, "plan": warden.plan, "why": "; ".join(why)}


def _prove_walls(warden: Warden, environment: list[str]) -> dict[str, Any]:
    """Runs the attempts of `jobs.prove` in a jail of the warden's plan."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        job = {
            "id": None,
            "kind": "prove",
            "port": server.getsockname()[1],
            "folder": os.path.dirname(warden.root) + "/open",
            "warden": os.getpid(),
        }
        warden.start({**job, "environment": environment})
        done: list[tuple[Any, dict[str, Any]]] = []
        while not done:
            done = warden.collect(_POLL_SECONDS)
    result = done[0][1]
    every = [*jail.WALLS, "environment"]
    walls = [w for w in every if result.get(w)]
    return {
        "walls": walls,
        "missing": [w for w in every if w not in walls],
        "why": result.get("error") or result.get("killed") or "",
    }


def _lines(buffer: bytearray) -> list[dict[str, Any]]:
    *lines, rest = bytes(buffer).split(b"\n")
    buffer[:] = rest
    return [json.loads(line) for line in lines if line]


def main() -> None:
    """Serves until stdin ends."""
    for name in _PRELOADED:  # once, here, so that every fork has it
        importlib.import_module(name)

    multiprocessing.set_start_method("fork")
    opening = sys.stdin.buffer.readline()
    if not opening:  # the evaluating program died while this one was starting
        return
    first = json.loads(opening)
    signal.signal(signal.SIGTERM, lambda *_: _leave(first["root"]))
    jail.die_with_parent(signal.SIGTERM)
    warden = Warden(first["parallel"], jail.Limits(**first["limits"]), first["root"])
    _say(_best_plan(warden, first["plans"], first["environment"]))
    waiting: list[dict[str, Any]] = []
    buffer, open_input = bytearray(), True
    os.set_blocking(0, False)
    warden.selector.register(0, selectors.EVENT_READ)
    while open_input or waiting or warden.cells:
        while waiting and len(warden.cells) < warden.parallel:
            warden.start(waiting.pop(0))
        for job_id, result in warden.collect(_POLL_SECONDS):
            _say({"id": job_id, "result": result})
        if open_input:
            try:
                piece = os.read(0, 1 << 20)
            except BlockingIOError:
                continue
            buffer += piece
            waiting += _lines(buffer)
            if not piece:
                open_input = False
                warden.selector.unregister(0)


def _leave(root: str) -> None:
    """The evaluating program is gone: its folder goes, too, and with this process every keeper and all below."""
    shutil.rmtree(os.path.dirname(root), ignore_errors=True)
    os._exit(1)


def _say(message: dict[str, Any]) -> None:
    _write_all(1, json.dumps(message).encode() + b"\n")


if __name__ == "__main__":
    main()
