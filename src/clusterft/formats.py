"""One parsed row to prompt, input and answer: the column layouts that are known, how they are recognised, what is refused.

In: a mapping with whatever columns a file has. Out: a `Draft` (text that training needs, small extra fields in `meta`) or a
`Refusal` whose reason can be counted. Columns that training does not use may hold anything.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NamedTuple

from clusterft.conversation import Refusal, conversation_turns
from clusterft.records import Turn
from clusterft.text_rules import has_lone_surrogate, is_empty, normalise_input, printable

NO_META: Mapping[str, Any] = MappingProxyType({})
META_TEXT_CHARS = 200
"""Longer texts in unused columns are not carried along: a pool of a million rows has to fit into memory."""


@dataclass(frozen=True)
class Format:
    """A column layout: which column holds what. `turns` is set for conversations, the others for single exchanges."""

    name: str
    prompt: str = ""
    response: str = ""
    input: str | None = None
    turns: tuple[str, ...] = ()

    @property
    def columns(self) -> frozenset[str]:
        named = (self.prompt, self.response, self.input, *self.turns, *(("system",) if self.turns else ()))
        return frozenset(c for c in named if c)


_TURNS = ("conversations", "messages")
FORMATS: dict[str, Format] = {
    f.name: f
    for f in (
        Format("alpaca", "instruction", "output", "input"),
        Format("instruction_response", "instruction", "response", "input"),
        Format("problem_solution", "problem", "solution"),
        Format("sharegpt", turns=_TURNS),
        Format("messages", turns=_TURNS[::-1]),
    )
}


class Draft(NamedTuple):
    """The text of a good row, before it gets an id."""

    prompt: str
    response: str
    input: str = ""
    turns: tuple[Turn, ...] = ()
    meta: Mapping[str, Any] = NO_META


def resolve_format(file_format: str, fields: Mapping[str, str]) -> Format | None:
    """The layout that the configuration asks for; None means: recognise it row by row.

    `fields` (prompt, response, input, turns -> column) overrides the layout's own columns.
    Raises ValueError for an unknown layout or field name.
    """
    if file_format != "auto" and file_format not in FORMATS:
        raise ValueError(f"data.file_format={file_format!r} is unknown; known: auto, {', '.join(FORMATS)}")
    unknown = set(fields) - {"prompt", "response", "input", "turns"}
    if unknown:
        raise ValueError(f"data.fields names {', '.join(sorted(unknown))}; known: prompt, response, input, turns")
    base = None if file_format == "auto" else FORMATS[file_format]
    if not fields:
        return base
    if "turns" in fields:
        return Format("fields", turns=(fields["turns"],))
    if base is not None and base.turns:
        raise ValueError(f"data.file_format={file_format} is a conversation: data.fields may only name turns")
    known = {"prompt": base.prompt, "response": base.response, "input": base.input} if base else {}
    columns = {**known, **fields}
    missing = {"prompt", "response"} - set(columns)
    if missing:
        raise ValueError(f"data.fields lacks {', '.join(sorted(missing))} (or name a data.file_format that has it)")
    return Format("fields", columns["prompt"], columns["response"], columns.get("input"))


def recognise(row: Any) -> str | None:
    """The name of the layout that this row's columns point to, or None.

    Columns without a value count only where no other tells: a table that joins several layouts writes null under the others' names.
    """
    if not isinstance(row, Mapping):
        return None
    return _layout_of({k for k, v in row.items() if v is not None}) or _layout_of(row.keys())


def _layout_of(columns: Set[Any]) -> str | None:
    for column, name in (("conversations", "sharegpt"), ("messages", "messages")):
        if column in columns:
            return name
    if "problem" in columns and "solution" in columns:
        return "problem_solution"
    if "instruction" in columns and "response" in columns and "output" not in columns:
        return "instruction_response"
    return "alpaca" if "instruction" in columns or "output" in columns else None


def vote(rows: Sequence[Any]) -> str | None:
    """The layout of most of these rows, for rows that do not show their own; ties go to the first in FORMATS."""
    names = [n for n in map(recognise, rows) if n]
    return max(FORMATS, key=names.count) if names else None


def parse_row(row: Any, layout: Format, instruction_prefix: str = "") -> Draft | Refusal:
    """Text of one row, or why it is refused."""
    if not isinstance(row, Mapping):
        return Refusal("not_an_object", f"the row is a {type(row).__name__}")
    conflicting = getattr(row, "conflicting", frozenset()) & layout.columns
    if conflicting:
        return Refusal("duplicate_key", f"{', '.join(sorted(conflicting))} occurs twice with different values")
    draft = _parse_turns(row, layout, instruction_prefix) if layout.turns else _parse_pair(row, layout, instruction_prefix)
    if isinstance(draft, Refusal):
        return draft
    texts = [draft.prompt, draft.response, draft.input, *(t.text for t in draft.turns)]
    if any(map(has_lone_surrogate, texts)):
        return Refusal("lone_surrogate", "half of a UTF-16 pair, as in \\ud83d without its second half; no tokenizer takes it")
    return draft._replace(meta=_small_fields(row, layout.columns))


def _parse_pair(row: Mapping[str, Any], layout: Format, prefix: str) -> Draft | Refusal:
    for column, word in ((layout.prompt, "instruction"), (layout.response, "response")):
        if column not in row:
            return Refusal(f"missing_{word}", f"no column {column!r}; the row has {_names(row)}")
        problem = _text_problem(row[column], word)
        if problem:
            return problem
    raw = row.get(layout.input) if layout.input else None
    if raw is None or raw != raw:  # NaN is how data frames write null
        raw = ""
    if not isinstance(raw, str):
        return Refusal("non_string_input", f"{layout.input!r} is {type(raw).__name__}")
    return Draft(prefix + row[layout.prompt], row[layout.response], normalise_input(raw))


def _text_problem(value: Any, word: str) -> Refusal | None:
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return Refusal(f"null_{word}", f"the {word} is null")
    if not isinstance(value, str):
        return Refusal(f"non_string_{word}", f"the {word} is {type(value).__name__}")
    return Refusal(f"empty_{word}", f"the {word} has no visible character") if is_empty(value) else None


def _parse_turns(row: Mapping[str, Any], layout: Format, prefix: str) -> Draft | Refusal:
    present = [c for c in layout.turns if c in row]
    column = next((c for c in present if row[c] is not None), present[0] if present else None)
    if column is None:
        return Refusal("no_turns", f"no column {' or '.join(layout.turns)}; the row has {_names(row)}")
    turns = conversation_turns(row[column], row.get("system"))
    if isinstance(turns, Refusal):
        return turns
    if prefix:
        first = next(i for i, t in enumerate(turns) if t.role == "user")
        turns = (*turns[:first], Turn("user", prefix + turns[first].text), *turns[first + 1 :])
    if [t.role for t in turns] == ["user", "assistant"]:
        return Draft(turns[0].text, turns[1].text)
    question = next(t.text for t in reversed(turns) if t.role == "user")
    return Draft(question, turns[-1].text, turns=turns)


def _small_fields(row: Mapping[str, Any], used: frozenset[str]) -> Mapping[str, Any]:
    meta = {
        sys.intern(k): sys.intern(v) if type(v) is str else v
        for k, v in row.items()
        if k not in used and isinstance(k, str) and _is_small(v)
    }
    return MappingProxyType(meta) if meta else NO_META


def _is_small(value: Any) -> bool:
    if isinstance(value, str):
        return len(value) <= META_TEXT_CHARS and not has_lone_surrogate(value)
    return isinstance(value, bool | int) or (isinstance(value, float) and math.isfinite(value))


def _names(row: Mapping[str, Any]) -> str:
    return ", ".join(printable(str(k)[:30]) for k in list(row)[:8]) or "no columns"
