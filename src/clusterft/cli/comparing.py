"""`clusterft compare A B`: `eval.compare` with folders of `clusterft select` in place of run directories.

A folder stands for all its evaluated runs. `eval` arrives by name: this package imports no layer above it.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from pathlib import Path


def run_compare(arguments: Sequence[str]) -> int:
    return import_module("eval.compare").main([runs_of(a) for a in arguments])


def runs_of(argument: str) -> str:
    """The evaluated runs below folders of `clusterft select`, with commas between them; any other argument as it is."""
    return argument if argument.startswith("-") else ",".join(map(_runs_of_one, argument.split(",")))


def _runs_of_one(name: str) -> str:
    runs = sorted(p.parent for p in Path(name.strip()).glob("run/*/record.json"))
    return ",".join(map(str, runs)) if runs else name
