"""Where a number came from: commit, package versions, hardware. Read once a process."""

from __future__ import annotations

import functools
import os
import platform
import subprocess
from importlib import metadata
from pathlib import Path
from typing import Any

import psutil

_PACKAGES = (
    "clusterft",
    "torch",
    "transformers",
    "accelerate",
    "peft",
    "datasets",
    "evalplus",
    "lm_eval",
    "numpy",
    "scikit-learn",
    "numba",
)


_RESULTS = ("results", "docs/findings.md")
"""What a finished table writes: no run reads it, and the next one must not count as made from changed sources for it."""


_SOURCES = ("src", "baselines", "eval", "experiments", "conf")
"""Where also a file that git does not know yet may be what a run was made with: a selector of one's own."""


@functools.cache
def commit() -> tuple[str, bool]:
    """The commit of the source tree and whether it had uncommitted changes; ("unknown", True) outside a git checkout."""
    return commit_of(Path(__file__).resolve().parents[2])


def commit_of(root: Path) -> tuple[str, bool]:
    """`commit` of any source tree. Changes of results alone do not count."""
    paths = [".", *(f":(exclude){name}" for name in _RESULTS)]
    try:
        changed = _git(root, "status", "--porcelain", "-uno", "--", *paths) or _git(
            root, "status", "--porcelain", "--", *_SOURCES
        )
        return _git(root, "rev-parse", "HEAD"), bool(changed)
    except (OSError, subprocess.CalledProcessError):
        return "unknown", True


def _git(root: Path, *arguments: str) -> str:
    return subprocess.run(["git", *arguments], cwd=root, capture_output=True, text=True, check=True).stdout.strip()


@functools.cache
def packages() -> dict[str, str]:
    """Versions of the packages that can change a number."""
    found = {name: version(name) for name in _PACKAGES}
    return {"python": platform.python_version(), **{name: v for name, v in found.items() if v}}


def version(name: str) -> str | None:
    """The installed version of a package, or None."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


@functools.cache
def hardware() -> dict[str, Any]:
    """Processor, cores, memory and GPUs of this machine; no host name."""
    import torch

    gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())] if torch.cuda.is_available() else []
    return {
        "processor": _processor(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
        "gpus": gpus,
    }


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    names = (
        [line.split(":", 1)[1].strip() for line in info.read_text().splitlines() if line.startswith("model name")]
        if info.exists()
        else []
    )
    return names[0] if names else platform.processor() or "unknown"
