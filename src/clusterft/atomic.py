"""Files that are whole or not there: the one place that writes beside, syncs and renames.

In: a path and its contents. After a crash or a power cut the path holds the old contents or all of the new; what a killed process
leaves behind is a hidden file that ends in `.tmp`. No torch here.
"""

from __future__ import annotations

import os
import secrets
from pathlib import Path


def write_atomic(path: Path, data: str | bytes) -> None:
    """Replaces the contents of `path` (text as UTF-8) in one step, with the permissions that any new file gets.

    Raises OSError on a full disk, UnicodeEncodeError for a lone surrogate; the old contents then stay.
    """
    content = data.encode("utf-8") if isinstance(data, str) else data
    temporary = path.with_name(f".{path.name}.{os.getpid()}-{secrets.token_hex(4)}.tmp")
    try:
        with temporary.open("xb") as stream:
            stream.write(content)
            stream.flush()
            os.fsync(stream.fileno())
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    fsync_path(path.parent)


def fsync_path(path: Path) -> None:
    """Forces a file or folder to disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
