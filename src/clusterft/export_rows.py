"""Chosen rows in the forms that trainers read: source lines, messages, a `datasets` table, the table of the whole pool.

In: examples, the selection, the load report. Out: bytes and columns; `export` decides where they go. Every text column is plain
data: nothing from a row ever becomes part of a file name.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import pyarrow as pa

from clusterft.load_report import LoadReport
from clusterft.records import Example, Selection
from clusterft.sources import DataError
from clusterft.templates import turns_of
from clusterft.text_rules import normalise_input

POOL_SCHEMA = pa.schema(
    {
        "id": pa.string(),
        "file": pa.string(),
        "line": pa.int64(),
        "cluster": pa.int32(),
        "distance": pa.float64(),
        "weight": pa.float64(),
        "kept": pa.bool_(),
    }
)


def source_lines(examples: Sequence[Example], report: LoadReport) -> tuple[list[bytes], int]:
    """One line a row without its ending, and how many are the source's own bytes.

    The others come from formats without lines of their own (CSV, Parquet, an array element over several lines) and are written
    as one JSON object with the texts of the row.
    """
    own: dict[int, bytes] = {}
    for position, line in zip(*_with_bytes(examples, report), strict=True):
        if b"\n" not in line and b"\r" not in line:
            own[position] = line
    return [own[i] if i in own else as_json(e) for i, e in enumerate(examples)], len(own)


def _with_bytes(examples: Sequence[Example], report: LoadReport) -> tuple[list[int], list[bytes]]:
    places = [i for i, e in enumerate(examples) if has_bytes(e, report)]
    return places, report.source_lines([examples[i] for i in places])


def has_bytes(example: Example, report: LoadReport) -> bool:
    """True if the example's source keeps a line of its own."""
    index = report.index.get(example.source)
    return index is not None and index.find(example.line) is not None


def as_json(example: Example) -> bytes:
    """A row as one line of JSON in a layout that every loader here recognises."""
    if example.turns:
        value: dict[str, Any] = {"messages": messages(example)}
    else:
        value = {"instruction": example.prompt, "input": example.input, "output": example.response}
    return json.dumps(value, ensure_ascii=False, allow_nan=False).encode()


def messages(example: Example) -> list[dict[str, str]]:
    """The conversation as role and content; the input block of an Alpaca row follows its instruction."""
    turns = turns_of(example)
    block = normalise_input(example.input)
    found = [{"role": t.role, "content": t.text} for t in turns]
    if block:
        first = next(m for m in found if m["role"] == "user")
        first["content"] += "\n\n" + block
    return found


def unsupervised_answers(examples: Iterable[Example]) -> int:
    """Answers that carry no loss here, which the messages layout of other trainers cannot say."""
    return sum(t.role == "assistant" and not t.supervised for e in examples for t in turns_of(e))


def by_id(selection: Selection, name: str) -> dict[str, Any]:
    """id -> value of one of the selection's arrays; empty where the method has none."""
    values = getattr(selection, name)
    return {} if values is None else dict(zip(selection.ids, values.tolist(), strict=True))


def dataset_columns(examples: Sequence[Example], selection: Selection) -> dict[str, list[Any]]:
    """Columns of the `datasets` table. cluster and distance are null for methods without clusters; weight is then 1."""
    clusters, weights, distances = (by_id(selection, n) for n in ("clusters", "weights", "distances"))
    return {
        "id": [e.id for e in examples],
        "prompt": [e.prompt for e in examples],
        "input": [normalise_input(e.input) for e in examples],
        "response": [e.response for e in examples],
        "messages": [messages(e) for e in examples],
        "cluster": [clusters.get(e.id) for e in examples],
        "weight": [weights.get(e.id, 1.0) for e in examples],
        "distance": [distances.get(e.id) for e in examples],
        "file": [e.source for e in examples],
        "line": [e.line for e in examples],
    }


def pool_table(examples: Sequence[Example], selection: Selection, labels: Mapping[str, int] | None) -> pa.Table:
    """Every row that could be chosen, in source order, with `kept`.

    labels  cluster of every usable row; None for methods without clusters
    weight  null for rows that were not kept. Raises DataError if labels contradict the selection's own clusters.
    """
    clusters = by_id(selection, "clusters")
    wrong = [i for i, c in clusters.items() if labels is not None and labels[i] != c]
    if wrong:
        raise DataError(
            f"row {wrong[0]} is in cluster {clusters[wrong[0]]} of the selection and in another one now; select again"
        )
    kept, weights, distances = set(selection.ids), by_id(selection, "weights"), by_id(selection, "distances")
    scores: Mapping[str, float] = selection.scores if clusters else {}
    columns = {
        "id": [e.id for e in examples],
        "file": [e.source for e in examples],
        "line": [e.line for e in examples],
        "cluster": [(labels or {}).get(e.id) for e in examples],
        "distance": [distances.get(e.id, scores.get(e.id)) for e in examples],
        "weight": [weights.get(e.id, 1.0) if e.id in kept else None for e in examples],
        "kept": [e.id in kept for e in examples],
    }
    return pa.table(columns, schema=POOL_SCHEMA)
