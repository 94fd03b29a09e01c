"""Positions in a grid: index -> configuration, SLURM array strings, and what an array leaves out.

The first key is the outermost loop, as in a nested `for`; indices start at 0. Nothing here knows about tables.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from math import prod
from typing import Any

_PART = re.compile(r"(\d+)(?:-(\d+)(?::(\d+))?)?")


def grid_size(grid: Mapping[str, Sequence[Any]]) -> int:
    return prod(len(values) for values in grid.values())


def grid_config(grid: Mapping[str, Sequence[Any]], index: int) -> dict[str, Any]:
    """The configuration at `index`, first key outermost. Raises IndexError naming the valid range."""
    check_index(index, grid_size(grid))
    config: dict[str, Any] = {}
    for key in reversed(grid):
        index, position = divmod(index, len(grid[key]))
        config[key] = grid[key][position]
    return {key: config[key] for key in grid}


def check_index(index: int | None, size: int) -> int:
    """`index` itself. Raises IndexError if it is None (an unset array variable) or outside 0..size-1."""
    if index is None:
        raise IndexError(f"no index given: set SLURM_ARRAY_TASK_ID or pass one of 0..{size - 1}")
    if not 0 <= index < size:
        raise IndexError(f"index {index} is outside the valid range 0..{size - 1}; nothing was started")
    return index


def parse_array(text: str) -> list[int]:
    """Indices of a SLURM --array string such as "0-11:2", "3,7" or "0-11%4", sorted. Raises ValueError."""
    indices: set[int] = set()
    for part in text.split("%", 1)[0].split(","):
        match = _PART.fullmatch(part.strip())
        if match is None:
            raise ValueError(f"array {text!r}: {part!r} is not an index, a range a-b or a range with step a-b:s")
        first, last, step = match.groups()
        low, high, by = int(first), int(last or first), int(step or 1)
        if high < low or by < 1:
            raise ValueError(f"array {text!r}: {part!r} counts nothing")
        indices.update(range(low, high + 1, by))
    return sorted(indices)


def array_string(indices: Iterable[int]) -> str:
    """The shortest plain --array string for some indices: [0, 1, 2, 5] -> "0-2,5"; "" for none."""
    parts: list[list[int]] = []
    for index in sorted(set(indices)):
        if parts and parts[-1][1] == index - 1:
            parts[-1][1] = index
        else:
            parts.append([index, index])
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in parts)


def check_array(text: str, size: int) -> tuple[list[int], list[int]]:
    """(never run, out of range) of an --array string over a grid of `size`."""
    asked = set(parse_array(text))
    return sorted(set(range(size)) - asked), sorted(asked - set(range(size)))


def equal_configs(run_ids: Sequence[str]) -> dict[str, list[int]]:
    """Run ids that several positions share -> those positions: one run, not several."""
    places: dict[str, list[int]] = {}
    for index, run_id in enumerate(run_ids):
        places.setdefault(run_id, []).append(index)
    return {run_id: indices for run_id, indices in places.items() if len(indices) > 1}
