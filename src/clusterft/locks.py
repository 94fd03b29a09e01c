"""One process works on a folder; when it dies, however it dies, another one may.

In comes a folder; out comes a held `FolderLock`, or None with who holds it. Two things together make the lock:

    <name>           locked by the kernel (flock): free the moment its holder dies, on local disks and wherever the file system
                     shares locks between hosts
    <name>.holder    JSON of host, pid and a token, touched every HEARTBEAT_SECONDS: for file systems where it is not so

On some network file systems a lock of a dead host stays with the server (NFS 3), on others hosts do not see each other's locks at
all (NFS `nolock`, Lustre `localflock`). So a holder on *another* host counts as alive while its note changes, and as dead once the
note has not changed for EXPIRY_SECONDS, as measured by whoever waits: no two clocks are compared. A holder that finds its
note taken over was taken for dead; it ends itself at once rather than write into the same folder. No torch here.
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
import socket
import threading
import time
import uuid
from dataclasses import dataclass
from pathlib import Path

HEARTBEAT_SECONDS = 10.0
EXPIRY_SECONDS = 120.0
EXIT_LOST_LOCK = 76
"""Exit code of a process whose lock was taken over: EX_PROTOCOL of sysexits.h."""

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Holder:
    """Who a note names. `changed`: the note's modification time, ns."""

    host: str
    pid: int
    token: str
    changed: int

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}"


class FolderLock:
    """A held lock. `release` it, or die: both let go."""

    def __init__(self, file: int, note: Path, heartbeat: float) -> None:
        self._file, self._note, self._token = file, note, uuid.uuid4().hex
        self._over = threading.Event()
        facts = {"host": socket.gethostname(), "pid": os.getpid(), "token": self._token}
        part = note.with_name(f"{note.name}.{os.getpid()}.tmp")
        part.write_text(json.dumps(facts), encoding="utf-8")
        part.replace(note)
        self._thread = threading.Thread(target=self._beat, args=(heartbeat,), daemon=True, name="lock-heartbeat")
        self._thread.start()

    def _beat(self, heartbeat: float) -> None:
        while not self._over.wait(heartbeat):
            holder = read_holder(self._note)
            if self._over.is_set():
                return
            if holder is None or holder.token != self._token:
                text = f"error: {self._note.parent} was taken over by {holder or 'nobody'}: this process was not heard of for too long\n"
                os.write(2, text.encode())
                os._exit(
                    EXIT_LOST_LOCK
                )  # the main thread may be in the middle of a write into a folder that is no longer its own
            try:
                os.utime(self._note)
            except OSError as problem:
                log.warning("the lock of %s cannot be kept fresh: %s", self._note.parent, problem)

    def release(self) -> None:
        """Lets go. The note goes first: without it and without the kernel's lock the folder is free."""
        self._over.set()
        self._thread.join()
        holder = read_holder(self._note)
        if holder is not None and holder.token == self._token:
            self._note.unlink(missing_ok=True)
        os.close(self._file)


def read_holder(note: Path) -> Holder | None:
    """Who the note names; None without a note, or while it is being replaced."""
    try:
        facts = json.loads(note.read_text(encoding="utf-8"))
        return Holder(str(facts["host"]), int(facts["pid"]), str(facts["token"]), note.stat().st_mtime_ns)
    except (FileNotFoundError, ValueError, KeyError, TypeError):
        return None


def try_lock(
    folder: Path, name: str = ".lock", *, expiry: float = EXPIRY_SECONDS, heartbeat: float = HEARTBEAT_SECONDS
) -> tuple[FolderLock | None, Holder | None]:
    """(lock, None), or (None, its holder as far as known). Makes the folder.

    Returns at once, except where the only sign of a holder is the note of another host: then it looks for up to `expiry` seconds
    whether that note changes, and takes the lock over if it does not.
    """
    folder.mkdir(parents=True, exist_ok=True)
    path, note = folder / name, folder / f"{name}.holder"
    file = _flock(path)
    holder = read_holder(note)
    elsewhere = holder is not None and holder.host != socket.gethostname()
    if file is None and not elsewhere:
        return None, holder
    if elsewhere:
        log.warning("%s was held by %s; looking for up to %.0f s whether it lives", folder, holder, expiry)
        if _changes(note, holder, expiry):
            if file is not None:
                os.close(file)
            return None, read_holder(note)
        log.warning("%s: no sign of life of %s, its lock is taken over", folder, holder)
        file = _replace(path) if file is None else file
    return (None, read_holder(note)) if file is None else (FolderLock(file, note, heartbeat), None)


def _flock(path: Path) -> int | None:
    """An open, locked file, or None while somebody holds it (or has just put another file in its place)."""
    file = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.stat(path).st_ino == os.fstat(file).st_ino:
            return file
    except (BlockingIOError, FileNotFoundError):
        pass
    os.close(file)
    return None


def _changes(note: Path, holder: Holder, patience: float) -> bool:
    """True as soon as the note changes; a note that goes away is a holder that left, which is no sign of life to wait for."""
    deadline = time.monotonic() + patience
    while time.monotonic() < deadline:
        time.sleep(min(1.0, max(0.05, patience / 10)))
        now = read_holder(note)
        if now is None:
            return False
        if now != holder:
            return True
    return False


def _replace(path: Path) -> int | None:
    """A fresh lock file in the place of one that the server keeps locked for a dead host."""
    fresh = path.with_name(f"{path.name}.{uuid.uuid4().hex}")
    file = os.open(fresh, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o644)
    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    os.replace(fresh, path)
    if os.stat(path).st_ino == os.fstat(file).st_ino:
        return file
    os.close(file)
    return None
