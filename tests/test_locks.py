"""Folder locks: a dead holder never keeps a folder, a living one always does, on this host or on another."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import signal
import subprocess
import sys
import time

import pytest

from clusterft.locks import EXIT_LOST_LOCK, read_holder, try_lock

HOLD = """
import sys, time
from pathlib import Path
from clusterft.locks import try_lock
lock, _ = try_lock(Path(sys.argv[1]), heartbeat=0.1)
print("held" if lock else "refused", flush=True)
time.sleep(60)
"""


def holder(folder, host=None):
    """A real process that holds the folder, on a host of that name if one is given; returns once it does."""
    command = [sys.executable, "-c", HOLD, str(folder)]
    if host is not None:
        if os.geteuid() != 0 or shutil.which("unshare") is None:
            pytest.skip("a host name of its own needs root and unshare")
        naming = f"import os, socket, sys; socket.sethostname({host!r}); os.execv(sys.executable, sys.argv[1:])"
        command = ["unshare", "--uts", sys.executable, "-c", naming, *command]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    if process.stdout.readline() != "held\n":
        process.wait()
        pytest.skip("this machine gives no host name of its own")
    return process


def end(process):
    process.kill()
    process.wait()
    process.stdout.close()


def test_a_holder_keeps_all_others_out_also_while_it_sleeps(tmp_path):
    process = holder(tmp_path)
    try:
        process.send_signal(signal.SIGSTOP)
        started = time.monotonic()
        lock, named = try_lock(tmp_path, expiry=0.5)
        assert lock is None and named.pid == process.pid
        assert time.monotonic() - started < 5
    finally:
        end(process)
    lock, _ = try_lock(tmp_path)
    lock.release()
    assert sorted(p.name for p in tmp_path.iterdir()) == [".lock"]


def test_a_dead_host_is_waited_for_once_and_then_expires(tmp_path):
    process = holder(tmp_path, host="elsewhere")
    end(process)
    assert read_holder(tmp_path / ".lock.holder").host == "elsewhere"
    started = time.monotonic()
    lock, _ = try_lock(tmp_path, expiry=1.0)
    assert lock is not None and time.monotonic() - started >= 1.0
    lock.release()


def test_a_lock_that_the_server_keeps_for_a_dead_host_is_replaced(tmp_path):
    """As NFS 3 does: the kernel says locked, the note names another host and never changes."""
    file = os.open(tmp_path / ".lock", os.O_RDWR | os.O_CREAT)
    fcntl.flock(file, fcntl.LOCK_EX)
    (tmp_path / ".lock.holder").write_text(json.dumps({"host": "elsewhere", "pid": 1, "token": "gone"}))
    lock, _ = try_lock(tmp_path, expiry=0.5)
    assert lock is not None
    assert try_lock(tmp_path)[0] is None
    lock.release()
    os.close(file)


@pytest.mark.parametrize("shared", [True, False])
def test_a_living_holder_on_another_host_is_respected(tmp_path, shared):
    """Also where the file system does not share locks between hosts: then its note alone says that it lives."""
    process = holder(tmp_path, host="elsewhere")
    try:
        if not shared:
            (tmp_path / ".lock").unlink()
        lock, named = try_lock(tmp_path, expiry=20.0)
        assert lock is None and named.host == "elsewhere"
    finally:
        end(process)


def test_a_holder_that_was_taken_for_dead_ends_itself(tmp_path):
    process = holder(tmp_path)
    note = tmp_path / ".lock.holder"
    note.write_text(json.dumps({"host": "elsewhere", "pid": 1, "token": "another"}))
    assert process.wait(20) == EXIT_LOST_LOCK
    assert read_holder(note).token == "another"
    process.stdout.close()
