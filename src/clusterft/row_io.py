"""The tokens of a selection on disk: what every rank of the training stage reads, and all that it reads of the pool.

In come m encoded rows; out comes `rows.arrow`, an uncompressed Arrow file with the columns id, input_ids, labels, truncated. Readers map
it into memory: 64 ranks neither load nor tokenise the pool again, and ranks of one node share its pages.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pyarrow as pa

from clusterft.records import Encoded
from clusterft.store import StoreError

FILE = "rows.arrow"
_BATCH_ROWS = 4096
_SCHEMA = pa.schema(
    [
        ("id", pa.string()),
        ("input_ids", pa.list_(pa.int32())),
        ("labels", pa.list_(pa.int32())),
        ("truncated", pa.bool_()),
    ]
)


def write_rows(rows: Sequence[Encoded], folder: Path) -> None:
    """Writes `folder`/rows.arrow, whole or not at all; the same rows give the same bytes. Raises OSError on a full disk."""
    folder.mkdir(parents=True, exist_ok=True)
    part = folder / f".{FILE}.part"
    with pa.OSFile(str(part), "wb") as sink, pa.ipc.new_file(sink, _SCHEMA) as writer:
        for start in range(0, len(rows), _BATCH_ROWS):
            some = rows[start : start + _BATCH_ROWS]
            columns = [
                pa.array([row.id for row in some], pa.string()),
                pa.array([row.input_ids for row in some], _SCHEMA.field("input_ids").type),
                pa.array([row.labels for row in some], _SCHEMA.field("labels").type),
                pa.array([row.truncated for row in some], pa.bool_()),
            ]
            writer.write_batch(pa.record_batch(columns, schema=_SCHEMA))
    part.replace(folder / FILE)


def read_rows(folder: Path) -> list[Encoded]:
    """The rows in the order in which they were written; token arrays (t,) int32 are read-only views of the mapped file.

    Raises StoreError if the file is missing or no Arrow file.
    """
    path = folder / FILE
    if not path.exists():
        raise StoreError(f"{path} is missing: the selection is not finished; run the same command again")
    try:
        table = pa.ipc.open_file(pa.memory_map(str(path))).read_all()
    except pa.ArrowInvalid as problem:
        raise StoreError(f"{path} is not a whole Arrow file ({problem}); delete it and run the same command again") from problem
    rows: list[Encoded] = []
    for batch in table.to_batches():
        ids, truncated = batch.column("id").to_pylist(), batch.column("truncated").to_pylist()
        tokens, labels = batch.column("input_ids"), batch.column("labels")
        rows += [
            Encoded(ids[i], tokens[i].values.to_numpy(), labels[i].values.to_numpy(), truncated[i]) for i in range(batch.num_rows)
        ]
    return rows
