"""Text that a stranger wrote, made safe to look at: nothing invisible, nothing that turns the reading direction, nothing endless.

In: any Python string, lone surrogates included. Out: text that is valid UTF-8. HTML escaping is the templates' own work.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import PurePath

EXCERPT = 400
"""Characters shown of each piece of a row."""

# C0 without tab and line feed, DEL, C1; direction marks, embeddings, overrides and isolates; zero-width space, word joiner and
# invisible operators, BOM; line and paragraph separators; surrogates; noncharacters; tag characters. U+200C and U+200D stay:
# Persian, Hindi and joined emoji need them.
_HIDDEN = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200b\u200e\u200f\u2028-\u202e\u2060-\u206f\ufeff\ud800-\udfff\ufff9-\ufffb\ufffe\uffff"
    "\U000e0000-\U000e007f]"
)


def visible(text: str) -> str:
    """The text with every invisible or direction-changing character written out as [U+XXXX]; line ends become line feeds."""
    return _HIDDEN.sub(lambda m: f"[U+{ord(m.group()):04X}]", text.replace("\r\n", "\n"))


def excerpt(text: str, limit: int = EXCERPT) -> tuple[str, int]:
    """The first `limit` characters and how many were left out."""
    return (text, 0) if len(text) <= limit else (text[:limit], len(text) - limit)


def short_names(sources: Iterable[str]) -> dict[str, str]:
    """source -> file name, or the whole source where two share a name."""
    names = {s: PurePath(s).name or s for s in set(sources)}
    counts: dict[str, int] = {}
    for name in names.values():
        counts[name] = counts.get(name, 0) + 1
    return {s: name if counts[name] == 1 else s for s, name in names.items()}


_MARKS = re.compile(r"[\\`*_\[\]<>#|~&@:$]|(?<=www)\.", re.IGNORECASE)


def md_inline(text: str) -> str:
    """Text inside a Markdown line or table cell, not at its beginning: every mark that could mean something there is escaped.

    The colon, the at sign and the dot of www. would make links of bare addresses.
    """
    return _MARKS.sub(lambda m: "\\" + m.group(), " ".join(visible(text).split()))


def md_code(text: str) -> str:
    """A file name or command inside a Markdown line or table cell, as code where that is unambiguous."""
    flat = " ".join(visible(text).split())
    return f"`{flat}`" if flat and not re.search(r"[`|\\]", flat) else md_inline(text)


def md_block(text: str) -> str:
    """Text as a fenced block. The fence is longer than any run of backticks in it, so the text cannot end it."""
    shown = visible(text)
    fence = "`" * (max((len(run) for run in re.findall(r"`+", shown)), default=0) + 1)
    fence = max(fence, "```", key=len)
    return f"{fence}text\n{shown}\n{fence}"
