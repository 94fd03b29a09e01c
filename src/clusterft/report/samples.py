"""Rows that a report shows, as excerpts with their place.

In: positions in the pool. Out: `Sample`s, spread over the distances (or scores) from the lowest to the highest, so that one sees the
middle of a cluster as well as its rim; where a method has neither, by the hash of the ids.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from clusterft.records import Encoded, Example, Pool, Selection
from clusterft.report.facts import Part, Place, Sample
from clusterft.report.map2d import by_hash
from clusterft.report.text import excerpt, short_names


class Sampler:
    """Makes `Sample`s of one selection's pool."""

    def __init__(self, pool: Pool, encoded: Sequence[Encoded], selection: Selection, losses: np.ndarray | None) -> None:
        self.pool, self.encoded, self.losses = pool, encoded, losses
        self.names = short_names(e.source for e in pool.examples)
        distances = selection.distances if selection.distances is not None else ()
        self.values = dict(selection.scores) | dict(zip(selection.ids, map(float, distances), strict=False))

    def spread(self, positions: np.ndarray, count: int) -> tuple[Sample, ...]:
        """Up to `count` rows: lowest, highest and evenly between. positions (m,) int."""
        ids = [self.pool.examples[i].id for i in positions.tolist()]
        if all(i in self.values for i in ids):
            order = np.array(sorted(range(len(ids)), key=lambda j: (self.values[ids[j]], ids[j])), dtype=np.int64)
        else:
            order = by_hash(ids, len(ids))
        take = np.unique(np.linspace(0, len(order) - 1, min(count, len(order))).round().astype(np.int64)) if len(order) else order
        return tuple(self.one(int(positions[j])) for j in order[take])

    def one(self, position: int) -> Sample:
        example, encoded = self.pool.examples[position], self.encoded[position]
        loss = None if self.losses is None or not np.isfinite(self.losses[position]) else float(self.losses[position])
        return Sample(
            id=example.id,
            place=Place(self.names[example.source], example.line),
            tokens=len(encoded),
            answer_tokens=encoded.n_target,
            value=self.values.get(example.id),
            loss=loss,
            parts=parts_of(example),
        )


def parts_of(example: Example) -> tuple[Part, ...]:
    """Instruction, input and answer, or the turns of a conversation (first two and last two of a long one)."""
    if example.turns:
        texts = [(t.role, t.text) for t in example.turns]
        if len(texts) > 4:
            texts = [*texts[:2], ("", f"({len(texts) - 4} further turns)"), *texts[-2:]]
    else:
        texts = [("instruction", example.prompt), ("input", example.input), ("answer", example.response)]
    return tuple(Part(label, *excerpt(text)) for label, text in texts if text.strip())
