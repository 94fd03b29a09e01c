"""Checkpoints that are whole or not there.

    run/train/checkpoint-17/     manifest.json (step, size and sha256 of every other file), model.safetensors, trainer.json,
                                 optimizer-00000-of-00004.pt ...

A checkpoint is written into a hidden folder, every file is fsynced, the manifest comes last, and one rename makes it visible.
Whatever is torn is recognised by its manifest and passed over with the reason; nothing is deleted but what `prune` is asked
to.
"""

from __future__ import annotations

import hashlib
import json
import re
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from clusterft.atomic import fsync_path
from clusterft.distributed import Dist

MANIFEST = "manifest.json"
_NAME = re.compile(r"^checkpoint-(\d+)$")


@dataclass(frozen=True)
class Found:
    """The newest whole checkpoint (or None) and why newer ones were passed over: name -> reason."""

    path: Path | None
    step: int = 0
    rejected: Mapping[str, str] = field(default_factory=dict)


def file_facts(path: Path) -> dict[str, object]:
    """Bytes and sha256 of a file."""
    with path.open("rb") as stream:
        return {"bytes": path.stat().st_size, "sha256": hashlib.file_digest(stream, "sha256").hexdigest()}


def fault(folder: Path) -> str | None:
    """Why this checkpoint cannot be used, or None if it is whole."""
    manifest = folder / MANIFEST
    if not manifest.is_file():
        return "no manifest"
    try:
        listed = json.loads(manifest.read_text(encoding="utf-8"))
        step, files = listed["step"], {name: (facts["bytes"], facts["sha256"]) for name, facts in listed["files"].items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        return f"manifest cannot be read ({type(error).__name__}: {error})"
    if not files:
        return "manifest lists no file"
    if folder.name != f"checkpoint-{step}":
        return f"manifest is of step {step}"
    for name, (size, _) in files.items():
        path = folder / name
        if not path.is_file():
            return f"{name} missing"
        if path.stat().st_size != size:
            return f"{name} {path.stat().st_size} bytes, manifest says {size}"
    for name, (_, digest) in files.items():
        if file_facts(folder / name)["sha256"] != digest:
            return f"{name} has another sha256 than the manifest says"
    return None


def listed_files(folder: Path) -> dict[str, dict[str, Any]]:
    """name -> {bytes, sha256} of every file of a checkpoint, as its manifest says. Raises FileNotFoundError without one."""
    return json.loads((folder / MANIFEST).read_text(encoding="utf-8"))["files"]


def find_latest(folder: Path) -> Found:
    """The newest whole checkpoint under `folder`, with the reason for every newer one that is not."""
    steps = sorted((int(m[1]) for p in folder.glob("checkpoint-*") if p.is_dir() and (m := _NAME.match(p.name))), reverse=True)
    rejected = {}
    for step in steps:
        path = folder / f"checkpoint-{step}"
        reason = fault(path)
        if reason is None:
            return Found(path, step, rejected)
        rejected[path.name] = reason
    return Found(None, 0, rejected)


def save(folder: Path, step: int, writers: Mapping[str, Callable[[Path], None]], dist: Dist) -> Path:
    """Collective: writes checkpoint-`step` under `folder`. `writers`: file name -> function(path), this rank's files only.

    Raises OSError (disk full, read-only) on every rank, with the rank named; an incomplete folder is then never visible.
    """
    final, temporary = folder / f"checkpoint-{step}", folder / f".checkpoint-{step}.tmp"
    if dist.is_main:
        folder.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir()
    dist.barrier()
    facts, problem = {}, None
    try:
        for name, write in writers.items():
            write(temporary / name)
            fsync_path(temporary / name)
            facts[name] = file_facts(temporary / name)
    except OSError as error:
        problem = f"checkpoint-{step} could not be written: {error}"
    answers = dist.gather_objects((problem, facts))
    for rank, (found, _) in enumerate(answers):
        if found:
            raise OSError(f"rank {rank}: {found}")
    if dist.is_main:
        files = {name: value for _, one in answers for name, value in one.items()}
        (temporary / MANIFEST).write_text(json.dumps({"step": step, "files": files}, indent=1), encoding="utf-8")
        fsync_path(temporary / MANIFEST)
        fsync_path(temporary)
        shutil.rmtree(final, ignore_errors=True)  # a torn one of the same step; a whole one would have been resumed from
        temporary.rename(final)
        fsync_path(folder)
    dist.barrier()
    return final


def prune(folder: Path, keep_last: int) -> list[str]:
    """Removes all but the newest `keep_last` checkpoints, and leftovers of interrupted writing. Returns the names removed.

    Torn checkpoints never count among those kept. Raises ValueError if keep_last is below 1.
    """
    if keep_last < 1:
        raise ValueError(f"trainer.keep_last={keep_last}: at least one checkpoint must stay")
    whole = [p for p in folder.glob("checkpoint-*") if _NAME.match(p.name) and (p / MANIFEST).is_file()]
    whole.sort(key=lambda p: int(_NAME.match(p.name)[1]))
    gone = whole[:-keep_last] + list(folder.glob(".checkpoint-*.tmp"))
    for path in gone:
        shutil.rmtree(path)
    return [p.name for p in gone]
