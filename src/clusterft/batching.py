"""Which samples share a forward pass: a plan over the whole pool, made from lengths alone.

In come lengths and a token budget; out come lists of row numbers, longest first. The plan does not depend on ranks, nor on the
order of the pool: whole batches are dealt to ranks, so every row is computed in the same company everywhere, to the last bit.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from clusterft.records import IGNORE_INDEX, Encoded

LAYOUTS = ("packed", "right", "left")
"""packed: no padding at all; right, left: padded on that side, with lengths (never pad ids) saying what is padding."""

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class TokenRow:
    """What a forward pass needs of one sample.

    input_ids  (t,) int64, cut after the last token that predicts anything
    places     (r,) int64, positions whose hidden state predicts a response token
    targets    (r,) int64, the tokens predicted there
    """

    input_ids: np.ndarray
    places: np.ndarray
    targets: np.ndarray

    def __len__(self) -> int:
        return len(self.input_ids)


def row_of_labels(input_ids: np.ndarray, labels: np.ndarray) -> TokenRow:
    """From unshifted labels (t,). The token at position 0 is predicted by nothing and never counts."""
    labelled = 1 + np.flatnonzero(np.asarray(labels)[1:] != IGNORE_INDEX)
    used = int(labelled[-1]) if len(labelled) else 0
    return TokenRow(
        np.asarray(input_ids[:used], np.int64), (labelled - 1).astype(np.int64), np.asarray(labels, np.int64)[labelled]
    )


def row_of_encoded(encoded: Encoded) -> TokenRow:
    return row_of_labels(encoded.input_ids, encoded.labels)


def row_of_pair(prompt_ids: Sequence[int], response_ids: Sequence[int]) -> TokenRow:
    """From a prompt without and a response with loss."""
    ids = np.concatenate([np.asarray(prompt_ids, np.int64), np.asarray(response_ids, np.int64)])
    labels = ids.copy()
    labels[: len(prompt_ids)] = IGNORE_INDEX
    return row_of_labels(ids, labels)


def shared_beginning(rows: Iterable[TokenRow]) -> int:
    """How many first tokens all rows have in common (a template's lead-in), short of every row's first prediction.

    Rows of no tokens do not count. 0 for fewer than two rows.
    """
    first: np.ndarray | None = None
    common = seen = 0
    for row in rows:
        if not len(row):
            continue
        seen += 1
        if first is None:
            first, common = row.input_ids, int(row.places[0])
            continue
        common = min(common, int(row.places[0]))
        differing = np.flatnonzero(first[:common] != row.input_ids[:common])
        common = int(differing[0]) if len(differing) else common
    return common if seen > 1 else 0


def plan_batches(lengths: Sequence[int], keys: Sequence, token_budget: int, layout: str = "packed") -> list[list[int]]:
    """Row numbers of each batch, longest rows first, ties by key; rows of length 0 are left out.

    A batch holds at most `token_budget` tokens, padding included; a row that is longer goes alone. Raises ValueError.
    """
    if layout not in LAYOUTS:
        raise ValueError(f"layout {layout!r} is not one of {', '.join(LAYOUTS)}")
    order = sorted((i for i, n in enumerate(lengths) if n > 0), key=lambda i: (-lengths[i], keys[i]))
    return _fill(order, lengths, token_budget, layout)


def _fill(order: Iterable[int], lengths: Sequence[int], token_budget: int, layout: str) -> list[list[int]]:
    if token_budget < 1:
        raise ValueError(f"the token budget must be at least 1, got {token_budget}")
    batches: list[list[int]] = []
    used = longest = 0
    for i in order:
        after = used + lengths[i] if layout == "packed" else (len(batches[-1]) + 1 if batches else 1) * max(longest, lengths[i])
        if not batches or after > token_budget:
            batches.append([])
            used, longest = 0, 0
        batches[-1].append(i)
        used, longest = used + lengths[i], max(longest, lengths[i])
    return batches


def is_out_of_memory(error: BaseException) -> bool:
    """Whether torch or Python ran out of memory, on any device."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and "can't allocate memory" in str(error)


def run_batches(
    batches: Sequence[list[int]],
    lengths: Sequence[int],
    token_budget: int,
    layout: str,
    step: Callable[[list[int]], None],
) -> int:
    """Calls `step` for each batch; where memory runs out, halves the budget, says so and goes on. Returns the budget at the end.

    Raises MemoryError if a single sample does not fit.
    """
    queue = list(batches)
    while queue:
        failure = None
        try:
            step(queue[0])
        except (torch.OutOfMemoryError, MemoryError, RuntimeError) as error:
            if not is_out_of_memory(error):
                raise
            failure = str(error).splitlines()[0]
        if failure is None:
            queue.pop(0)
            continue
        if len(queue[0]) == 1:
            raise MemoryError(
                f"one sample of {lengths[queue[0][0]]} tokens does not fit into memory ({failure}); lower max_length"
            )
        token_budget = max(1, min(token_budget, sum(lengths[i] for i in queue[0])) // 2)
        log.warning(
            "out of memory with %d samples in a batch (%s): going on with %d tokens", len(queue[0]), failure, token_budget
        )
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        queue = _fill([i for batch in queue for i in batch], lengths, token_budget, layout)
    return token_budget
