"""The report of a selection: one HTML page without network or script, and the same facts as Markdown.

    gather(pool, encoded, selection, features, ...) ► ReportFacts ► write_report(facts, folder) ► report.html, report.md

`facts` says what a report knows, `gather` finds it out (arrays and records in, no model, no disk), `charts` draws with matplotlib,
`html` and `markdown` write. Charts are static SVG inside the page: a script library would weigh some megabytes a report, needs
scripts to be allowed, prints badly and cannot follow the reader's light or dark scheme; the SVG takes its colours from the page's
style sheet and its text from the page's font.
"""

from __future__ import annotations

from pathlib import Path

from clusterft.report.facts import ReportFacts
from clusterft.report.gather import gather

__all__ = ["ReportFacts", "gather", "write_report"]


def write_report(facts: ReportFacts, folder: Path) -> list[Path]:
    """Writes `report.html` and `report.md` into an existing folder and returns their paths. Each file is whole or absent.

    Raises FileNotFoundError if the folder is absent.
    """
    from clusterft.report.html import html_report
    from clusterft.report.markdown import markdown_report

    if not folder.is_dir():
        raise FileNotFoundError(f"{folder} is not a folder; make it before the report is written")
    written = []
    for name, text in (("report.html", html_report(facts)), ("report.md", markdown_report(facts))):
        part, final = folder / f".{name}.part", folder / name
        part.write_bytes(text.encode("utf-8"))
        part.replace(final)
        written.append(final)
    return written
