"""Small rules about text that loading and prompting share: when a text is empty, and what counts as "no input".

In: text. Out: a decision. No other module may have its own idea of these.
"""

from __future__ import annotations

import unicodedata

NO_INPUT_SENTINEL = "<noinput>"
"""MedInstruct writes this where a row has no input; printed under "### Input:" it would teach the model nonsense."""

_PLACEHOLDERS = frozenset({"n/a", "na", "none", "null", "nan", "todo", "tbd", "-", "...", "…", "?"})


def is_empty(text: str) -> bool:
    """True when no character lies outside the Unicode categories Z* (separators) and C* (control, format, unassigned)."""
    return all(unicodedata.category(char)[0] in "ZC" for char in text)


def normalise_input(text: str) -> str:
    """The input block, or "" where the row has none: empty text, `<noinput>` in any case, and exactly "NA" ("DNA" stays)."""
    if text == "NA" or text.strip().lower() == NO_INPUT_SENTINEL or is_empty(text):
        return ""
    return text


def is_placeholder(text: str) -> bool:
    """True for answers such as "N/A" that are kept, yet worth a line in the report ("0" and "false" are real answers)."""
    return len(text) < 8 and text.strip().lower() in _PLACEHOLDERS


def printable(text: str, keep: str = "") -> str:
    """The text with "?" for each control character and half pair: names out of data must not move a cursor or break a line."""
    return "".join(c if c.isprintable() or c in keep else "?" for c in text)


def has_lone_surrogate(text: str) -> bool:
    """True when the text cannot be written as UTF-8, which a JSON escape such as \\ud800 makes possible."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return True
    return False
