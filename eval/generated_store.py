"""Generated texts on disk, one line a problem, written as they come: a killed evaluation goes on where it stopped.

Each line carries a key of everything that decides the text (weights, prompts, settings). Lines of another key, and a last
line torn by a kill, are not used: a text is never taken from another model because a path is the same.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

from eval.generation import Generated


class GeneratedStore:
    """The texts under `folder` that were made under `key`. Each rank appends to a file of its own; all files are read."""

    def __init__(self, folder: Path, key: str, rank: int = 0) -> None:
        self.folder, self.key = folder, key
        self.path = folder / f"generated-{rank}.jsonl"
        folder.mkdir(parents=True, exist_ok=True)

    def read(self) -> dict[str, Generated]:
        """Problem id -> text, of all ranks."""
        found: dict[str, Generated] = {}
        for path in sorted(self.folder.glob("generated-*.jsonl")):
            for line in path.read_text(encoding="utf-8").split("\n"):
                try:
                    row = json.loads(line)
                except json.JSONDecodeError:  # empty, or torn by a kill
                    continue
                if row.pop("key") == self.key:
                    found[row["id"]] = Generated(**row)
        return found

    def append(self, generated: Generated) -> None:
        """Adds one text, after a line break of its own so that a torn line before it stays alone."""
        line = json.dumps({"key": self.key, **asdict(generated)})
        with open(self.path, "a", encoding="utf-8") as f:
            f.write(f"\n{line}\n" if f.tell() else f"{line}\n")
