"""SIGTERM and SIGUSR1 as a wish that the loop reads between steps, instead of a death in the middle of one.

SLURM sends one of them before the time limit or on preemption (some sites send only SIGTERM), often to every process of a
job: the same wish may come twice, once directly and once through the launcher.

Training answers with a checkpoint at the next step (`StopSignals`). Every other stage has all its finished work on disk at any
moment and just leaves (`leaving_on_signals`). Both end with EXIT_PREEMPTED. No torch here.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

WATCHED = (signal.SIGTERM, signal.SIGUSR1)

EXIT_PREEMPTED = 75
"""Exit code of a process that was asked to stop and can go on later: EX_TEMPFAIL of sysexits.h. Schedulers requeue on it."""


class StopSignals:
    """Context manager. `requested`: the signal that this process received, if any; `seen_anywhere`: set by the loop."""

    def __init__(self) -> None:
        self.requested: int | None = None
        self.seen_anywhere = False
        self._before: dict[int, Any] = {}

    def __enter__(self) -> StopSignals:
        if threading.current_thread() is threading.main_thread():  # Python delivers signals to the main thread only
            self._before = {number: signal.signal(number, self._note) for number in WATCHED}
        return self

    def _note(self, number: int, _frame: Any) -> None:
        self.requested = number

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)


@contextmanager
def leaving_on_signals() -> Iterator[None]:
    """Within it SIGTERM and SIGUSR1 end the process with EXIT_PREEMPTED at its next Python instruction, cleaning up on the way.

    SystemExit and no other exception: no handler of errors may take a request to leave for a failed run. Training puts its own
    handlers above these for as long as its ranks live. Does nothing outside of the main thread, which gets no signals.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, _leave) for number in WATCHED}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _leave(number: int, _frame: Any) -> None:
    for other in WATCHED:  # the same wish often comes twice; a second one must not break the cleaning up
        signal.signal(other, signal.SIG_IGN)
    # Not print: the signal may have come in the middle of one, and a buffered stream may not be entered twice.
    os.write(2, f"stopped: {signal.Signals(number).name}; the same command goes on from here\n".encode())
    sys.exit(EXIT_PREEMPTED)
