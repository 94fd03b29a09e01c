"""A Selection on disk: `selection.parquet` (one row a chosen id) beside `header.json`, and `scores.parquet` for the whole pool.

Written and read back even within one process, so that selecting and training can be separate jobs. The same selection gives the
same bytes: measured costs go to the run's record, not in here.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from clusterft.atomic import write_atomic
from clusterft.records import Selection
from clusterft.store import StoreError

SELECTION_SCHEMA = 1


def write_selection(selection: Selection, folder: Path) -> None:
    """Writes into `folder` (made if absent): scores and rows first, header.json last, so that a header means a whole selection."""
    folder.mkdir(parents=True, exist_ok=True)
    columns: dict[str, Any] = {"id": pa.array(selection.ids, pa.string())}
    for name, kind in (("clusters", pa.int32()), ("weights", pa.float64()), ("distances", pa.float64())):
        value = getattr(selection, name)
        if value is not None:
            columns[name] = pa.array(value, kind)
    _write_table(pa.table(columns), folder / "selection.parquet")
    every = sorted(selection.scores.keys() | selection.rejected.keys())
    scores = {
        "id": pa.array(every, pa.string()),
        "score": pa.array([selection.scores.get(i) for i in every], pa.float64()),
        "reason": pa.array([selection.rejected.get(i) for i in every], pa.string()),
    }
    _write_table(pa.table(scores), folder / "scores.parquet")
    header = {
        "schema": SELECTION_SCHEMA,
        "method": selection.method,
        "pool_fingerprint": selection.pool_fingerprint,
        "budget": selection.budget,
        "seed": selection.seed,
        "info": dict(selection.info),
    }
    write_atomic(folder / "header.json", json.dumps(header, indent=1, sort_keys=True, allow_nan=False) + "\n")


def read_selection(folder: Path) -> Selection:
    """Reads what `write_selection` wrote; every check of Selection runs again. Raises StoreError if it is not there or another schema."""
    header_path = folder / "header.json"
    if not header_path.exists():
        raise StoreError(f"{folder} holds no finished selection (header.json is missing); select first")
    header = json.loads(header_path.read_text(encoding="utf-8"))
    if header.pop("schema") != SELECTION_SCHEMA:
        raise StoreError(f"{header_path} is of another schema than {SELECTION_SCHEMA}; select again with this version")
    table = pq.read_table(folder / "selection.parquet")
    arrays = {name: table[name].to_numpy() for name in ("clusters", "weights", "distances") if name in table.column_names}
    scores = pq.read_table(folder / "scores.parquet").to_pydict()
    rows = list(zip(scores["id"], scores["score"], scores["reason"], strict=True))
    return Selection(
        ids=tuple(table["id"].to_pylist()),
        clusters=arrays["clusters"].astype(np.int32) if "clusters" in arrays else None,
        weights=arrays.get("weights"),
        distances=arrays.get("distances"),
        scores={i: s for i, s, _ in rows if s is not None},
        rejected={i: r for i, _, r in rows if r is not None},
        **header,
    )


def _write_table(table: pa.Table, path: Path) -> None:
    part = path.with_name(f".{path.name}.part")
    pq.write_table(table, part, compression="zstd")
    part.replace(path)
