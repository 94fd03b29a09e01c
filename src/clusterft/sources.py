"""Files to raw rows, one at a time: JSON lines, JSON array, CSV and Parquet, plain or compressed with gzip or zstd.

In: a path. Out: an iterator of `RawRow` (1-based physical line, parsed value or the reason why there is none, and where the row's
bytes lie), so that nothing downstream opens a data file. The kind is told by content: magic bytes first, then the first
line; only CSV and TSV need their name. No schema is inferred, so shards may differ in any column.

Traps: `str.splitlines` would cut at U+2028 inside a JSON string; `json.loads` keeps the last of two equal keys without a word;
a gzip or zstd file that was cut off must not look like a shorter file.
"""

from __future__ import annotations

import gzip
import io
import json
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any, NamedTuple

from clusterft.conversation import Refusal


class DataError(ValueError):
    """Data cannot be used; the message is one sentence for a person, with file, line and remedy."""


_OTHER_ARCHIVES = (
    (b"PK\x03\x04", "a zip archive or a spreadsheet"),
    (b"BZh", "packed with bzip2"),
    (b"\xfd7zXZ\x00", "packed with xz"),
    (b"7z\xbc\xaf\x27\x1c", "a 7z archive"),
)


class RawRow(NamedTuple):
    """One row as it was found. `offset` and `size` are bytes in the decompressed file, -1 where the format has no such bytes."""

    line: int
    value: Any
    refusal: Refusal | None = None
    offset: int = -1
    size: int = -1


class ConflictingDict(dict[str, Any]):
    """A JSON object that names a key twice with different values; `conflicting` holds those keys."""

    conflicting: frozenset[str] = frozenset()


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    plain = dict(pairs)
    if len(plain) == len(pairs):
        return plain
    conflicting = frozenset(k for k, v in pairs if json.dumps(v) != json.dumps(plain[k]))
    if not conflicting:
        return plain
    marked = ConflictingDict(pairs)
    marked.conflicting = conflicting
    return marked


DECODER = json.JSONDecoder(object_pairs_hook=_object)


def open_bytes(path: Path) -> IO[bytes]:
    """The decompressed bytes of a file. Raises DataError if it is absent, a folder, or cannot be read."""
    try:
        raw = path.open("rb")
    except OSError as error:
        raise DataError(f"{path}: cannot be opened ({error.strerror}); check data.path") from error
    magic = raw.read(4)
    raw.seek(0)
    if magic[:2] == b"\x1f\x8b":
        return gzip.GzipFile(fileobj=raw, mode="rb")  # type: ignore[return-value]
    if magic == b"\x28\xb5\x2f\xfd":
        return io.BufferedReader(_ZstdReader(raw), 1 << 20)
    return raw


class _ZstdReader(io.RawIOBase):
    """Decompresses all frames and raises EOFError if the last one is cut off, which zstandard's own reader does not."""

    def __init__(self, raw: IO[bytes]) -> None:
        import zstandard

        self._raw, self._make, self._error = raw, zstandard.ZstdDecompressor().decompressobj, zstandard.ZstdError
        self._frame, self._pending, self._fresh = self._make(), b"", True

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._pending:
            if self._frame.eof:
                rest = self._frame.unused_data
                self._frame, self._fresh = self._make(), True
            else:
                rest = b""
            block = rest or self._raw.read(1 << 18)
            if not block:
                if self._fresh:
                    return 0
                raise EOFError("the last zstd frame is incomplete")
            self._fresh = False
            try:
                self._pending = self._frame.decompress(block)
            except self._error as error:
                raise EOFError(str(error)) from error
        count = min(len(buffer), len(self._pending))
        buffer[:count] = self._pending[:count]
        self._pending = self._pending[count:]
        return count

    def close(self) -> None:
        self._raw.close()
        super().close()


def read_rows(path: Path) -> tuple[str, Iterator[RawRow]]:
    """The kind of a file (jsonl, json_array, csv, parquet) and an iterator over its rows.

    Raises DataError, at once or while iterating, if the file as a whole is unusable: absent, empty, cut off in its compressed
    stream, of an unknown kind, not decodable.
    """
    kind = _kind(path)
    return kind, _guarded(path, {"jsonl": _jsonl, "json_array": _json_array, "csv": _csv, "parquet": _parquet}[kind](path))


def _guarded(path: Path, rows: Iterator[RawRow]) -> Iterator[RawRow]:
    line = 0
    try:
        for row in rows:
            line = row.line
            yield row
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise DataError(f"{path}: the compressed file is cut off or damaged after line {line}; fetch it again") from error
    except UnicodeError as error:
        raise DataError(f"{path}: after line {line}: not valid text in its encoding; convert it to UTF-8 with iconv") from error


