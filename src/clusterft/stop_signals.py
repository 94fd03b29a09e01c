"""SIGTERM and SIGUSR1 as a wish that the loop reads between steps, instead of a death in the middle of one.

SLURM sends one of them before the time limit or on preemption (some sites send only SIGTERM), often to every process of a
job: the same wish may come twice, once directly and once through the launcher.
"""

from __future__ import annotations

import signal
import threading
from typing import Any

WATCHED = (signal.SIGTERM, signal.SIGUSR1)


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
