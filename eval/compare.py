"""`clusterft compare RUN_A RUN_B`: did the subset (A) lose anything against the reference (B)?

    run directories ► load_runs ► eval.comparison.compare_groups ► eval.compare_text ► table, verdict, sentence | --json

Each side is a run directory, its record.json, a run id below --runs-dir, or several of these with commas between them: the
seeds of one method. Per-problem results are read from `<run>/eval/`. Nothing is written.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from clusterft.records import RunRecord
from clusterft.text_rules import printable
from eval.compare_margin import margin_notes
from eval.compare_text import to_json, to_markdown
from eval.comparison import Comparison, compare_groups, compare_records
from eval.per_problem import Problems, read_problems

__all__ = ["Comparison", "compare_groups", "compare_records", "compare_runs", "load_runs", "main"]


def load_run(name: str, runs_dir: Path) -> tuple[RunRecord, Problems]:
    """The record of one run with its per-problem results. Raises ValueError naming what was looked for and where."""
    given = Path(name)
    for path in (given, given / "record.json", runs_dir / name / "record.json"):
        if path.is_file():
            return _read(path), read_problems(path.parent / "eval")
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


def _read(path: Path) -> RunRecord:
    try:
        return RunRecord.from_json(json.loads(path.read_text(encoding="utf-8")))
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path}: not a run record ({error}); run the cell again") from error


def load_runs(side: str, runs_dir: Path) -> tuple[list[RunRecord], dict[str, Problems]]:
    """All runs of one side, named with commas between them, and run id -> per-problem results."""
    names = [n.strip() for n in side.split(",") if n.strip()]
    if not names:
        raise ValueError("a side of the comparison names no run")
    loaded = [load_run(n, runs_dir) for n in names]
    return [r for r, _ in loaded], {r.run_id: p for r, p in loaded}


def compare_runs(
    side_a: str,
    side_b: str,
    runs_dir: Path,
    margin: float = 1.0,
    margin_nats: float = 0.01,
    choices: Sequence[str] = (),
) -> Comparison:
    """`compare_groups` for runs on disk. Raises ValueError with one sentence for a person."""
    a, problems_a = load_runs(side_a, runs_dir)
    b, problems_b = load_runs(side_b, runs_dir)
    both = {r.run_id for r in a} & {r.run_id for r in b}
    if both:
        raise ValueError(f"run {min(both)} stands on both sides: it would be compared with itself")
    found = compare_groups(a, b, margin, margin_nats, problems_a | problems_b, choices)
    return replace(found, notes=(*found.notes, *margin_notes(found, b)))


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(prog="clusterft compare", description="Is A (a subset, say) no worse than B (all data, say)?")
    p.add_argument("run_a", metavar="RUN_A", help="candidate: run directory, record.json or run id; several with commas (seeds)")
    p.add_argument("run_b", metavar="RUN_B", help="reference, in the same form")
    p.add_argument("--margin", type=float, default=1.0, help="largest loss that you would accept, in points (default 1.0)")
    p.add_argument("--margin-nats", type=float, default=0.01, help="the same for losses, in nats (default 0.01)")
    p.add_argument("--runs-dir", type=Path, default=Path("runs"), help="where run ids are looked for (default runs)")
    p.add_argument("--choose", action="append", default=[], metavar="RUN_ID", help="the run that counts where two contradict")
    p.add_argument("--json", action="store_true", help="everything as JSON")
    return p


def main(argv: Sequence[str] | None = None) -> int:
    """Exit status 0 after a comparison, whatever the verdict; 2 with one sentence where none can be made."""
    args = parser().parse_args(argv)
    try:
        found = compare_runs(args.run_a, args.run_b, args.runs_dir, args.margin, args.margin_nats, args.choose)
    except ValueError as error:
        print(f"error: {printable(str(error))}", file=sys.stderr)
        return 2
    print(
        json.dumps(to_json(found), indent=1, ensure_ascii=False) if args.json else to_markdown(found),
        end="\n" if args.json else "",
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
