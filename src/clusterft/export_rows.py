"""Chosen rows in the forms that trainers read: messages, a `datasets` table, the table of the whole pool.

In: examples and the selection. Out: columns; `export` decides where they go. Every text column is plain
data: nothing from a row ever becomes part of a file name.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import pyarrow as pa

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
