"""Why rows are not among those that could be chosen: set aside while reading, or refused by the method.

In: `Rejection`s and a Selection's own refusals. Out: one `Reason` a cause with its count and up to three places.
"""

from __future__ import annotations

from clusterft.records import Pool, Selection
from clusterft.report.facts import Place, Reason
from clusterft.report.text import excerpt, short_names

SHOWN = 3
DETAIL = 160


def reasons_of(pool: Pool, heldout: Pool | None, selection: Selection) -> tuple[Reason, ...]:
    """Most frequent first within each stage; places in source order."""
    rejected = (*pool.rejected, *(() if heldout is None else heldout.rejected))
    names = short_names([r.source for r in rejected] + [e.source for e in pool.examples])
    read: dict[str, list[Place]] = {}
    for one in sorted(rejected, key=lambda r: (r.source, r.line)):
        read.setdefault(one.reason, []).append(Place(names[one.source], one.line, excerpt(one.detail, DETAIL)[0]))
    refused: dict[str, list[Place]] = {}
    rows = sorted((e for e in pool.examples if e.id in selection.rejected), key=lambda e: (e.source, e.line))
    for example in rows:
        refused.setdefault(selection.rejected[example.id], []).append(Place(names[example.source], example.line))
    return (*_counted("reading", read), *_counted("ranking", refused))


def _counted(stage: str, places: dict[str, list[Place]]) -> list[Reason]:
    ordered = sorted(places.items(), key=lambda item: (-len(item[1]), item[0]))
    return [Reason(reason, stage, len(found), tuple(found[:SHOWN])) for reason, found in ordered]
