"""The files that a configuration names: what they held when a run was made, and whether they still do.

A run's name is a hash of its configuration, and a configuration names a file by its path. So the record keeps what the files
held, and a finished run is not taken for the result of a file that has changed since. Files that are gone are no contradiction:
results can be shown where the data are not.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

WHOLE_BYTES = 1 << 28
"""Files above this size are known by size and both ends: a training changes every tensor of a model, an edit usually the size."""
END_BYTES = 1 << 24
_NODES = ("data", "model", "selector", "evaluators")
_FOLDERS = ("data.path", "model.path")

Facts = Mapping[str, Mapping[str, Any]]


def input_facts(config: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Path as configured -> {bytes, sha256} of every local file that a resolved configuration (plain containers) names."""
    named = {text for node in _NODES for key, text in _texts(config.get(node), node) if _is_input(key, text)}
    files = (file for text in sorted(named) for file in _files(Path(text)))
    return {str(file): _facts(file) for file in files}


def changed_input(facts: Facts) -> str:
    """Names the first file that is there and holds something else than `facts` say, "" if there is none."""
    for name, kept in sorted(facts.items()):
        path = Path(name)
        if path.is_file() and _facts(path) != dict(kept):
            return f"{name} has changed since this run was made from it"
    return ""


def _texts(node: Any, key: str) -> Iterator[tuple[str, str]]:
    if isinstance(node, Mapping):
        for name, value in node.items():
            yield from _texts(value, f"{key}.{name}")
    elif isinstance(node, list | tuple):
        for value in node:
            yield from _texts(value, key)
    elif isinstance(node, str):
        yield key, node


def _is_input(key: str, text: str) -> bool:
    """A word such as a task's name may be a folder's by accident: only what looks like a file counts, and folders where one is meant."""
    if len(text) > 4096 or "\n" in text or "\0" in text:
        return False
    return ((os.sep in text or "." in text) and Path(text).is_file()) or (key in _FOLDERS and Path(text).is_dir())


def _files(path: Path) -> list[Path]:
    return [path] if path.is_file() else sorted(p for p in path.rglob("*") if p.is_file())


def _facts(path: Path) -> dict[str, Any]:
    status = path.stat()
    return {"bytes": status.st_size, "sha256": _digest(path, status.st_size, status.st_mtime_ns)}


@lru_cache(maxsize=4096)
def _digest(path: Path, size: int, _mtime_ns: int) -> str:
    with path.open("rb") as stream:
        if size <= WHOLE_BYTES:
            return hashlib.file_digest(stream, "sha256").hexdigest()
        ends = hashlib.sha256(stream.read(END_BYTES))
        stream.seek(size - END_BYTES)
        ends.update(stream.read())
        return f"ends:{ends.hexdigest()}"
