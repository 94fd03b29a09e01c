"""A JSON list of rows, read piece by piece: in comes a path, out come `RawRow`s with the physical line each element starts at.

Memory holds one block and one element, not the file. A list that ends early gives its good rows and one `cut_last_line`;
a list that is broken in the middle cannot be resumed and is an error with its line.
"""

from __future__ import annotations

import codecs
from collections.abc import Iterator
from pathlib import Path

from clusterft.conversation import Refusal
from clusterft.sources import DECODER, DataError, RawRow, encoding_of, not_utf8, open_bytes

BLOCK_BYTES = 1 << 20
_SPACE = " \t\r\n"


class _Window:
    """A sliding piece of the decoded text, with the line number and byte offset of its cursor."""

    def __init__(self, path: Path) -> None:
        self.path, self.stream = path, open_bytes(path)
        head = self.stream.read(4)
        self.encoding = encoding_of(path, head)
        self.decoder = codecs.getincrementaldecoder(self.encoding)()
        self.text, self.at, self.line, self.offset, self.ended = self._decode(head), 0, 1, 0, False
        if self.text.startswith("\ufeff"):
            self.advance(1)

    def _decode(self, block: bytes, final: bool = False) -> str:
        try:
            return self.decoder.decode(block, final)
        except UnicodeDecodeError as error:
            where = (
                not_utf8(self.path)
                if self.encoding == "utf-8"
                else f"not valid {self.encoding}; convert the file to UTF-8 with iconv"
            )
            raise DataError(f"{self.path}: {where}") from error

    def more(self, size: int = BLOCK_BYTES) -> bool:
        """Reads on; False at the end of the file."""
        if self.ended:
            return False
        block = self.stream.read(size)
        self.ended = not block
        self.text, self.at = self.text[self.at :] + self._decode(block, final=self.ended), 0
        return True

    def advance(self, end: int) -> None:
        passed = self.text[self.at : end]
        self.line += passed.count("\n") + passed.count("\r") - passed.count("\r\n")
        self.offset += len(passed.encode("utf-8", "surrogatepass"))
        self.at = end

    def peek(self, skip: str = _SPACE) -> str:
        """The next character that is not in `skip`, "" at the end of the file."""
        while True:
            rest = self.at
            while rest < len(self.text) and self.text[rest] in skip:
                rest += 1
            self.advance(rest)
            if rest < len(self.text):
                return self.text[rest]
            if not self.more():
                return ""


def iterate_array(path: Path) -> Iterator[RawRow]:
    """Rows of a JSON list. Raises DataError if the list is broken in the middle."""
    window = _Window(path)
    with window.stream:
        window.peek()
        window.advance(window.at + 1)  # the opening bracket, which told the kind
        first = True
        while True:
            char = window.peek()
            if char == "]":
                window.advance(window.at + 1)
                if window.peek():
                    raise DataError(f"{path}: line {window.line}: text after the end of the JSON list")
                return
            if not first and char == ",":
                window.advance(window.at + 1)
                char = window.peek()
            elif not first and char:
                raise DataError(f"{path}: line {window.line}: expected ',' or ']' after a row of the JSON list")
            if not char:
                yield RawRow(window.line, None, Refusal("cut_last_line", "the JSON list has no end"))
                return
            row = _element(window)
            yield row
            if row.refusal:
                return
            first = False


def _element(window: _Window) -> RawRow:
    size = BLOCK_BYTES
    while True:
        try:
            value, end = DECODER.raw_decode(window.text, window.at)
        except RecursionError as error:
            raise DataError(f"{window.path}: line {window.line}: a row is nested too deeply to be read; remove it") from error
        except ValueError as error:
            if window.more(size):
                size *= 2  # keeps the retries on one huge row linear
                continue
            position = getattr(error, "pos", window.at)
            if position < len(window.text.rstrip()) - 1 and "Unterminated" not in str(error):
                line = window.line + window.text.count("\n", window.at, position)
                raise DataError(f"{window.path}: line {line}: not valid JSON ({error}); repair the list there") from error
            return RawRow(window.line, None, Refusal("cut_last_line", f"the file ends in the middle of a row: {error}"))
        if end < len(window.text) or not window.more():
            break
    line, offset = window.line, window.offset
    window.advance(end)
    known = window.encoding == "utf-8"
    return RawRow(line, value, None, offset if known else -1, window.offset - offset if known else -1)
