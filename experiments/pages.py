"""Pages about results, made from the committed tables: results/<scale>/README.md and docs/findings.md.

    python -m experiments.pages            write them again
    python -m experiments.pages --check    exit 1 if one of them would change

A table's command writes them too when it ends, so that they never lag behind.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

from clusterft.atomic import write_atomic
from experiments.claims import ABSENT, CLAIMS, FAILS, HOLDS, OPEN, REMARKS, Finding, findings
from experiments.cost_check import check_markdown
from experiments.reading import read_tables, scales
from experiments.recordstore import Records, load_records
from experiments.render import check_texts
from experiments.table import Table

ROOT = Path(__file__).resolve().parents[1]
FINDINGS = "docs/findings.md"
MEANINGLESS = ("smoke",)
"""Scales whose numbers say nothing about a claim."""


def index_markdown(scale: str, tables: Mapping[str, Table], records: Records) -> str:
    """The front page of one scale's results: what they are, every table with its state, and how the cost model fares there."""
    note = next((table.scale_note for table in tables.values()), "")
    runs = records.runs()
    rows = ["| Experiment | What | State | Files |", "|---|---|---|---|"]
    for table in tables.values():
        state = "complete" if table.final else "not final, see there what is missing"
        kinds = " · ".join(f"[{kind}]({table.id}.{kind})" for kind in ("csv", "tex", "json"))
        rows.append(f"| [{table.id}]({table.id}.md) | {table.title} | {state} | {kinds} |")
    parts = [
        f"# Results at scale {scale}",
        f"{note}.".replace("..", "."),
        f"Made by `python run.py +experiment=ID +scale={scale}` from {len(runs)} runs, whose records lie in `records/` and whose diagnostics lie in "
        f"`artifacts/`. `python run.py +experiment=ID +scale={scale} check=true` makes a table again from those and says whether a file would "
        f'change; `python run.py --explain ID "LINE" COLUMN +scale={scale}` names the runs behind a number, LINE with its ratio as in "CluSTER r=1.00". What follows for the paper\'s claims stands in `{FINDINGS}`.',
        "\n".join(rows),
        check_markdown(run.stored.record for run in runs if run.stored),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


PREFACE = """# Findings

The paper's claims against the tables that are committed in `results/`, claim by claim. This page is made from them by
`python -m experiments.pages`; no number in it was typed.

How to read it: a difference is paired by seed and stands with its 95 % Student interval. **{holds}** means that the whole interval is on the
claimed side of zero, **{fails}** that all of it is on the other side, **{open}** that it has zero inside or no
width: seeds that differ by the very same are no certainty. "No worse" is judged against a margin
in place of zero: {points:g} percentage point or {nats:g} nats. With three seeds intervals are wide, so that most small effects, real or not, end
as the last; and of many numbers about one in twenty has zero outside its interval by chance. **{absent}**: no committed run says anything."""


def findings_page(by_scale: Mapping[str, Mapping[str, Table]]) -> str:
    """docs/findings.md: a summary over scales, then the evidence for each."""
    found = {scale: findings(tables) for scale, tables in by_scale.items()}
    parts = [PREFACE.format(holds=HOLDS, fails=FAILS, open=OPEN, absent=ABSENT, points=1.0, nats=0.02)]
    parts += ["## In short", _summary(found)]
    for scale, tables in by_scale.items():
        note = next((table.scale_note for table in tables.values()), "")
        parts += [f"## Scale {scale}", f"{note}.".replace("..", "."), *_evidence(found[scale])]
    return "\n\n".join(parts) + "\n"


def _summary(found: Mapping[str, list[Finding]]) -> str:
    rows = ["| Claim of the paper | " + " | ".join(found) + " |", "|---|" + "---|" * len(found)]
    for claim in CLAIMS:
        cells = [_counted([f.verdict for f in its if f.claim == claim]) for its in found.values()]
        rows.append(f"| {claim} | " + " | ".join(cells) + " |")
    return "\n".join(rows) if found else "No results are committed."


def _counted(verdicts: list[str]) -> str:
    """ "holds in 2 of 6, cannot tell in 4"; one number alone is its verdict."""
    counts = Counter(verdicts)
    if len(counts) == 1:
        (verdict,) = counts
        return verdict if len(verdicts) == 1 or verdict == ABSENT else f"{verdict} in all {len(verdicts)}"
    parts = [f"{verdict} in {counts[verdict]}" for verdict in (HOLDS, FAILS, OPEN) if counts[verdict]]
    return f"{', '.join(parts)} of {len(verdicts)}"


def _evidence(found: list[Finding]) -> list[str]:
    parts = []
    for claim in CLAIMS:
        mine = [f for f in found if f.claim == claim]
        parts.append(f"### {claim[0].upper()}{claim[1:]}?")
        if [f.verdict for f in mine] == [ABSENT]:
            parts.append("Not measured at this scale.")
            continue
        if claim in REMARKS:
            parts.append(REMARKS[claim])
        rows = ["| Where | Number | Ours | Says |", "|---|---|---|---|"]
        rows += [f"| {f.where} | {f.what} | {f.evidence} | {f.verdict} |" for f in mine]
        parts.append("\n".join(rows))
    return parts


def pages(root: Path) -> dict[str, str]:
    """Path from the root -> text, of every page that the committed results give."""
    results = root / "results"
    by_scale = {scale: read_tables(results / scale) for scale in scales(results)}
    made = {
        f"results/{scale}/README.md": index_markdown(scale, tables, load_records([results / scale / "records"]))
        for scale, tables in by_scale.items()
    }
    made[FINDINGS] = findings_page({scale: tables for scale, tables in by_scale.items() if scale not in MEANINGLESS})
    return made


def write_pages(root: Path, scale: str | None = None) -> list[Path]:
    """Writes the pages, all or those that results of one scale can have changed."""
    written = []
    for name, text in pages(root).items():
        if scale in (None, name.split("/")[1]) or (name == FINDINGS and scale not in MEANINGLESS):
            write_atomic(root / name, text)
            written.append(root / name)
    return written


def main(arguments: list[str]) -> int:
    made = pages(ROOT)
    if "--check" in arguments:
        made = {name: text for name, text in made.items() if name.split("/")[1] not in MEANINGLESS}
        changed = check_texts(made, ROOT)
        print("\n".join(changed) or f"{len(made)} pages are what the committed results give")
        return int(bool(changed))
    print("written:", ", ".join(str(path.relative_to(ROOT)) for path in write_pages(ROOT)))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
