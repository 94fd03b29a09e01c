"""`clusterft report FOLDER`: report.html and report.md of a finished selection."""

from __future__ import annotations

import argparse

from clusterft.reporting import report_folder


def run(args: argparse.Namespace) -> int:
    for path in report_folder(args.folder, args.others):
        print(path)
    return 0
