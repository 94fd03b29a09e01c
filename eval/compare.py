"""`clusterft compare RUN_A RUN_B`: did the subset (A) lose anything against the reference (B)?

    run directories ► load_runs ► eval.comparison.compare_groups ► eval.compare_text ► table, verdict, sentence | --json

Each side is a run directory, its record.json, a run id below --runs-dir, or several of these with commas between them: the
seeds of one method. Per-problem results are read from `<run>/eval/`. Scores that were made elsewhere come as a file:
`compare results.csv full` sets every method in it against `full` (see eval.settle for its columns). Nothing is written.
"""

from __future__ import annotations

import argparse
import json
import math
import shlex
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from clusterft.command_line import OneSentenceParser
from clusterft.records import RunRecord, parse_record
from clusterft.text_rules import printable
from eval.compare_margin import margin_notes
from eval.compare_text import to_json, to_markdown
from eval.comparison import Comparison, compare_groups, compare_records
from eval.per_problem import Problems, read_problems
from eval.seed_table import lost_nothing_table
from eval.settle import read_results_csv

__all__ = ["Comparison", "compare_groups", "compare_records", "compare_runs", "load_runs", "main"]


def load_run(name: str, runs_dir: Path) -> tuple[RunRecord, Problems, list[str]]:
    """The record of one run with its per-problem results, and what of it was left out. Raises ValueError naming what was looked for and where."""
    given = Path(name)
    for path in (given, given / "record.json", runs_dir / name / "record.json"):
        if path.is_file():
            record, left_out = _read(path)
            return record, read_problems(path.parent / "eval"), left_out
    if all((given / file).is_file() for file in ("header.json", "selection.parquet")):
        raise ValueError(_not_evaluated(given))
    raise ValueError(
        f"{name}: no record.json in {given} nor in {runs_dir / name}; a run writes it last, "
        "so it is unfinished or elsewhere (--runs-dir)"
    )


def _not_evaluated(folder: Path) -> str:
    """What is still to be done with a folder of `clusterft select` that has no record."""
    shown = shlex.quote(str(folder))
    if any(folder.glob("run/*/train/result.json")):
        return f"{folder} has no evaluated run yet: clusterft eval {shown}"
    return f"{folder} has no evaluated run yet: clusterft train {shown}, then clusterft eval {shown}"


def _read(path: Path) -> tuple[RunRecord, list[str]]:
    """The record, and a sentence for each metric that is no finite number: left out, so that the other metrics can be compared."""
    try:
        record, bad = parse_record(json.loads(path.read_text(encoding="utf-8")))
        return record, [
            f"run {record.run_id} (seed {record.seed}): {name} is {value} and left out" for name, value in bad.items()
        ]
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path}: not a run record ({error}); run the cell again") from error


def load_runs(side: str, runs_dir: Path) -> tuple[list[RunRecord], dict[str, Problems], list[str]]:
    """All runs of one side, named with commas between them, run id -> per-problem results, and what was left out."""
    names = [n.strip() for n in side.split(",") if n.strip()]
    if not names:
        raise ValueError("a side of the comparison names no run")
    loaded = [load_run(n, runs_dir) for n in names]
    return [r for r, _, _ in loaded], {r.run_id: p for r, p, _ in loaded}, [text for _, _, notes in loaded for text in notes]


def compare_runs(
    side_a: str,
    side_b: str,
    runs_dir: Path,
    margin: float = 1.0,
    margin_nats: float = 0.01,
    choices: Sequence[str] = (),
) -> Comparison:
    """`compare_groups` for runs on disk. Raises ValueError with one sentence for a person."""
    a, problems_a, notes_a = load_runs(side_a, runs_dir)
    b, problems_b, notes_b = load_runs(side_b, runs_dir)
    both = {r.run_id for r in a} & {r.run_id for r in b}
    if both:
        raise ValueError(f"run {min(both)} stands on both sides: it would be compared with itself")
    found = compare_groups(a, b, margin, margin_nats, problems_a | problems_b, choices)
    return replace(found, notes=(*notes_a, *notes_b, *found.notes, *margin_notes(found, b)))


def check_margins(points: float, nats: float) -> None:
    """Raises ValueError for a margin that is no finite number above 0: with an infinite one nothing could be worse."""
    for option, value in (("--margin", points), ("--margin-nats", nats)):
        if not (math.isfinite(value) and value > 0):
            raise ValueError(f"{option} {value}: a margin is a finite number above 0")


def parser() -> argparse.ArgumentParser:
    p = OneSentenceParser(prog="clusterft compare", description="Is A (a subset, say) no worse than B (all data, say)?")
    p.add_argument(
        "run_a",
        metavar="RUN_A",
        help="candidate: run directory, record.json or run id; several with commas (seeds); or results.csv",
    )
    p.add_argument("run_b", metavar="RUN_B", help="reference, in the same form; beside results.csv the name of a method in it")
    p.add_argument("--margin", type=float, default=1.0, help="largest loss that you would accept, in points (default 1.0)")
    p.add_argument("--margin-nats", type=float, default=0.01, help="the same for losses, in nats (default 0.01)")
    p.add_argument("--runs-dir", type=Path, default=Path("runs"), help="where run ids are looked for (default runs)")
    p.add_argument("--choose", action="append", default=[], metavar="RUN_ID", help="the run that counts where two contradict")
    p.add_argument("--json", action="store_true", help="everything as JSON")
    return p


def main_csv(args: argparse.Namespace) -> int:
    """Every method of a results.csv against one of them."""
    table = lost_nothing_table(read_results_csv(Path(args.run_a)), args.run_b, args.margin, choices=args.choose)
    print(
        json.dumps(table.to_json(), indent=1, ensure_ascii=False) if args.json else table.to_text(), end="\n" if args.json else ""
    )
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    """Exit status 0 after a comparison, whatever the verdict; 2 with one sentence where none can be made."""
    args = parser().parse_args(argv)
    try:
        check_margins(args.margin, args.margin_nats)
        if args.run_a.endswith(".csv"):
            return main_csv(args)
        found = compare_runs(args.run_a, args.run_b, args.runs_dir, args.margin, args.margin_nats, args.choose)
    except (ValueError, FileNotFoundError) as error:
        print(f"error: {printable(str(error))}", file=sys.stderr)
        return 2
    print(
        json.dumps(to_json(found), indent=1, ensure_ascii=False) if args.json else to_markdown(found),
        end="\n" if args.json else "",
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
