"""A selection's folder as plain rows, for notebooks: what was kept of each cluster, and rows to read.

In comes a folder of `clusterft select` (or any with its `selection.jsonl` and the source rows); out come dictionaries. Nothing is written.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

Row = Mapping[str, Any]


@dataclass(frozen=True)
class ClusterView:
    """One cluster: rows before, rows kept, the loss weight of a kept row."""

    cluster: int
    rows: int
    kept: int
    weight: float


def read_selection(folder: Path) -> list[Row]:
    """The rows there were to choose from: id, line, cluster, distance, weight, kept, and the prompt where the source can be read.

    Raises FileNotFoundError for a folder without a selection, ValueError for one whose method has no clusters.
    """
    path = folder / "selection.jsonl"
    if not path.is_file():
        raise FileNotFoundError(f"{folder} holds no selection.jsonl; give a folder that `clusterft select` wrote")
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    if any(row.get("cluster") is None for row in rows):
        raise ValueError(f"{path}: rows without a cluster; this view is of `--selector cluster`")
    return [{**row, "prompt": _prompt(folder, row)} for row in rows]


def _prompt(folder: Path, row: Row) -> str:
    """The instruction of a row, "" where its source file is neither where it was nor in `folder`, or is not one JSON object a line."""
    places = [Path(str(row["file"])), folder / Path(str(row["file"])).name]
    source = next((place for place in places if place.suffix == ".jsonl" and place.is_file()), None)
    if source is None:
        return ""
    content = json.loads(_lines(source)[row["line"] - 1])
    return str(content.get("instruction") or content.get("prompt") or content.get("problem") or "")


@lru_cache(maxsize=8)
def _lines(source: Path) -> list[str]:
    return source.read_text(encoding="utf-8").split("\n")


def clusters(rows: Sequence[Row]) -> list[ClusterView]:
    """Every cluster in order of its number."""
    found = []
    for number in sorted({row["cluster"] for row in rows}):
        own = [row for row in rows if row["cluster"] == number]
        kept = [row for row in own if row["kept"]]
        found.append(ClusterView(number, len(own), len(kept), float(kept[0]["weight"]) if kept else 0.0))
    return found


def examples(rows: Sequence[Row], cluster: int) -> tuple[Row, Row]:
    """(the kept row farthest from the centroid, the dropped row nearest to it). Raises ValueError where nothing was kept or dropped."""
    own = [row for row in rows if row["cluster"] == cluster]
    kept, dropped = [row for row in own if row["kept"]], [row for row in own if not row["kept"]]
    if not kept or not dropped:
        raise ValueError(f"cluster {cluster}: {len(kept)} rows kept and {len(dropped)} dropped; there is nothing to compare")
    return max(kept, key=lambda row: row["distance"]), min(dropped, key=lambda row: row["distance"])
