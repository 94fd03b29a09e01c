"""How far a pass has come: a bar on a terminal, in a log file a line on stderr every half minute, nothing on other ranks.

In come finished rows and, where their number is known beforehand, tokens; out come rows a second, tokens a second and the time
still needed.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import Any

LOG_SECONDS = 30.0


class PassProgress:
    """Progress of one rank's share. `shown` false: prints nothing. tokens None: time is reckoned by rows, which `unit` names."""

    def __init__(self, name: str, rows: int, tokens: int | None, *, shown: bool, unit: str = "rows") -> None:
        self.name, self.rows, self.tokens, self.shown, self.unit = name, rows, tokens, shown, unit
        self.done_rows = self.done_tokens = 0
        self.note = ""
        self._start = self._said = time.perf_counter()
        self._said_rows = 0  # a pass of less than half a minute says nothing to a log file
        self._bar: Any = None

    def __enter__(self) -> PassProgress:
        if self.shown and sys.stderr.isatty():
            from rich.console import Console
            from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

            columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[speed]}"), TimeRemainingColumn())
            self._bar = Progress(*columns, console=Console(stderr=True))
            self._bar.start()
            self._task = self._bar.add_task(self.name, total=self.rows if self.tokens is None else self.tokens, speed="")
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._bar is not None:
            self._bar.stop()
        elif self.shown and kind is None and 0 < self._said_rows < self.done_rows:
            self._say()

    def advance(self, rows: int, tokens: int = 0, note: str = "") -> None:
        """`note` stands at the end of the line until the next one."""
        self.done_rows += rows
        self.done_tokens += tokens
        self.note = note
        if self._bar is not None:
            done = self.done_rows if self.tokens is None else self.done_tokens
            self._bar.update(self._task, completed=done, speed=self.line())
        elif self.shown and time.perf_counter() - self._said > LOG_SECONDS:
            self._say()

    def _say(self) -> None:
        self._said, self._said_rows = time.perf_counter(), self.done_rows
        print(f"{self.name}: {self.line()}", file=sys.stderr, flush=True)

    def line(self) -> str:
        seconds = max(1e-9, time.perf_counter() - self._start)
        done, total = (self.done_rows, self.rows) if self.tokens is None else (self.done_tokens, self.tokens)
        parts = [f"{self.done_rows:,} of {self.rows:,} {self.unit}", f"{_rate(self.done_rows / seconds)} {self.unit}/s"]
        if self.tokens is not None:
            parts.append(f"{_rate(self.done_tokens / seconds)} tokens/s")
        parts.append(f"{(total - done) * seconds / done:,.0f} s left" if done else "time left unknown")
        return ", ".join([*parts, self.note] if self.note else parts)


def _rate(value: float) -> str:
    """Two digits at least: 1,052 · 38 · 3.5 · 0.047."""
    return f"{value:,.0f}" if value >= 10 else f"{value:.2g}"


@contextmanager
def training_progress(
    lengths: Sequence[int], trainer: Any, also: Callable[[dict[str, Any]], None] | None, *, shown: bool
) -> Iterator[Callable[[dict[str, Any]], None]]:
    """What to call with each metrics line of `trainer.train`: shows how far it is, then calls `also`.

    lengths  tokens of the selected rows; trainer: TrainerConfig. A resumed run begins at the first step that it reports
    """
    rows, tokens, global_batch = len(lengths) * trainer.epochs, sum(lengths) * trainer.epochs, trainer.global_batch
    with PassProgress("training", rows, tokens, shown=shown) as bar:

        def on_step(line: dict[str, Any]) -> None:
            if not bar.done_rows:
                before = min(rows, (line["step"] - 1) * global_batch)
                bar.rows, bar.tokens = rows - before, tokens - tokens * before // rows
            loss = "" if line["loss"] is None else f"loss {line['loss']:.3f}"
            bar.advance(line["rows"], line["tokens"], loss)
            if also is not None:
                also(line)

        yield on_step
