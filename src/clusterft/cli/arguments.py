"""What each command takes. Plain argparse: nothing heavy is imported here."""

from __future__ import annotations

import argparse
import re
from pathlib import Path
from typing import Any

SELECTORS = ("cluster", "less", "s2l", "ifd", "random", "full")
TEMPLATES = ("alpaca", "magicoder", "chat")

FORMATS = ("auto", "alpaca", "instruction_response", "problem_solution", "sharegpt", "messages")


FLAGS = {
    r"data\.fields\.(prompt|response|input|turns)": r"--field \1=COLUMN",
    r"data\.fields": "--field",
    r"data\.file_format": "--file-format",
    r"data\.holdout_rows": "--holdout",
    r"data\.template": "--template",
    r"trainer\.max_length": "--max-length",
    r"trainer\.epochs": "--epochs",
    r"trainer\.learning_rate": "--learning-rate",
    r"trainer\.workers": "--workers",
    r"clustering\.n_clusters": "--clusters",
    r"selector\.ratio": "--ratio",
    r"runtime\.processes": "--processes",
    r"runtime\.device": "--device",
    r"runtime\.runs_dir": "--out",
}
"""Settings of conf/ -> what a person types here."""


OTHER_WORDS = {
    r"data\.path": "the path",
    r"try \+scale=laptop, which needs neither GPU nor network": "--device cpu needs none",
}
"""What has no flag of its own, and what only `run.py` offers."""


def in_flags(message: str) -> str:
    """A message about settings in the terms of this command line; a setting without a flag is one for --set."""
    for key, flag in (FLAGS | OTHER_WORDS).items():
        message = re.sub(
            rf"(?<![\w.~])(?<!override )(?<!--set ){key}(?![\w.]*\w)=?", lambda found, flag=flag: _worded(found, flag), message
        )
    return message


def _worded(found: re.Match[str], flag: str) -> str:
    return found.expand(flag) + (" " if found[0].endswith("=") else "")


def pair(text: str) -> tuple[str, str]:
    """ "prompt=question" as two names. Raises ArgumentTypeError without an equals sign."""
    ours, equals, theirs = text.partition("=")
    if not equals:
        raise argparse.ArgumentTypeError(f"{text!r}: write OURS=COLUMN, for example prompt=question")
    return ours, theirs


def add_commands(commands: Any) -> None:
    """Adds every command to the sub-parsers of `clusterft`."""
    _doctor(commands.add_parser("doctor", help="what is in the data, and what would happen to it"))
    _select(commands.add_parser("select", help="choose a subset and write it to a folder"))
    _train(commands.add_parser("train", help="fine-tune on a selection"))
    _eval(commands.add_parser("eval", help="score what was trained on a selection"))
    commands.add_parser("compare", help="is run A no worse than run B?", add_help=False)
    report = commands.add_parser("report", help="write report.html and report.md of a selection")
    report.add_argument("folder", type=Path, help="folder written by clusterft select")
    report.add_argument("--with", dest="others", nargs="+", default=[], type=Path, metavar="FOLDER", help="selections to compare")


def _source(p: argparse.ArgumentParser) -> None:
    p.add_argument("data", nargs="+", type=Path, help="files or folders: JSONL, JSON, CSV, Parquet, also .gz and .zst")
    p.add_argument("--model", required=True, metavar="M", help="a name in conf/model, a folder, a GGUF file or a hub id")
    p.add_argument("--template", choices=TEMPLATES, help="prompt format (default alpaca)")
    p.add_argument("--max-length", type=int, metavar="T", help="tokens a row is cut at (default 1024)")
    p.add_argument("--file-format", choices=FORMATS, help="layout of every row (default: recognised)")
    p.add_argument(
        "--field", action="append", default=[], type=pair, metavar="OURS=COLUMN", help="prompt, response, input or turns"
    )
    p.add_argument("--set", dest="settings", action="append", default=[], metavar="KEY=VALUE", help="any other setting of conf/")
    p.add_argument("--strict", action="store_true", help="stop at the first row that cannot be used")
    p.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="where the model runs (default cpu)")


def _doctor(p: argparse.ArgumentParser) -> None:
    _source(p)
    p.add_argument("--json", action="store_true", help="everything as JSON")
    p.description = "Exit status: 0 all well, 1 something to look at, 2 unusable."


def _select(p: argparse.ArgumentParser) -> None:
    _source(p)
    much = p.add_mutually_exclusive_group()
    much.add_argument("--keep", metavar="SHARE", help="share of the pool wanted in the end, for example 0.3")
    much.add_argument("--rows", type=int, metavar="N", help="number of rows; small clusters are exhausted first")
    much.add_argument("--ratio", metavar="R", help="the paper's r: each cluster keeps floor(r n_min) rows")
    p.add_argument("--selector", choices=SELECTORS, default="cluster", help="method (default cluster)")
    p.add_argument("--clusters", type=int, metavar="K", help="number of clusters (default 4)")
    p.add_argument("--seed", type=int, default=0)
    p.add_argument(
        "--holdout",
        type=int,
        metavar="N",
        help="rows set apart (default 64, a tenth of small data): at most 16 and a third for LESS to match, the others for the loss",
    )
    p.add_argument("--out", type=Path, metavar="DIR", help="folder to write (default DATA-SELECTOR)")
    p.add_argument("--no-report", action="store_true", help="leave report.html and report.md out")
    p.add_argument("--dry-run", action="store_true", help="print plan, memory, time and files; write nothing")


def _train(p: argparse.ArgumentParser) -> None:
    p.add_argument("folder", type=Path, help="folder written by clusterft select")
    p.add_argument("--epochs", type=int)
    p.add_argument("--learning-rate", type=float)
    p.add_argument("--workers", type=int, metavar="W", help="workers of a step")
    p.add_argument("--processes", type=int, metavar="P", help="processes that carry the workers (GPUs, or CPU processes)")
    p.add_argument("--device", choices=("cpu", "cuda"), help="as at selection, if left out")
    p.add_argument("--set", dest="settings", action="append", default=[], metavar="KEY=VALUE", help="any other setting of conf/")


def _eval(p: argparse.ArgumentParser) -> None:
    p.add_argument("folder", type=Path, help="folder written by clusterft select and trained by clusterft train")
    p.add_argument("--run", metavar="RUN_ID", help="only this run (default: every trained run without a record)")
    p.add_argument("--json", action="store_true", help="the records as JSON")
