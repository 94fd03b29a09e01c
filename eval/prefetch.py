"""Fetches benchmark files on a connected machine, for nodes that are not connected.

    python -m eval.prefetch mbpp_plus humaneval_plus --to DIR

Out come the files and `manifest.json` with, for each, where it came from, its size, SHA-256, MD5 (the hash that evalplus
prints) and number of problems. Evaluators check a file against the manifest beside it; `--verify` checks a whole folder
without network.
"""

from __future__ import annotations

import argparse
import gzip
import hashlib
import json
import sys
import urllib.error
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from eval.errors import EvaluationError

MANIFEST = "manifest.json"
SOURCES = {"humaneval_plus": ("HumanEvalPlus", "v0.1.10"), "mbpp_plus": ("MbppPlus", "v0.2.0")}
"""Name -> evalplus's data set and the version that belongs to evalplus 0.3.1."""


def url_of(name: str) -> str:
    """Where evalplus keeps the data set `name`."""
    from evalplus.data.utils import get_dataset_metadata

    return get_dataset_metadata(*SOURCES[name], mini=False)[0]


def fetch(name: str, url: str, folder: Path) -> Path:
    """Downloads one .jsonl.gz, writes it unpacked and enters it into the manifest. Raises EvaluationError without network."""
    try:
        with urllib.request.urlopen(url, timeout=60) as reply:
            packed = reply.read()
    except (urllib.error.URLError, TimeoutError) as problem:
        raise EvaluationError(
            f"{name} could not be fetched from {url} ({problem}); run this on a machine with network"
        ) from problem
    data = gzip.decompress(packed) if packed[:2] == b"\x1f\x8b" else packed
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}-{SOURCES[name][1]}.jsonl"
    path.write_bytes(data)
    entries = read_manifest(folder)
    entries[path.name] = {"url": url, **facts(path)}
    part = folder / f"{MANIFEST}.part"
    part.write_text(json.dumps(entries, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    part.replace(folder / MANIFEST)
    return path


def facts(path: Path) -> dict[str, Any]:
    """Size in bytes, hashes and number of problems of a file."""
    data = path.read_bytes()
    return {
        "bytes": len(data),
        "sha256": hashlib.sha256(data).hexdigest(),
        "md5": hashlib.md5(data, usedforsecurity=False).hexdigest(),
        "problems": sum(1 for line in data.split(b"\n") if line.strip()),
    }


def read_manifest(folder: Path) -> dict[str, Any]:
    """File name -> facts; empty where there is no manifest."""
    path = folder / MANIFEST
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}


def check_manifest(path: Path) -> None:
    """Raises EvaluationError if the manifest beside the file names it with another hash. A file without entry is taken as it
    is.
    """
    entry = read_manifest(path.parent).get(path.name)
    if entry is not None and entry["sha256"] != facts(path)["sha256"]:
        raise EvaluationError(f"{path} is not the file that {MANIFEST} beside it names (its SHA-256 differs); fetch it again")


def verify(folder: Path) -> list[str]:
    """Names of the files in the manifest that are missing or changed."""
    entries = read_manifest(folder)
    if not entries:
        raise EvaluationError(f"{folder} has no {MANIFEST}; nothing was fetched into it")
    return [n for n, e in sorted(entries.items()) if not (folder / n).is_file() or facts(folder / n)["sha256"] != e["sha256"]]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m eval.prefetch", description=__doc__.split("\n")[0])
    parser.add_argument("names", nargs="*", choices=[*SOURCES, []], help="what to fetch; nothing for all")
    parser.add_argument("--to", type=Path, default=Path("assets/benchmarks"), help="folder to write into")
    parser.add_argument("--verify", action="store_true", help="check the folder against its manifest, without network")
    given = parser.parse_args(arguments)
    try:
        if given.verify:
            bad = verify(given.to)
            print("\n".join(f"changed or missing: {n}" for n in bad) or f"{given.to}: every file is as fetched")
            return 1 if bad else 0
        for name in given.names or SOURCES:
            print(fetch(name, url_of(name), given.to))
    except EvaluationError as problem:
        print(f"error: {problem}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
