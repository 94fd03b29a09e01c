"""What both launchers need: a rank's last word, who is to blame, signals passed on.

In come the reports of ranks in order of arrival; out comes nothing, or the one exception that says why the stage did not finish.
"""

from __future__ import annotations

import importlib
import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from clusterft.distributed import Preempted


class WorkerError(RuntimeError):
    """A rank failed. The message begins with the failing rank and its reason; `details` holds its traceback."""

    def __init__(self, message: str, details: str = "") -> None:
        super().__init__(message)
        self.details = details


@dataclass(frozen=True)
class Report:
    rank: int
    kind: str  # done | error | preempted
    message: str = ""
    details: str = ""
    killed_by: int | None = None


def resolve(entry: str) -> Any:
    module, _, name = entry.partition(":")
    return getattr(importlib.import_module(module), name)


_ECHOES = ("Connection closed by peer", "Connection reset by peer", "Broken pipe", "DistBackendError", "DistNetworkError")


def is_echo(message: str) -> bool:
    """A rank that only lost its connection to a failing peer."""
    return any(echo in message for echo in _ECHOES)


def judge(reports: list[Report], received: set[int]) -> None:
    """Raises for the first bad report; a rank that only lost its connection to a failing peer comes after that peer.

    received: signals that this process was sent and passed on. A rank that such a signal ended before it could answer with a
    checkpoint (still loading, already saving) was stopped, it did not fail. A signal that came after the last step still counts:
    whoever sent it wants the process gone, and the stage's result is on disk.
    """
    if signal.SIGINT in received:
        raise KeyboardInterrupt
    errors = [r for r in reports if r.kind == "error"]
    stopped = [r for r in reports if r.kind == "preempted" or r.killed_by in received]
    if stopped and received:
        raise Preempted(stopped[0].message)
    if errors:
        first = min(errors, key=lambda r: is_echo(r.message))
        named = first.message if f"rank {first.rank}:" in first.message else f"rank {first.rank}: {first.message}"
        raise WorkerError(named, first.details)
    if stopped:
        raise Preempted(stopped[0].message)
    if received:
        raise Preempted(f"{signal.Signals(min(received)).name} came when the ranks had finished")


def pass_on(number: int, pids: list[int]) -> None:
    """Sends a signal to those processes that still live."""
    for pid in pids:
        try:
            os.kill(pid, number)
        except ProcessLookupError:
            continue


@contextmanager
def forwarded_signals(pids: list[int]) -> Iterator[set[int]]:
    """SIGTERM, SIGUSR1 and SIGINT of the parent reach every rank; yields those seen. Only a main thread can catch them.

    pids may grow while this is in force.
    """
    received: set[int] = set()
    if threading.current_thread() is not threading.main_thread():
        yield received
        return

    def forward(number: int, _frame: Any) -> None:
        received.add(number)
        pass_on(number, pids)

    before = {number: signal.signal(number, forward) for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)}
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
