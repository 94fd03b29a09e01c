"""Which files a source names: files as they were given, a folder's data files by name, and a word about what stays unread.

In: `data.path`. Out: paths, and one note a folder in which something is not read: other suffixes, folders, metadata of a hub data
set, a second link to the same file.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from clusterft.sources import DataError
from clusterft.text_rules import printable

SUFFIXES = (".jsonl", ".json", ".csv", ".tsv", ".parquet")
SHOWN_NAMES = 5
"""Names shown in a note about files that are not read."""

_METADATA = ("dataset_info.json", "dataset_infos.json")
_NOTES: dict[tuple[str, ...], tuple[str, ...]] = {}
"""The notes of each list that `expand_paths` has made, since a configuration holds the files and not the folder."""


def expand_paths(path: Any) -> list[Path]:
    """One or several files or folders to files: in the order given, a folder's files by name. Raises DataError."""
    files, notes = _expand(path)
    _NOTES[_key(files)] = notes
    return files


def expand_with_notes(path: Any) -> tuple[list[Path], tuple[str, ...]]:
    """The files, and notes on what is not read beside them; a list made by `expand_paths` keeps the notes of its folders."""
    files, notes = _expand(path)
    return files, notes or _NOTES.get(_key(files), ())


def _key(files: Sequence[Path]) -> tuple[str, ...]:
    return tuple(os.path.abspath(f) for f in files)


def _expand(path: Any) -> tuple[list[Path], tuple[str, ...]]:
    if not path or path == "???":
        raise DataError("data.path is not set; name a file, a folder or a list of files, for example data.path=my.jsonl")
    files: list[Path] = []
    notes: list[str] = []
    for one in map(Path, [path] if isinstance(path, str | Path) else list(path)):
        _refuse_loop(one)
        if not one.is_dir():
            if one.exists() and not one.is_file():
                raise DataError(f"{one}: a pipe or a device can be read only once; write the rows to a file and name that")
            files.append(one)
            continue
        inside, others = _folder(one)
        unread = _unread(others)
        if not inside:
            raise DataError(
                f"{one}: the folder holds no data files ({', '.join(SUFFIXES)}, also with .gz or .zst)"
                + (f"; not read: {unread}" if others else "")
            )
        files += inside
        if others:
            notes.append(f"{printable(str(one))}: not read: {unread}")
    return files, tuple(notes)


def _folder(folder: Path) -> tuple[list[Path], list[Path]]:
    """The data files of a folder and everything else in it, each by name. Of several links to one file, the first is read."""
    entries = sorted(folder.iterdir())
    metadata = {*_METADATA, "state.json"} if (folder / _METADATA[0]).exists() else set(_METADATA)
    inside: list[Path] = []
    others: list[Path] = []
    seen: set[str] = set()
    for entry in entries:
        named = entry.name.lower().removesuffix(".gz").removesuffix(".zst").endswith(SUFFIXES)
        if not named or entry.name in metadata or (entry.exists() and not entry.is_file()):
            others.append(entry)
            continue
        _refuse_loop(entry)
        real = os.path.realpath(entry)
        (others if real in seen else inside).append(entry)
        seen.add(real)
    return inside, others


def _unread(entries: Sequence[Path]) -> str:
    """Counts and first names, as in "2 files and 1 folder (a.xz, sub/, ...)"."""
    folders = sum(e.is_dir() for e in entries)
    counts = [f"{n:,} {word}{'s' * (n != 1)}" for n, word in ((len(entries) - folders, "file"), (folders, "folder")) if n]
    names = [printable(e.name) + "/" * e.is_dir() for e in entries[:SHOWN_NAMES]]
    return f"{' and '.join(counts)} ({', '.join(names)}{', ...' * (len(entries) > len(names))})"


def _refuse_loop(path: Path) -> None:
    try:
        path.stat()
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise DataError(f"{path}: a symbolic link that leads back to itself; remove it, or let it lead to a file") from error
