"""Docstrings of this project as Markdown, for the site: what is aligned in columns in the source becomes a list.

    rows  number of rows          ►  - **rows** number of rows
          that are kept                 that are kept

In: the objects that griffe found. Out: the same objects, their docstrings rewritten. The source stays readable in an editor.
"""

from __future__ import annotations

import re
from typing import Any

import griffe

ENTRY = re.compile(r"^(?P<indent> *)(?P<name>[A-Za-z_][\w.,/* -]*?) {2,}(?P<text>\S.*)$")
"""A name, at least two blanks, its meaning."""


def as_markdown(text: str) -> str:
    """Aligned entries as list items with their continuation lines; everything else as it is, indented blocks as code."""
    out: list[str] = []
    inside, column = False, 0
    for line in text.splitlines():
        entry = ENTRY.match(line)
        if entry and len(entry["indent"]) <= 4:
            if not inside and out and out[-1]:
                out.append("")
            column = entry.start("text")
            out.append(f"- **{entry['name']}** {entry['text']}")
            inside = True
        elif inside and line.strip() and len(line) - len(line.lstrip()) >= min(column, 4):
            out.append(f"  {line.strip()}")
        else:
            if inside and line.strip():
                out.append("")
            inside = inside and not line.strip()
            out.append(line)
    return "\n".join(out)


class PlainDocstrings(griffe.Extension):
    """Rewrites every docstring once, when its object has been read."""

    def on_instance(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = as_markdown(obj.docstring.value)
