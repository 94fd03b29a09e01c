"""Examples to tokens: the one code path of selectors, trainer and evaluation.

In: examples, a tokenizer, a template's name, a maximum length in tokens. Out: `Encoded` rows (input ids, labels with IGNORE_INDEX
on everything but answers), padded batches (`clusterft.collate`), and generation prompts with the ids that training saw.

    runs of text (templates) ► ids, each run on its own ► exactly one BOS ► labels ► cut on the right at max_length

BOS: one in front where the tokenizer has a BOS token (chat: where its template writes it or it adds it by itself), never two.
EOS: after every answer, with loss. Special tokens that occur inside a text are kept as they are;
`tokenizer_report` counts them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

import numpy as np

from clusterft.collate import collate, pad_id_of
from clusterft.records import IGNORE_INDEX, Encoded, Example, Pool, Rejection, Turn
from clusterft.templates import TEMPLATES, Run, runs

__all__ = [
    "TEMPLATES",
    "EncodeReport",
    "collate",
    "encode_example",
    "encode_pool",
    "encode_pool_with_report",
    "generation_prompt",
    "pad_id_of",
    "row_lengths",
    "tokenizer_report",
]

_CHUNK_ROWS = 256


@dataclass(frozen=True)
class EncodeReport:
    """What encoding found. Token counts are before truncation unless said.

    longest           (source, line, tokens) of the longest row
    answers_cut       rows whose answer lost tokens at max_length
    prompt_tokens     context tokens over all rows that were kept, after truncation
    target_tokens     supervised tokens over all rows that were kept, after truncation
    """

    rows: int
    kept: int
    longest: tuple[str, int, int]
    answers_cut: int
    prompt_tokens: int
    target_tokens: int
    max_length: int
    tokenizer_line: str

    def lines(self) -> list[str]:
        source, line, tokens = self.longest
        total = max(1, self.prompt_tokens + self.target_tokens)
        return [
            self.tokenizer_line,
            f"longest row: {source} line {line}, {tokens:,} tokens before truncation at {self.max_length:,}",
            f"{self.kept:,} of {self.rows:,} rows have something to learn; {self.answers_cut:,} answers are cut; "
            f"{self.target_tokens:,} supervised tokens, prompts are {self.prompt_tokens / total:.0%} of all",
        ]


@dataclass(frozen=True)
class _Row:
    """One example in tokens, whole: ids (t,) and labels (t,) int32 before truncation."""

    ids: np.ndarray
    labels: np.ndarray


def encode_example(example: Example, tokenizer: Any, template: str, max_length: int) -> Encoded:
    """One example as tokens, cut on the right at `max_length` tokens.

    Raises ValueError for an unknown template, max_length < 2, or a tokenizer that has no EOS token.
    """
    _check(tokenizer, template, max_length)
    return _cut(example.id, next(_rows([example], tokenizer, template)), max_length)


def encode_pool(
    pool: Pool, tokenizer: Any, template: str, max_length: int, *, max_row_tokens: int | None = None
) -> tuple[Pool, tuple[Encoded, ...]]:
    """A pool as tokens, rows aligned with `pool.examples` of the returned pool.

    Rows without a target token within `max_length` are set aside as `no_target_tokens` (with the length at which they fit), rows
    of more than `max_row_tokens` tokens as `over_row_limit`. An empty pool (no held-out rows) stays empty.
    Raises ValueError if there were rows and none is left, or as `encode_example` does.
    """
    kept, encoded, _ = encode_pool_with_report(pool, tokenizer, template, max_length, max_row_tokens=max_row_tokens)
    return kept, encoded


def encode_pool_with_report(
    pool: Pool, tokenizer: Any, template: str, max_length: int, *, max_row_tokens: int | None = None
) -> tuple[Pool, tuple[Encoded, ...], EncodeReport]:
    """`encode_pool` with the numbers that a start-up summary shows."""
    _check(tokenizer, template, max_length)
    kept: list[Example] = []
    encoded: list[Encoded] = []
    rejected: list[Rejection] = []
    longest, answers_cut = ("", 0, 0), 0
    for example, row in zip(pool.examples, _rows(pool.examples, tokenizer, template), strict=True):
        if len(row.ids) > longest[2]:
            longest = (example.source, example.line, len(row.ids))
        refusal = _refusal(example, row, max_length, max_row_tokens)
        if refusal:
            rejected.append(refusal)
            continue
        one = _cut(example.id, row, max_length)
        answers_cut += one.truncated and bool((row.labels[max_length:] != IGNORE_INDEX).any())
        kept.append(example)
        encoded.append(one)
    if rejected and not kept:
        raise ValueError(_nothing_left(pool, rejected, max_length))
    targets = sum(e.n_target for e in encoded)
    line = tokenizer_report(tokenizer, encoded, template=template)
    report = EncodeReport(len(pool), len(kept), longest, answers_cut, sum(map(len, encoded)) - targets, targets, max_length, line)
    return replace(pool, examples=tuple(kept), rejected=(*pool.rejected, *rejected)), tuple(encoded), report


def row_lengths(examples: Sequence[Example], tokenizer: Any, template: str) -> list[int]:
    """Tokens of each example under a template, before truncation (what data.max_row_tokens limits)."""
    _check(tokenizer, template, 2)
    return [len(row.ids) for row in _rows(examples, tokenizer, template)]


def _refusal(example: Example, row: _Row, max_length: int, max_row_tokens: int | None) -> Rejection | None:
    if max_row_tokens is not None and len(row.ids) > max_row_tokens:
        return Rejection(
            example.source, example.line, "over_row_limit", f"{len(row.ids)} tokens, data.max_row_tokens is {max_row_tokens}"
        )
    if (row.labels[1:max_length] != IGNORE_INDEX).any():
        return None
    first = int(np.flatnonzero(row.labels != IGNORE_INDEX)[0])
    detail = f"the prompt takes {first} tokens; the first answer token needs max_length {first + 1}, the whole row {len(row.ids)}"
    return Rejection(example.source, example.line, "no_target_tokens", detail)


def _nothing_left(pool: Pool, rejected: Sequence[Rejection], max_length: int) -> str:
    first = rejected[0]
    return (
        f"pool {pool.name!r}: none of the {len(pool)} rows has an answer token within max_length {max_length} "
        f"(first: {first.source} line {first.line}: {first.reason}, {first.detail}); raise trainer.max_length"
    )


def generation_prompt(template: str, tokenizer: Any, prompt: str, input: str = "", prefill: str = "") -> list[int]:
    """Ids that a model is given to answer `prompt`: the ids of training up to the answer, then `prefill` as a run of its own.

    Where the tokenizer merges the end of `prefill` with what follows, training saw another last token: end it at a line break.
    """
    _check(tokenizer, template, 2)
    parts = runs(Example("", prompt, "x", input), template, tokenizer)
    texts = [r.text for r in parts if not r.target] + ([prefill] if prefill else [])
    ids = [i for part in _tokenise(texts, tokenizer) for i in part]
    return _with_bos(ids, tokenizer, template)


def tokenizer_report(tokenizer: Any, encoded: Sequence[Encoded], *, template: str = "") -> str:
    """One line for the start of a run: BOS per sample, EOS supervised, pad == eos, template, special tokens inside answers."""
    eos, bos = tokenizer.eos_token_id, tokenizer.bos_token_id
    counts = [_leading(e.input_ids, bos) for e in encoded] or [0]
    whole = [e for e in encoded if not e.truncated]
    ends = bool(whole) and all((e.labels[1:] == eos).any() for e in whole)
    inside = sum(_answer_ends_early(e.labels, eos) for e in encoded)
    span = f"{min(counts)} (min=max)" if min(counts) == max(counts) else f"{min(counts)} to {max(counts)}"
    return (
        f"tokenizer: BOS per sample = {span}; EOS supervised = {_yes(ends)}; pad==eos = {_yes(pad_id_of(tokenizer) == eos)}; "
        f"template = {template or 'not named'}, evaluation uses the same; EOS text inside {inside} answers (kept)"
    )


def _answer_ends_early(labels: np.ndarray, eos: int) -> bool:
    """True if an EOS label is followed by another label of the same answer."""
    return bool(((labels[:-1] == eos) & (labels[1:] != IGNORE_INDEX)).any())


def _leading(ids: np.ndarray, bos: int | None) -> int:
    if bos is None:
        return 0
    other = np.flatnonzero(ids != bos)
    return int(other[0]) if len(other) else len(ids)


def _yes(value: bool) -> str:
    return "yes" if value else "no"


def _check(tokenizer: Any, template: str, max_length: int) -> None:
    if template not in TEMPLATES:
        raise ValueError(f"template {template!r} is unknown; known: {', '.join(TEMPLATES)}")
    if max_length < 2:
        raise ValueError(f"max_length is {max_length}; expected at least 2 tokens")
    if tokenizer.eos_token_id is None:
        raise ValueError("the tokenizer has no EOS token, so no answer could ever end; set one in its tokenizer_config.json")


def _rows(examples: Sequence[Example], tokenizer: Any, template: str) -> Iterator[_Row]:
    """Token rows in order, tokenised a few hundred at a time; the grouping does not change any id."""
    for start in range(0, len(examples), _CHUNK_ROWS):
        chunk = examples[start : start + _CHUNK_ROWS]
        parts = [runs(e, template, tokenizer) for e in chunk]
        ids = iter(_tokenise([r.text for p in parts for r in p], tokenizer))
        for part in parts:
            yield _assemble(part, list(islice(ids, len(part))), tokenizer, template)


def _assemble(part: Sequence[Run], ids: Sequence[list[int]], tokenizer: Any, template: str) -> _Row:
    tokens: list[int] = []
    labels: list[int] = []
    for run, run_ids in zip(part, ids, strict=True):
        run_ids = [*run_ids, tokenizer.eos_token_id] if run.end else run_ids
        tokens += run_ids
        labels += run_ids if run.target else [IGNORE_INDEX] * len(run_ids)
    with_bos = _with_bos(tokens, tokenizer, template)
    shift = len(with_bos) - len(tokens)  # -1 where the template and a text both wrote BOS
    labels = [IGNORE_INDEX] * shift + labels if shift >= 0 else labels[-shift:]
    return _Row(np.asarray(with_bos, np.int32), np.asarray(labels, np.int32))


def _tokenise(texts: list[str], tokenizer: Any) -> list[list[int]]:
    if not texts:
        return []
    return tokenizer(texts, add_special_tokens=False, return_attention_mask=False, verbose=False)["input_ids"]


def _with_bos(ids: list[int], tokenizer: Any, template: str) -> list[int]:
    """Exactly one BOS in front, or none where the model has none."""
    bos = tokenizer.bos_token_id
    if bos is None:
        return ids
    while len(ids) > 1 and ids[0] == bos == ids[1]:
        ids = ids[1:]
    if ids and ids[0] == bos:
        return ids
    return [bos, *ids] if template != "chat" or _adds_bos(tokenizer) else ids


def _adds_bos(tokenizer: Any) -> bool:
    """True if the tokenizer puts BOS in front of plain text by itself."""
    return tokenizer("a", add_special_tokens=True)["input_ids"][:1] == [tokenizer.bos_token_id]


def _cut(id: str, row: _Row, max_length: int) -> Encoded:
    return Encoded(id, row.ids[:max_length].copy(), row.labels[:max_length].copy(), truncated=len(row.ids) > max_length)


def conversation_prompt(template: str, tokenizer: Any, turns: Sequence[Turn]) -> list[int]:
    """As `generation_prompt`, for a conversation that ends with a question.

    Raises ValueError if the last turn is not the user's.
    """
    if not turns or turns[-1].role != "user":
        raise ValueError("the conversation must end with a turn of the user")
    _check(tokenizer, template, 2)
    context = [replace(t, supervised=False) for t in turns]
    example = Example("", turns[-1].text, "x", turns=(*context, Turn("assistant", "x", True)))
    parts = [r.text for r in runs(example, template, tokenizer) if not r.target]
    return _with_bos([i for part in _tokenise(parts[:1], tokenizer) for i in part], tokenizer, template)
