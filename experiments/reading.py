"""Committed results read back: results/<scale>/ID.json -> `Table`.

For pages about results and for notebooks, which need neither records nor Hydra. `render.json_text` writes what this reads; the Markdown
of a table that was read back is the committed Markdown (a test compares them).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from experiments.reported import Reported, ReportedValue
from experiments.table import Column, Difference, Line, Table, Value


def read_table(path: Path) -> Table:
    """One table. Raises ValueError naming the file when it holds no table of this version."""
    try:
        return _table(json.loads(path.read_text(encoding="utf-8")))
    except (KeyError, TypeError, AttributeError, ValueError) as problem:
        raise ValueError(f"{path} is no table of this version ({problem!r}); render it again") from problem


def read_tables(folder: Path) -> dict[str, Table]:
    """All tables of one scale by id, in the order of the paper. Empty when there are none."""
    tables = [read_table(path) for path in folder.glob("*.json")]
    return {table.id: table for table in sorted(tables, key=lambda t: place_of(t.id))}


def place_of(experiment: str) -> tuple[int, int, str]:
    """Tables by number, then figures, then the rest by name."""
    word = experiment.rstrip("0123456789")
    number = int(experiment[len(word) :] or 0)
    return {"table": 0, "figure": 1}.get(word, 2), number, experiment


def scales(results: Path) -> list[str]:
    """Scales that have results, smallest first."""
    known = ("smoke", "laptop", "overnight", "paper")
    found = {path.parent.name for path in results.glob("*/*.json")}
    return sorted(found, key=lambda name: (known.index(name) if name in known else len(known), name))


def _table(data: Mapping[str, Any]) -> Table:
    lines: dict[tuple[str, str], dict[str, Value]] = {}
    for entry in data["values"]:
        lines.setdefault((entry["row"], entry["column"]), {})[entry["key"]] = _value(entry)
    return Table(
        id=data["id"],
        title=data["title"],
        scale=data["scale"],
        scale_note=data["scale_note"],
        row_title=data["row_title"],
        column_title=data["column_title"],
        columns=tuple(Column(**column) for column in data["columns"]),
        lines=tuple(Line(row, column, values) for (row, column), values in lines.items()),
        reference=data["reference"],
        reported=_reported(data["reported"]),
        expected=data["expected"],
        problems=tuple(data["problems"]),
        notes=tuple(data["notes"]),
    )


def _value(entry: Mapping[str, Any]) -> Value:
    d = entry["difference"]
    interval = tuple(d["interval"]) if d and d["interval"] else None
    return Value(
        planned=entry["planned"],
        by_seed={int(seed): number for seed, number in entry["by_seed"].items()},
        run_ids={int(seed): run for seed, run in entry["run_ids"].items()},
        problems={int(seed): words for seed, words in entry["problems"].items()},
        state=entry["state"],
        best=entry["best"],
        within_noise=entry["within_noise"],
        difference=Difference(d["mean"], interval, d["n"], d["verdict"]) if d else None,
        text=entry["text"],
    )


def _reported(data: Mapping[str, Any] | None) -> Reported | None:
    if data is None:
        return None
    values = tuple(ReportedValue(**value) for value in data["values"])
    return Reported(data["source"], data["setup"], values, tuple(data["claims"]))
