"""A full disk is found before any work, on a real small file system."""

import os
import shutil
import subprocess

import pytest
from composed import smoke

from clusterft.preflight import PreflightError, check_disk


@pytest.fixture
def tiny_disk(tmp_path):
    """A 1 MiB file system."""
    folder = tmp_path / "disk"
    folder.mkdir()
    if os.geteuid() != 0 or shutil.which("mount") is None:
        pytest.skip("mounting a small file system needs root")
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", folder], capture_output=True, check=False).returncode:
        pytest.skip("this machine does not let a small file system be mounted")
    yield folder
    subprocess.run(["umount", folder], check=True)


def test_too_little_room_is_said_with_both_numbers(tiny_disk):
    with pytest.raises(PreflightError, match=r"0\.0 GiB free and this run may write 0\.2 GiB"):
        check_disk(smoke(tiny_disk))
    assert not (tiny_disk / "runs").exists()


def test_enough_room_passes(tmp_path):
    check_disk(smoke(tmp_path))
