"""The paper's own numbers, from reported.yaml: never more than is known.

`reported(key)` gives the values of one table with their source. A value belongs to a row and, where the ratio is known, to a
column; else `at` says in words where it belongs.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import yaml

NOT_AVAILABLE = "not available"
_FILE = Path(__file__).with_name("reported.yaml")


@dataclass(frozen=True)
class ReportedValue:
    """One number as printed in the paper (percent for shares); `key` is a column key of our tables."""

    row: str
    key: str
    value: float
    column: str | None = None
    at: str | None = None


@dataclass(frozen=True)
class Reported:
    """What the paper says about one table."""

    source: str
    setup: str = ""
    values: tuple[ReportedValue, ...] = ()
    claims: tuple[str, ...] = ()

    def find(self, row: str, column: str, key: str) -> float | None:
        """The value for a table line; None where it is not known. Values that are tied to words (`at`) never match a line."""
        for v in self.values:
            if v.row == row and v.key == key and v.at is None and v.column in (None, column):
                return v.value
        return None

    @property
    def apart(self) -> tuple[ReportedValue, ...]:
        """Values that belong to no line of ours."""
        return tuple(v for v in self.values if v.at is not None)


@lru_cache(maxsize=1)
def _load() -> dict[str, Any]:
    return yaml.safe_load(_FILE.read_text(encoding="utf-8"))


def reported(key: str | None) -> Reported | None:
    """The entry of reported.yaml, None for key None. Raises KeyError naming the known keys."""
    if key is None:
        return None
    data = _load()
    if key not in data or key == "source":
        raise KeyError(f"reported.yaml has no {key!r}; it has {', '.join(k for k in data if k != 'source')}")
    entry = data[key]
    unknown = set(entry) - {"where", "setup", "values", "claims"}
    if unknown:
        raise KeyError(f"reported.yaml, {key}: unknown {', '.join(sorted(unknown))}")
    values = tuple(ReportedValue(**v) for v in entry.get("values", ()))
    return Reported(f"{data['source']}, {entry['where']}", entry.get("setup", ""), values, tuple(entry.get("claims", ())))
