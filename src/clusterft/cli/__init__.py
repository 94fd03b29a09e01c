"""The console script `clusterft`: bring your own data.

    clusterft doctor DATA --model M          what is in the data, and what would happen to it
    clusterft select DATA --model M --keep   a subset in a folder
    clusterft train | eval FOLDER            go on with it here, or use your own trainer
    clusterft compare A B                    did the subset lose anything?
    clusterft report FOLDER                  report.html and report.md

Thin: each command calls the stages that `run.py` calls. This module imports nothing heavy, so that `--help` answers at once.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from importlib import import_module

from clusterft import __version__
from clusterft.cli.arguments import add_commands, in_flags
from clusterft.command_line import OneSentenceParser

HANDLERS = {
    "doctor": "clusterft.cli.doctor",
    "select": "clusterft.cli.selecting",
    "train": "clusterft.cli.training",
    "eval": "clusterft.cli.evaluating",
    "report": "clusterft.cli.reporting",
}


def parser() -> argparse.ArgumentParser:
    """The whole command line."""
    p = OneSentenceParser(
        prog="clusterft", description="Choose a subset of instruction data, train on it, see that nothing was lost."
    )
    p.add_argument("--version", action="version", version=f"clusterft {__version__}")
    add_commands(p.add_subparsers(dest="command", required=True, metavar="COMMAND"))
    return p


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit status: 0 fine, 1 something to look at, 2 refused with one sentence."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if arguments[:1] == ["compare"]:  # has a parser of its own
        from clusterft.cli.comparing import run_compare

        return run_compare(arguments[1:])
    args = parser().parse_args(arguments)
    from clusterft.app import said_plainly

    with said_plainly(in_flags):
        return import_module(HANDLERS[args.command]).run(args)
