"""Greedy generation: batched, left-padded, with a key-value cache; each row stops for itself and leaves the batch.

In go token ids of prompts and a rule for stopping; out come texts, one callback a finished prompt, so that the caller can
write each down at once. In float32 the text of a prompt does not depend on the batch it was in: padding is masked and
positions count from the first real token. In bfloat16 rounding depends on it, and where two logits are almost equal the text too; so
batches are always cut from all prompts, also when most of them are done: a resumed run asks what an uninterrupted one asks.
Randomness plays no part: the largest logit wins.

Text is decoded as a difference (prompt tail with and without the new tokens): decoding the new tokens alone would lose the
leading space that SentencePiece tokenizers drop, and with it the indentation of Python code.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from eval.errors import EvaluationError

_TAIL = 16
"""Prompt tokens that are decoded together with the new ones."""


@dataclass(frozen=True)
class Prompt:
    """One prompt: its name and its token ids."""

    id: str
    ids: Sequence[int]


@dataclass(frozen=True)
class Generated:
    """What came: text up to the stop string (excluded), number of new tokens, and why it ended: stop, eos or length."""

    id: str
    text: str
    n_tokens: int
    finish: str


@dataclass
class _Row:
    prompt: Prompt
    new: list[int] = field(default_factory=list)


class Generator:
    """Greedy decoding with one model.

    max_new_tokens  at most so many new tokens a prompt
    batch_size      prompts at once
    stops           strings; a text ends before the first that occurs

    Raises EvaluationError for a prompt that leaves no room for max_new_tokens within the model's positions.
    """

    def __init__(self, model: Any, tokenizer: Any, *, max_new_tokens: int, batch_size: int, stops: Sequence[str]) -> None:
        if max_new_tokens < 1 or batch_size < 1:
            raise EvaluationError(f"max_new_tokens {max_new_tokens} and batch_size {batch_size} must be at least 1")
        self.model, self.tokenizer = model, tokenizer
        self.max_new_tokens, self.batch_size, self.stops = max_new_tokens, batch_size, tuple(stops)
        known = inspect.signature(model.forward).parameters
        self._cache_name = "cache" if "cache" in known else "past_key_values"  # renamed in transformers 5
        self.device = next(model.parameters()).device
        self.eos = _eos_ids(model, tokenizer)
        self.pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else 0

    def run(self, prompts: Sequence[Prompt], on_done: Callable[[Generated], None], done: Collection[str] = ()) -> None:
        """Generates, longest prompts first; `on_done` is called as soon as a prompt is finished that is not among the ids `done`.

        A batch with all of its prompts in `done` is skipped; in one with some, those are left out in float32 and generated again
        for the sake of the others' rounding in any other number format.
        """
        limit = getattr(self.model.config, "max_position_embeddings", None)
        for prompt in prompts:
            if not prompt.ids:
                raise EvaluationError(f"{prompt.id}: the prompt is empty")
            if limit is not None and len(prompt.ids) + self.max_new_tokens > limit:
                raise EvaluationError(
                    f"{prompt.id}: {len(prompt.ids)} prompt tokens and {self.max_new_tokens} new ones exceed the model's {limit} "
                    "positions; lower max_new_tokens"
                )
        ordered = sorted(prompts, key=lambda p: (-len(p.ids), p.id))
        exact = next(self.model.parameters()).dtype == torch.float32
        for start in range(0, len(ordered), self.batch_size):
            batch = ordered[start : start + self.batch_size]
            missing = [p for p in batch if p.id not in done]
            for generated in self._batch(missing if exact else batch) if missing else ():
                if generated.id not in done:
                    on_done(generated)

    @torch.inference_mode()
    def _batch(self, prompts: Sequence[Prompt]) -> Iterator[Generated]:
        from transformers import DynamicCache

        rows = [_Row(p) for p in prompts]
        ids, mask = self._left_padded(prompts)
        positions = (mask.cumsum(1) - 1).clamp(min=0)
        cache = DynamicCache(config=self.model.config)
        extra = {self._cache_name: cache, "use_cache": True, "logits_to_keep": 1}
        for step in range(self.max_new_tokens):
            out = self.model(input_ids=ids, attention_mask=mask, position_ids=positions, **extra)
            chosen = self._choose(rows, out.logits[:, -1])
            finished = [self._advance(row, token, step) for row, token in zip(rows, chosen.tolist(), strict=True)]
            yield from (done for done in finished if done is not None)
            alive = [i for i, done in enumerate(finished) if done is None]
            if not alive:
                return
            if len(alive) < len(rows):
                index = torch.tensor(alive, device=self.device)
                cache.batch_select_indices(index)
                rows, mask, positions, chosen = [rows[i] for i in alive], mask[index], positions[index], chosen[index]
            ids = chosen[:, None]
            mask = torch.cat([mask, mask.new_ones(len(rows), 1)], 1)
            positions = positions[:, -1:] + 1

    def _choose(self, rows: Sequence[_Row], logits: torch.Tensor) -> torch.Tensor:
        """(b, v) -> (b,) ids of the largest logits. Raises EvaluationError if one is not finite."""
        finite = torch.isfinite(logits).all(-1)
        if not finite.all():
            bad = rows[int((~finite).nonzero()[0, 0])].prompt.id
            raise EvaluationError(f"{bad}: the model's logits are not finite; it has diverged, so there is nothing to score")
        return logits.float().argmax(-1)

    def _left_padded(self, prompts: Sequence[Prompt]) -> tuple[torch.Tensor, torch.Tensor]:
        """(b, t) ids and mask, t the longest prompt."""
        width = max(len(p.ids) for p in prompts)
        ids = torch.full((len(prompts), width), self.pad, dtype=torch.long)
        mask = torch.zeros((len(prompts), width), dtype=torch.long)
        for i, prompt in enumerate(prompts):
            ids[i, width - len(prompt.ids) :] = torch.as_tensor(list(prompt.ids))
            mask[i, width - len(prompt.ids) :] = 1
        return ids.to(self.device), mask.to(self.device)

    def _advance(self, row: _Row, token: int, step: int) -> Generated | None:
        """Takes one token; the finished text if this ends the row, else None."""
        if token in self.eos:
            return Generated(row.prompt.id, self.text(row.prompt.ids, row.new), len(row.new), "eos")
        row.new.append(token)
        text = self.text(row.prompt.ids, row.new)
        found = [p for s in self.stops if (p := text.find(s)) >= 0]
        if found:
            return Generated(row.prompt.id, text[: min(found)], len(row.new), "stop")
        if step + 1 == self.max_new_tokens:
            return Generated(row.prompt.id, text, len(row.new), "length")
        return None

    def text(self, prompt_ids: Sequence[int], new_ids: Sequence[int]) -> str:
        """The text of `new_ids` as it continues the prompt."""
        tail = list(prompt_ids[-_TAIL:])
        before = self._decode(tail)
        both = self._decode(tail + list(new_ids))
        return both[len(before) :] if both.startswith(before) else self._decode(new_ids)

    def _decode(self, ids: Sequence[int]) -> str:
        return self.tokenizer.decode(list(ids), skip_special_tokens=True, clean_up_tokenization_spaces=False)


def _eos_ids(model: Any, tokenizer: Any) -> frozenset[int]:
    """Every id that ends a text: the tokenizer's and the generation settings' own."""
    ids: set[int] = set()
    configured = getattr(getattr(model, "generation_config", None), "eos_token_id", None)
    for value in (tokenizer.eos_token_id, configured):
        if value is not None:
            ids |= set(value) if isinstance(value, list | tuple) else {value}
    return frozenset(ids)
