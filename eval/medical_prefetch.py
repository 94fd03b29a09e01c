"""Fetches the medical benchmarks on a connected machine: `python -m eval.medical_prefetch --all --to DIR`, or by name.

    hub data set ► rows, checked as in a run ► <DIR>/<task>.jsonl + manifest.json (source, size, SHA-256, count)

Copy the folder to `<assets_dir>/medical` of a machine without network. A run never fetches anything itself. `--verify` compares a
folder with its manifest, without network.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from eval.errors import EvaluationError
from eval.medical_sources import TASKS, Hub, load_questions
from eval.prefetch import MANIFEST, facts, read_manifest, verify

NAMES = tuple(n for n, t in TASKS.items() if t.hub is not None and not n.endswith("_continuation") and n != "pubmedqa_labelled")
"""Tasks with a file of their own: the cloze forms and pubmedqa_labelled use another's."""


def hub_rows(hub: Hub) -> Iterable[Mapping[str, Any]]:
    """The rows of a hub data set. Raises EvaluationError with the reason where it cannot be loaded."""
    if os.environ.get("HF_HUB_OFFLINE", "0") not in ("", "0"):
        raise EvaluationError(f"{hub.path} is not fetched: HF_HUB_OFFLINE is set; unset it on a machine with network")
    import datasets

    try:
        return datasets.load_dataset(hub.path, hub.config, split=hub.split)
    except (OSError, RuntimeError, ValueError) as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise EvaluationError(f"{hub.path} could not be loaded ({reason}); name a JSONL file in `files` instead") from error


def store(name: str, rows: Iterable[Mapping[str, Any]], folder: Path, origin: str) -> Path:
    """Writes `<folder>/<name>.jsonl`, checks it as a run will, and enters it into the manifest.

    Raises EvaluationError if the rows are not this benchmark; nothing is kept then.
    """
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}.jsonl"
    part = folder / f".{name}.jsonl.part"
    part.write_text("".join(json.dumps(dict(r), ensure_ascii=False) + "\n" for r in rows), encoding="utf-8")
    try:
        questions = load_questions(name, "prefetched", {name: str(part)}, folder)
    except EvaluationError:
        part.unlink()
        raise
    os.replace(part, path)
    entries = read_manifest(folder) | {path.name: {"url": origin, **facts(path), "dataset_hash": questions.dataset_hash}}
    manifest = folder / f"{MANIFEST}.part"
    manifest.write_text(json.dumps(entries, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    os.replace(manifest, folder / MANIFEST)
    return path


def main(argv: Sequence[str] | None = None) -> int:
    """0 when everything was fetched or verified, 2 with one sentence otherwise."""
    parser = argparse.ArgumentParser(
        prog="python -m eval.medical_prefetch", description="Fetch medical benchmarks for offline nodes."
    )
    parser.add_argument("names", nargs="*", metavar="TASK", help=f"one of {', '.join(NAMES)}")
    parser.add_argument("--all", action="store_true", help="all of them")
    parser.add_argument("--to", type=Path, required=True, metavar="DIR", help="normally <assets_dir>/medical")
    parser.add_argument("--verify", action="store_true", help="compare the folder with its manifest; no network")
    args = parser.parse_args(argv)
    try:
        if args.verify:
            bad = verify(args.to)
            if bad:
                raise EvaluationError(f"{args.to}: {', '.join(bad)} differ from the manifest; fetch them again")
            return 0
        names = NAMES if args.all else args.names
        unknown = [n for n in names if n not in NAMES]
        if unknown or not names:
            raise EvaluationError(
                f"{unknown[0] if unknown else 'nothing'} cannot be fetched; choose --all or of {', '.join(NAMES)}"
            )
        for name in names:
            hub = TASKS[name].hub
            assert hub is not None
            print(store(name, hub_rows(hub), args.to, f"{hub.path} {hub.config or ''} {hub.split}"))
    except EvaluationError as error:
        print(f"medical_prefetch: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
