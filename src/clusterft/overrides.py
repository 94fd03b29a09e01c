"""The command line before Hydra sees it: what Hydra would take silently and a person did not mean."""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence

_DATA_FILE = re.compile(r"\.(jsonl?|parquet|csv|gz|zst)$")


class UserError(Exception):
    """Something to be mended by the person at the keyboard; the message is one sentence with the remedy."""


def spelled_out(arguments: Sequence[str]) -> list[str]:
    """`--plan`, `--status`, `--check`, `--render` and `--explain TABLE LINE COLUMN` as the overrides that they stand for; the rest stays as it is.

    Raises UserError for an --explain without its three words.
    """
    words, rest = list(arguments), []
    before: list[str] = []
    while words:
        word = words.pop(0)
        if word in ("--plan", "--status", "--check", "--render"):
            rest.append(f"{word[2:]}=true")
        elif word == "--explain":
            named, words = words[:3], words[3:]
            if len(named) < 3 or any("=" in named[i] for i in (0, 2)):
                raise UserError('--explain takes a table, a line and a column: --explain table2 "CluSTER r=1.00" average')
            before.append(f"+experiment={named[0]}")
            rest.append("explain=[" + ",".join(_quoted(one) for one in named[1:]) + "]")
        else:
            rest.append(word)
    return before + rest


def _quoted(text: str) -> str:
    escaped = text.replace('"', '\\"')
    return f'"{escaped}"'


ADDED = ("experiment", "scale")
"""The groups that a person adds with `+`. Anything else added is a setting that nothing reads, a misspelt one mostly."""


def check_additions(arguments: Sequence[str]) -> None:
    """Raises UserError for `+key=value` with a key that is neither a group to add nor Hydra's own."""
    for argument in arguments:
        key = argument.partition("=")[0].lstrip("+")
        if argument.startswith("+") and key.partition("@")[0] not in ADDED and not key.startswith("hydra"):
            raise UserError(
                f"{argument}: '+' would add a setting that nothing reads; a known one is changed without it, and --cfg job prints them all"
            )


def check_command_line(arguments: Sequence[str]) -> None:
    """Raises UserError for orders and values that would be taken silently; warns on stderr about sweeps over data files."""
    check_additions(arguments)
    keys = [a.split("=", 1)[0] for a in arguments]
    if "+scale" in keys and "+experiment" in keys and keys.index("+scale") < keys.index("+experiment"):
        raise UserError(
            "+scale must come after +experiment: the scale replaces model, data and sizes of the experiment before it"
        )
    sweep = "-m" in arguments or "--multirun" in arguments
    for argument in arguments:
        key, _, value = argument.partition("=")
        if key.lstrip("+") == "seed" and re.fullmatch(r"-?0\d+", value):
            raise UserError(f"seed={value} is a text, not a number; write seed={int(value)}")
        if key == "hydra/launcher" and value != "basic" and not sweep:
            raise UserError(f"hydra/launcher={value} only acts on a multirun; add -m, or leave it out to run here")
        if not sweep and _bare_commas(value):
            raise UserError(f"{argument} is ambiguous: {_spellings(key, value)}")
        twice = sorted({part for part in _bare_commas(value) if _bare_commas(value).count(part) > 1})
        if sweep and twice:
            print(f"warning: {argument} names {', '.join(twice)} more than once; equal runs are one run", file=sys.stderr)
        if sweep and any(_DATA_FILE.search(part) for part in _bare_commas(value)):
            print(
                f"warning: {argument} is a sweep over {len(_bare_commas(value))} files; {_spellings(key, value)}", file=sys.stderr
            )


def _bare_commas(value: str) -> list[str]:
    """The parts of a value that Hydra would sweep over; empty when there is no such comma."""
    if value[:1] in "'\"[{(" or "(" in value:
        return []
    parts = re.split(r"(?<!\\),", value)
    return parts if len(parts) > 1 else []


def _spellings(key: str, value: str) -> str:
    escaped = value.replace(",", "\\,")
    return (
        f"a sweep is -m {key}={value}; a list is {key}=[{value}]; one text with a comma is {key}={escaped} (quoted for the shell)"
    )


def one_sentence(problem: Exception) -> str:
    """Hydra's page about an unknown key or option as one sentence: what was not found, and the names that there are."""
    lines = [line.strip() for line in str(problem).split("Config search path")[0].splitlines() if line.strip()]
    options = [i for i, line in enumerate(lines) if line.startswith("Available options")]
    if options:
        head = " ".join(lines[: options[0]]).rstrip(".")
        return f"{head}; known are {', '.join(lines[options[0] + 1 :])}"
    cause = problem.__cause__
    if lines and lines[0].startswith("Error merging override") and cause is not None:
        return f"{lines[0].removeprefix('Error merging override ')}: {str(cause).splitlines()[0]}"
    if "Multiple values for" in str(problem):
        return f"{lines[0].split('. ')[0]}: give it once"
    if lines and lines[0].startswith("Could not override"):
        name = re.search(r"'([a-z]+)'", lines[0])
        if name and name[1] in ADDED:
            return f"{name[1]}=... must be added with a plus: +{name[1]}=..."
        return f"{lines[0].rstrip('.')}: there is no such key; check the spelling, --cfg job prints every key"
    return " ".join(lines)
