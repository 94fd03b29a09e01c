"""`clusterft report FOLDER`: report.html and report.md, written by `clusterft.report`."""

from __future__ import annotations

import argparse

from clusterft.export import read_header


def run(args: argparse.Namespace) -> int:
    from clusterft.report import write_report

    read_header(args.folder)
    write_report(args.folder)
    print(args.folder / "report.html")
    return 0
