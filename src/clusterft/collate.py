"""Rows of different length to one rectangular batch.

In: `Encoded` rows. Out: int64 tensors input_ids, attention_mask, labels (n, t).

The mask comes from lengths and never from ids: where pad = eos, comparing ids would hide the answers' real ends.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from clusterft.records import IGNORE_INDEX, Encoded


def pad_id_of(tokenizer: Any) -> int:
    """The id to pad with: the tokenizer's pad token, else EOS. No token is ever added, so the embedding keeps its size."""
    pad = tokenizer.eos_token_id if tokenizer.pad_token_id is None else tokenizer.pad_token_id
    if pad is None:
        raise ValueError("the tokenizer has neither a pad nor an EOS token; set one in its tokenizer_config.json")
    return int(pad)


def collate(
    rows: Sequence[Encoded], pad_id: int, *, side: str = "right", pad_to_multiple_of: int | None = None
) -> dict[str, torch.Tensor]:
    """A batch of n rows padded to the longest, t tokens, optionally rounded up to a multiple.

    Raises ValueError for no rows, an unknown side, or a multiple below 1.
    """
    if not rows:
        raise ValueError("an empty batch cannot be collated")
    if side not in ("right", "left"):
        raise ValueError(f"side is {side!r}; expected 'right' or 'left'")
    multiple = 1 if pad_to_multiple_of is None else pad_to_multiple_of
    if multiple < 1:
        raise ValueError(f"pad_to_multiple_of is {pad_to_multiple_of}; expected at least 1")
    width = -(-max(map(len, rows)) // multiple) * multiple
    shape = (len(rows), width)
    batch = {
        "input_ids": torch.full(shape, pad_id, dtype=torch.int64),
        "attention_mask": torch.zeros(shape, dtype=torch.int64),
        "labels": torch.full(shape, IGNORE_INDEX, dtype=torch.int64),
    }
    for i, row in enumerate(rows):
        place = slice(0, len(row)) if side == "right" else slice(width - len(row), width)
        batch["input_ids"][i, place] = torch.from_numpy(row.input_ids).long()
        batch["labels"][i, place] = torch.from_numpy(row.labels).long()
        batch["attention_mask"][i, place] = 1
    return batch
