"""How far a pass has come: a bar on a terminal, a line now and then in a log file, nothing on other ranks.

In come finished rows and tokens; out come rows a second, tokens a second and the time still needed.
"""

from __future__ import annotations

import logging
import sys
import time
from types import TracebackType
from typing import Any

LOG_SECONDS = 30.0

log = logging.getLogger(__name__)


class PassProgress:
    """Progress of one rank's share. `shown` false: counts nothing, prints nothing."""

    def __init__(self, name: str, rows: int, tokens: int, *, shown: bool) -> None:
        self.name, self.rows, self.tokens, self.shown = name, rows, tokens, shown
        self.done_rows = self.done_tokens = 0
        self._start = self._said = time.perf_counter()
        self._bar: Any = None

    def __enter__(self) -> PassProgress:
        if self.shown and sys.stderr.isatty():
            from rich.console import Console
            from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

            columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[speed]}"), TimeRemainingColumn())
            self._bar = Progress(*columns, console=Console(stderr=True))
            self._bar.start()
            self._task = self._bar.add_task(self.name, total=self.tokens, speed="")
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._bar is not None:
            self._bar.stop()
        if self.shown and kind is None:
            log.info("%s: %s", self.name, self.line())

    def advance(self, rows: int, tokens: int) -> None:
        self.done_rows += rows
        self.done_tokens += tokens
        if self._bar is not None:
            self._bar.update(self._task, completed=self.done_tokens, speed=self.line())
        elif self.shown and time.perf_counter() - self._said > LOG_SECONDS:
            self._said = time.perf_counter()
            log.info("%s: %s", self.name, self.line())

    def line(self) -> str:
        seconds = max(1e-9, time.perf_counter() - self._start)
        speed = self.done_tokens / seconds
        left = (self.tokens - self.done_tokens) / speed if speed else float("inf")
        return (
            f"{self.done_rows:,} of {self.rows:,} rows, {self.done_rows / seconds:,.1f} rows/s, {speed:,.0f} tokens/s, "
            f"{left:,.0f} s left"
        )
