"""Sources to pools: the one way in which rows enter the project.

In: a `DataConfig` (hub data set, local files, the pool harvested from the standard library, the small medical pool). Out:
`Pools`, the rows to choose from and the held-out rows, plus a report of everything that was read, kept and set aside.

    files / hub / stdlib ► raw rows ► formats.parse_row ► ids by content ► held-out split by hash ► max_rows by hash ► Pools

Ids and both splits depend on content alone, so a permuted file gives the same pools. Rows with the same prompt land on the same
side of the split: otherwise the held-out loss would measure memory. Nothing here imports torch.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path
from typing import Any

from clusterft.conversation import Refusal
from clusterft.formats import FORMATS, Draft, Format, parse_row, recognise, resolve_format, vote
from clusterft.load_report import FileReport, LineIndex, LoadReport
from clusterft.records import Example, Pool, Rejection, content_id
from clusterft.source_paths import expand_paths, expand_with_notes
from clusterft.sources import DataError, RawRow, read_rows
from clusterft.tabular import separator_notes
from clusterft.text_rules import is_placeholder

__all__ = ["Pools", "expand_paths", "group_of", "layouts", "load_pool", "refuse_rejected"]

KINDS = ("hub", "files", "stdlib", "medical_smoke")
MEDICAL_POOL = Path(__file__).parent / "assets" / "medical_smoke_instruct.jsonl"
CountTokens = Callable[[Sequence[Example]], Sequence[int]]
_PEEK_ROWS = 64


@dataclass(frozen=True)
class Pools:
    """The rows to choose from, the rows held out for the loss after training, and what loading found."""

    train: Pool
    heldout: Pool
    report: LoadReport


def load_pool(
    cfg: Any, *, assets_dir: str | Path | None = None, strict: bool = False, count_tokens: CountTokens | None = None
) -> Pools:
    """Loads a source (config.DataConfig or its OmegaConf node).

    assets_dir  where the harvested standard-library pool is kept between runs; None: harvest anew
    strict      stop at the first row that would be set aside
    count_tokens  tokens of each of some examples (prompting.row_lengths with its tokenizer and template bound). With it,
                data.max_row_tokens is applied before the held-out split and max_rows, so that both get as many rows as
                they ask for; without it, the limit is left to prompting.encode_pool.

    Raises DataError (a ValueError) with one sentence: file absent or unreadable, unknown kind or layout, no usable row, a bad
    row in strict mode, more held-out rows than there are.
    """
    if cfg.kind not in KINDS:
        raise DataError(f"data.kind={cfg.kind!r} is unknown; known: {', '.join(KINDS)}")
    for option in ("max_rows", "holdout_rows"):
        value = getattr(cfg, option)
        if value is not None and value < (option == "max_rows"):
            raise DataError(
                f"data.{option} is {value}; expected {'at least 1, or null' if option == 'max_rows' else '0 or more'}"
            )
    collector = _Collector(cfg, strict)
    for source, kind, rows in _open_sources(cfg, assets_dir, collector.found):
        collector.read(source, kind, rows)
    if count_tokens is not None and cfg.max_row_tokens is not None:
        collector.drop_long_rows(count_tokens, cfg.max_row_tokens)
    return collector.finish()


def refuse_rejected(rejected: Sequence[Rejection]) -> None:
    """Strict mode: raises DataError for the first of these rows that is bad, not merely over a limit that was asked for."""
    one = next((r for r in rejected if r.reason != "over_row_limit"), None)
    if one is not None:
        raise DataError(
            f"{one.source} line {one.line}: {one.reason} ({one.detail}); mend or remove the row, or leave strict mode"
        )


def _open_sources(cfg: Any, assets_dir: str | Path | None, notes: list[str]) -> Iterator[tuple[str, str, Iterator[RawRow]]]:
    if cfg.kind == "hub":
        from clusterft.hub import hub_rows

        yield str(cfg.path), "hub", hub_rows(cfg)
    elif cfg.kind == "stdlib":
        yield from _stdlib_sources(assets_dir)
    else:
        files, unread = ([MEDICAL_POOL], ()) if cfg.kind == "medical_smoke" else expand_with_notes(cfg.path)
        notes += unread
        for path in files:
            kind, rows = read_rows(path)
            if kind == "csv":
                notes += separator_notes(path)
            yield str(path), kind, rows


def _stdlib_sources(assets_dir: str | Path | None) -> Iterator[tuple[str, str, Iterator[RawRow]]]:
    from clusterft.harvest import stdlib_rows

    rows = stdlib_rows(Path(assets_dir) / "stdlib_instruct" if assets_dir is not None else None)
    by_file: dict[str, list[RawRow]] = {}
    for row in rows:
        value = {"instruction": row.prompt, "output": row.response, "group": row.group, "qualname": row.qualname}
        by_file.setdefault(row.source, []).append(RawRow(row.line, value))
    for source, raws in by_file.items():
        yield source, "stdlib", iter(raws)


class _Collector:
    """Gathers examples and counts over all sources."""

    def __init__(self, cfg: Any, strict: bool) -> None:
        self.cfg, self.strict = cfg, strict
        try:
            self.layout = resolve_format(cfg.file_format, dict(cfg.fields))
        except ValueError as error:
            raise DataError(str(error)) from error
        self.examples: list[Example] = []
        self.rejected: list[Rejection] = []
        self.files: list[FileReport] = []
        self.index: dict[str, LineIndex] = {}
        self.first: dict[str, int] = {}  # content id -> position of its first example
        self.copies: dict[str, int] = {}
        self.duplicate_lines: list[tuple[tuple[str, int], tuple[str, int]]] = []
        self.noted: dict[str, list[tuple[str, int]]] = {}
        self.found: list[str] = []  # notes of those who opened the sources

    def read(self, source: str, kind: str, rows: Iterator[RawRow]) -> None:
        head = list(islice(rows, _PEEK_ROWS))
        usual = None if self.layout else vote([r.value for r in head])
        formats: dict[str, int] = {}
        index = self.index.setdefault(source, LineIndex())
        prefix = self.cfg.instruction_prefix  # read once: a configuration node answers a hundred times slower than a local name
        count, kept, last, nth = 0, len(self.examples), 0, 0
        for raw in chain(head, rows):
            count += 1
            last, nth = raw.line, nth + 1 if raw.line == last else 0
            if raw.offset >= 0:
                index.add(raw.line, raw.offset, raw.size)
            layout = self.layout or FORMATS.get(recognise(raw.value) or usual or "alpaca")
            assert layout is not None
            draft = raw.refusal or parse_row(raw.value, layout, prefix)
            if isinstance(draft, Refusal):
                self._reject(source, raw.line, draft)
                continue
            formats[layout.name] = formats.get(layout.name, 0) + 1
            key = self._keep(source, raw.line, draft)
            if nth:
                index.nth[key] = nth
        self.files.append(FileReport(source, kind, count, len(self.examples) - kept, formats))

    def _reject(self, source: str, line: int, refusal: Refusal) -> None:
        rejection = Rejection(source, line, *refusal)
        if self.strict:
            refuse_rejected([rejection])
        self.rejected.append(rejection)

    def _keep(self, source: str, line: int, draft: Draft) -> str:
        key = content_id(draft.prompt, draft.response, draft.input, draft.turns)
        first = self.first.setdefault(key, len(self.examples))
        if first < len(self.examples):
            self.copies[key] = self.copies.get(key, 1) + 1
            earlier = self.examples[first]
            if len(self.duplicate_lines) < 20:
                self.duplicate_lines.append(((source, line), (earlier.source, earlier.line)))
            key = f"{key}-{self.copies[key]}"
        if is_placeholder(draft.response):
            self.noted.setdefault("placeholder_response", []).append((source, line))
        self.examples.append(Example(key, draft.prompt, draft.response, draft.input, source, line, draft.turns, draft.meta))
        return key

    def drop_long_rows(self, count_tokens: CountTokens, limit: int) -> None:
        kept: list[Example] = []
        for example, tokens in zip(self.examples, count_tokens(self.examples), strict=True):
            if tokens <= limit:
                kept.append(example)
                continue
            detail = f"{tokens} tokens, data.max_row_tokens is {limit}"
            self.rejected.append(Rejection(example.source, example.line, "over_row_limit", detail))
        self.examples = kept

    def finish(self) -> Pools:
        if not self.examples:
            raise DataError(self._nothing_left())
        held, over = _split(self.examples, self.cfg.holdout_rows, self.cfg.max_rows, self.cfg.name)
        train = tuple(e for e in self.examples if e.id not in held and e.id not in over)
        heldout = tuple(e for e in self.examples if e.id in held)
        report = LoadReport(
            name=self.cfg.name,
            files=tuple(self.files),
            rejected=tuple(self.rejected),
            rows_kept=len(self.examples),
            duplicates=sum(self.copies.values()) - len(self.copies),
            duplicate_groups=len(self.copies),
            duplicate_lines=tuple(self.duplicate_lines),
            supervised_turns=sum(sum(t.supervised for t in e.turns) or 1 for e in self.examples),
            noted={k: tuple(v) for k, v in self.noted.items()},
            train_rows=len(train),
            heldout_rows=len(heldout),
            rows_over_max=len(over),
            detected=self.layout is None,
            notes=tuple(self._notes()),
            index=self.index,
        )
        return Pools(Pool(self.cfg.name, train, tuple(self.rejected)), Pool(f"{self.cfg.name}/heldout", heldout), report)

    def _notes(self) -> Iterator[str]:
        yield from self.found
        read = sum(f.rows_read for f in self.files)
        if self.cfg.expected_rows is not None and read != self.cfg.expected_rows:
            yield f"{read:,} rows were read, expected are {self.cfg.expected_rows:,}: the data set may have changed"
        field = self.cfg.group_field
        lacking = sum(field not in e.meta for e in self.examples) if field else 0
        if lacking:
            yield f"{lacking:,} rows have no short field {field!r} (data.group_field)"

    def _nothing_left(self) -> str:
        names = ", ".join(f.source for f in self.files)
        if not self.rejected:
            return f"{names}: no rows at all"
        reasons: dict[str, int] = {}
        for one in self.rejected:
            reasons[one.reason] = reasons.get(one.reason, 0) + 1
        first = self.rejected[0]
        counted = ", ".join(f"{count:,} x {reason}" for reason, count in sorted(reasons.items(), key=lambda i: -i[1])[:4])
        columns = "; if the columns have other names, set data.fields.prompt and data.fields.response"
        hint = columns if any(r.startswith(("missing", "no_turns")) for r in reasons) else ""
        found = f"{counted}; first: {first.source} line {first.line}, {first.detail}"
        return f"{names}: none of the {len(self.rejected):,} rows can be used ({found}){hint}"


def _split(examples: list[Example], holdout_rows: int, max_rows: int | None, name: str) -> tuple[set[str], set[str]]:
    """Ids held out, and ids beyond `max_rows`. Held out first, so that the held-out rows do not depend on max_rows."""
    if holdout_rows >= len(examples):
        raise DataError(f"data.holdout_rows is {holdout_rows}, but {name!r} has only {len(examples)} usable rows; lower it")
    held: set[str] = set()
    if holdout_rows:
        groups: dict[str, list[str]] = {}
        for example in examples:
            groups.setdefault(_hash("holdout", _prompt_key(example)), []).append(example.id)
        for key in sorted(groups):
            if len(held) + len(groups[key]) <= holdout_rows:  # rows of one prompt stay together
                held.update(groups[key])
            if len(held) == holdout_rows:
                break
    rest = [e.id for e in examples if e.id not in held]
    if max_rows is None or len(rest) <= max_rows:
        return held, set()
    return held, set(sorted(rest, key=lambda one: _hash("max_rows", one))[max_rows:])


def _prompt_key(example: Example) -> str:
    first = next((t.text for t in example.turns if t.role == "user"), example.prompt)
    return content_id(first, "", "" if example.turns else example.input)


def _hash(purpose: str, text: str) -> str:
    return hashlib.sha256(f"{purpose}\x1f{text}".encode()).hexdigest()


def group_of(example: Example, group_field: str | None) -> str:
    """The family of a row for macro averages; "all" without a group field, "(none)" where the row lacks it."""
    return "all" if group_field is None else str(example.meta.get(group_field, "(none)"))


def layouts() -> Iterable[Format]:
    """The known column layouts."""
    return FORMATS.values()