def _kind(path: Path) -> str:
    try:
        with open_bytes(path) as stream:
            head = stream.read(1 << 16)
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise DataError(f"{path}: the compressed file is cut off or damaged; fetch it again") from error
    if head[:4] == b"PAR1":
        return "parquet"
    for magic, what in _OTHER_ARCHIVES:
        if head.startswith(magic):
            raise DataError(f"{path}: this is {what}; unpack it, or pack its content with gzip or zstd")
    suffixes = [s.lower() for s in path.suffixes if s.lower() not in (".gz", ".zst")]
    if suffixes[-1:] in ([".csv"], [".tsv"]):
        return "csv"
    if not head:
        raise DataError(f"{path}: the file is empty")
    text = head.decode(encoding_of(path, head), "replace").lstrip("\ufeff \t\r\n")
    if text.startswith("[") and not _first_line_is_row(text):
        return "json_array"
    if text.startswith("{") and suffixes[-1:] == [".json"] and not _first_line_is_row(text) and len(head) < 1 << 16:
        raise DataError(f"{path}: one JSON object over several lines; expected a JSON list or one object a line")
    return "jsonl"


def _first_line_is_row(text: str) -> bool:
    """True if the first line is a complete JSON value and more lines follow (`[]` may be a bad row of a JSON-lines file)."""
    first, _, rest = text.partition("\n")
    try:
        DECODER.decode(first.strip())
    except ValueError:
        return False
    return first.startswith("{") or bool(rest.strip())


def encoding_of(path: Path, head: bytes) -> str:
    """utf-8, or what a byte order mark says. Raises DataError for UTF-16 or UTF-32 without a mark."""
    for mark, name in (
        (b"\xff\xfe\x00\x00", "utf-32"),
        (b"\x00\x00\xfe\xff", "utf-32"),
        (b"\xff\xfe", "utf-16"),
        (b"\xfe\xff", "utf-16"),
    ):
        if head.startswith(mark):
            return name
    if b"\x00" in head[:4]:
        raise DataError(f"{path}: looks like UTF-16 or UTF-32 without a byte order mark; convert it with iconv to UTF-8")
    return "utf-8"


def _jsonl(path: Path) -> Iterator[RawRow]:
    with open_bytes(path) as stream:
        encoding = encoding_of(path, stream.read(4))
    if encoding == "utf-8":
        yield from _jsonl_utf8(path)
        return
    with open_bytes(path) as stream:
        for number, line in enumerate(io.TextIOWrapper(stream, encoding=encoding, newline=None), 1):
            if line.strip():
                yield _parsed(number, line, ended=line.endswith("\n"))


def physical_lines(stream: IO[bytes]) -> Iterator[tuple[int, bytes]]:
    """(byte offset, line with its ending) for the endings LF, CR LF and CR. A raw CR cannot occur inside JSON."""
    offset = 0
    for line in stream:
        body = line.rstrip(b"\r\n")
        if b"\r" not in body:
            yield offset, line
            offset += len(line)
            continue
        for piece in line.splitlines(keepends=True):  # bytes: cuts at CR, LF and CR LF only
            yield offset, piece
            offset += len(piece)


def not_utf8(path: Path) -> str:
    """Where a file that cannot be decoded first leaves UTF-8, and the remedy: "line 3: byte 7 of the line is not UTF-8; ..."."""
    with open_bytes(path) as stream:
        for number, (_, line) in enumerate(physical_lines(stream), 1):
            try:
                line.decode("utf-8")
            except UnicodeDecodeError as error:
                return f"line {number}: {_not_utf8(error)}"
    return "not valid utf-8; convert the file with iconv"


def _not_utf8(error: UnicodeDecodeError) -> str:
    return f"byte {error.start + 1} of the line is not UTF-8; convert the file with iconv"


def _jsonl_utf8(path: Path) -> Iterator[RawRow]:
    with open_bytes(path) as stream:
        for number, (offset, line) in enumerate(physical_lines(stream), 1):
            mark = 3 if number == 1 and line.startswith(b"\xef\xbb\xbf") else 0
            body = line[mark:].rstrip(b"\r\n")
            if not body.strip():
                continue
            try:
                text = body.decode("utf-8")
            except UnicodeDecodeError as error:
                refusal = Refusal("not_utf8", _not_utf8(error))
                yield RawRow(number, None, refusal, offset + mark, len(body))
                continue
            row = _parsed(number, text, ended=line.endswith((b"\n", b"\r")))
            yield row._replace(offset=offset + mark, size=len(body))


def _parsed(number: int, text: str, *, ended: bool) -> RawRow:
    try:
        return RawRow(number, DECODER.decode(text.strip("\ufeff \t\r\n")))
    except (ValueError, RecursionError) as error:
        reason = "invalid_json" if ended else "cut_last_line"
        detail = f"{error}" if ended else f"the file ends in the middle of a row: {error}"
        return RawRow(number, None, Refusal(reason, detail))


def _json_array(path: Path) -> Iterator[RawRow]:
    from clusterft.json_array import iterate_array

    return iterate_array(path)


def _csv(path: Path) -> Iterator[RawRow]:
    from clusterft.tabular import iterate_csv

    return iterate_csv(path)


def _parquet(path: Path) -> Iterator[RawRow]:
    from clusterft.tabular import iterate_parquet

    return iterate_parquet(path)
