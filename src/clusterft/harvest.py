"""The embedded pool `stdlib_instruct`: instruction and answer pairs out of the running interpreter's own standard library.

In: nothing but Python. Out: `HarvestedRow`s in order of file and line, the same for one Python build: docstring and signature
make the instruction, the function's source without its docstring the answer (with it, half of the answer would be a copy of the
instruction). Only whole functions with a docstring of 40 to 600 characters and 3 to 60 lines of body below it count;
the library's tests are left out. Harvesting takes some 5 s, so rows are kept in a file named after everything they depend on.
"""

from __future__ import annotations

import ast
import hashlib
import json
import os
import platform
import sysconfig
import textwrap
import tokenize
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

HARVEST_VERSION = 2
"""Raised when the text or the choice of rows changes."""

DOCSTRING_CHARS = (40, 600)
BODY_LINES = (3, 60)
_LEFT_OUT = frozenset({"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"})


class HarvestedRow(NamedTuple):
    """One function. `source` is its file below the library folder, `line` where it starts, `group` its module family."""

    source: str
    line: int
    prompt: str
    response: str
    group: str
    qualname: str


def stdlib_rows(cache_dir: Path | None = None, root: Path | None = None) -> tuple[HarvestedRow, ...]:
    """All rows, from the file in `cache_dir` if there is one made from the same interpreter and library, else harvested.

    root  the library's folder; default: the running interpreter's. Raises OSError if `cache_dir` cannot be written.
    """
    root = root or Path(sysconfig.get_paths()["stdlib"])
    files = _files(root)
    if cache_dir is None:
        return tuple(_unique(_harvest(root, files)))
    key = _library_key(root, files)
    path = cache_dir / f"stdlib-{platform.python_version()}-v{HARVEST_VERSION}-{key}.jsonl"
    kept = _read(path)
    if kept is None:
        kept = tuple(_unique(_harvest(root, files)))
        _write(path, kept)
    return kept


def _files(root: Path) -> list[Path]:
    return [p for p in sorted(root.rglob("*.py")) if not _LEFT_OUT & set(p.relative_to(root).parts)]


def _library_key(root: Path, files: list[Path]) -> str:
    """Names the library by the path, size and time of each file: a patched module makes a new harvest."""
    digest = hashlib.sha256(f"{platform.python_implementation()} {root}".encode())
    for path in files:
        status = path.stat()
        digest.update(f"{path.relative_to(root)} {status.st_size} {status.st_mtime_ns}\n".encode())
    return digest.hexdigest()[:16]


def _harvest(root: Path, files: list[Path]) -> Iterator[HarvestedRow]:
    for path in files:
        try:
            with tokenize.open(path) as stream:
                text = stream.read()
            tree = ast.parse(text)
        except (SyntaxError, UnicodeDecodeError):  # a few files are bad on purpose (lib2to3 keeps Python 2 samples)
            continue
        relative = path.relative_to(root)
        lines = [
            line + "\n" for line in text.split("\n")
        ]  # str.splitlines would also cut at the form feeds that some modules hold
        for node, parents in _functions(tree, ()):
            row = _row(node, parents, lines, relative)
            if row is not None:
                yield row


_Function = ast.FunctionDef | ast.AsyncFunctionDef


def _functions(node: ast.AST, parents: tuple[str, ...]) -> Iterator[tuple[_Function, tuple[str, ...]]]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, _Function):
            yield child, parents
        name = (child.name,) if isinstance(child, _Function | ast.ClassDef) else ()
        yield from _functions(child, parents + name)


def _row(node: _Function, parents: tuple[str, ...], lines: list[str], relative: Path) -> HarvestedRow | None:
    docstring = ast.get_docstring(node)
    if not docstring or not DOCSTRING_CHARS[0] <= len(docstring) <= DOCSTRING_CHARS[1] or len(node.body) < 2:
        return None
    doc, below = node.body[0], node.body[1]
    start = (doc.end_lineno or 0) + 1  # comments between docstring and first statement belong to the answer
    end = node.end_lineno or 0
    if below.lineno < start or doc.lineno == node.lineno or not BODY_LINES[0] <= end - below.lineno + 1 <= BODY_LINES[1]:
        return None
    head = min([node.lineno, *(d.lineno for d in node.decorator_list)])
    signature = textwrap.dedent("".join(lines[head - 1 : doc.lineno - 1])).rstrip()
    code = textwrap.dedent("".join(lines[head - 1 : doc.lineno - 1] + lines[start - 1 : end])).rstrip()
    module = ".".join(relative.with_suffix("").parts).removesuffix(".__init__")
    prompt = f"{docstring}\n\n# {'.'.join((module, *parents))}\n{signature}"
    group = relative.parts[0].removesuffix(".py")
    return HarvestedRow(
        relative.as_posix(), head, prompt, f"```python\n{code}\n```", group, ".".join((module, *parents, node.name))
    )


def _unique(rows: Iterator[HarvestedRow]) -> Iterator[HarvestedRow]:
    """The first of several functions with the same code, or the same instruction (overloads, copies between modules)."""
    seen: set[str] = set()
    for row in rows:
        keys = {"p" + row.prompt, "r" + row.response}
        if not keys & seen:
            yield row
        seen |= keys


def _write(path: Path, rows: tuple[HarvestedRow, ...]) -> None:
    body = "".join(json.dumps(row) + "\n" for row in rows)
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(f".{os.getpid()}.part")
    part.write_text(hashlib.sha256(body.encode()).hexdigest() + "\n" + body, encoding="ascii")
    os.replace(part, path)


def _read(path: Path) -> tuple[HarvestedRow, ...] | None:
    """The kept rows; None if there are none or their checksum is wrong (harvesting again gives the same rows)."""
    if not path.is_file():
        return None
    digest, _, body = path.read_text(encoding="utf-8", errors="replace").partition("\n")
    if hashlib.sha256(body.encode()).hexdigest() != digest:
        return None
    return tuple(HarvestedRow(*json.loads(line)) for line in body.splitlines())
