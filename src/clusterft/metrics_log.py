"""metrics.jsonl: one line a step, each step once, also after a crash.

In come dictionaries on rank 0; out comes a file of JSON lines. A resumed run first drops the lines of steps after its
checkpoint: they are about to be computed again.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, TextIO

from clusterft.atomic import write_atomic
from clusterft.distributed import Dist

FILE = "metrics.jsonl"


class MetricsLog:
    """Context manager; on ranks other than 0 it writes nothing. Every line is flushed: a killed run keeps its log."""

    def __init__(self, folder: Path, dist: Dist, *, keep_steps: int) -> None:
        self._path, self._is_main, self._keep = folder / FILE, dist.is_main, keep_steps
        self._stream: TextIO | None = None

    def __enter__(self) -> MetricsLog:
        if self._is_main:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            if self._path.exists():
                kept = [line for line in read_metrics(self._path.parent) if line["step"] <= self._keep]
                write_atomic(self._path, "".join(json.dumps(line) + "\n" for line in kept))
            self._stream = self._path.open("a", encoding="utf-8")
        return self

    def write(self, line: dict[str, Any]) -> None:
        if self._stream is not None:
            self._stream.write(json.dumps(line) + "\n")
            self._stream.flush()

    def __exit__(self, *_: object) -> None:
        if self._stream is not None:
            self._stream.close()


def read_metrics(folder: Path) -> list[dict[str, Any]]:
    """The lines of a run, in order; a last line that was cut off by a crash is left out."""
    lines = (folder / FILE).read_text(encoding="utf-8").split("\n")
    return [json.loads(line) for line in lines[:-1]]
