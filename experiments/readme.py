"""Copies committed results into the README, so that no number in it was typed.

    python -m experiments.readme            rewrite the blocks
    python -m experiments.readme --check    exit 1 if a block differs from its file

A block is `<!-- begin FILE -->` ... `<!-- end -->`; what stands between is replaced by the text of FILE, a path from the root.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
_BLOCK = re.compile(r"(<!-- begin (?P<file>\S+) -->\n).*?(<!-- end -->)", re.DOTALL)


def filled(text: str, root: Path) -> str:
    """`text` with every block filled from its file. Raises FileNotFoundError, naming the block, for a file that is not there."""

    def fill(match: re.Match[str]) -> str:
        path = root / match["file"]
        if not path.is_file():
            raise FileNotFoundError(f"README block {match['file']}: there is no such file; run the command that makes it")
        return f"{match[1]}\n{demoted(path.read_text(encoding='utf-8').strip())}\n\n{match[3]}"

    return _BLOCK.sub(fill, text)


def demoted(text: str) -> str:
    """A page of its own begins with a heading of the first level: two levels down it fits below one of the README's."""
    return re.sub(r"^(?=#+ )", "##", text, flags=re.MULTILINE) if text.startswith("# ") else text


def main(arguments: list[str]) -> int:
    readme = ROOT / "README.md"
    old = readme.read_text(encoding="utf-8")
    new = filled(old, ROOT)
    if "--check" in arguments:
        if new != old:
            print("README.md differs from the committed results; run python -m experiments.readme", file=sys.stderr)
        return int(new != old)
    readme.write_text(new, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
