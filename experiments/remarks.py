"""What stands below a table in words: cells without a usable run, and what a reader must know to compare its numbers fairly."""

from __future__ import annotations

from experiments.cellruns import CellRun, by_line
from experiments.spec import NOT_BUILT, ExperimentConfig
from experiments.table import Line


def describe_problems(runs: list[CellRun]) -> list[str]:
    """Every cell without a usable run or with a metric that is no number, in order of position.

    Seeds of one line with the same reason share an entry; so do all cells of a row that is not built yet.
    """
    groups: dict[tuple[str, str, str], list[CellRun]] = {}
    for one in runs:
        run, cell = one.run, one.cell
        if run.state == NOT_BUILT:
            groups.setdefault((cell.row, "", run.reason), [])
        elif run.state != "complete":
            groups.setdefault((cell.row, cell.column, f"{run.state}: {run.reason}"), []).append(one)
        elif run.stored is not None and run.stored.bad_metrics:
            reason = f"{', '.join(run.stored.bad_metrics)} is not a number"
            groups.setdefault((cell.row, cell.column, reason), []).append(one)
    return [_problem(*key, found) for key, found in groups.items()]


def _problem(row: str, column: str, reason: str, found: list[CellRun]) -> str:
    line = f"{row} {column}".rstrip()
    if not found:
        return f"{line}: {reason}"
    if len(found) == 1:
        return f"{line} seed={found[0].cell.seed}: {reason} (run {found[0].run.run_id})"
    seeds = ", ".join(str(one.cell.seed) for one in found)
    return f"{line} seeds {seeds}: {reason} (runs {', '.join(one.run.run_id for one in found)})"


def describe_notes(runs: list[CellRun]) -> list[str]:
    """Remarks on runs that are usable all the same."""
    return list(dict.fromkeys(f"{one.cell.name}: {note} (run {one.run.run_id})" for one in runs for note in one.run.notes))


def unequal_budgets(spec: ExperimentConfig, lines: list[Line]) -> list[str]:
    """Names lines that kept another share of the data than the reference of their column: their difference is not one at equal budget."""
    if spec.reference is None or spec.reference in spec.once or "data_usage" not in spec.show:
        return []
    bases = {line.column: line.values["data_usage"] for line in lines if line.row == spec.reference}
    found = []
    for line in lines:
        own, base = line.values["data_usage"], bases.get(line.column)
        if base is None or not own.has_mean or not base.has_mean:
            continue
        if any(abs(own.by_seed[s] - base.by_seed[s]) > 0.05 for s in own.by_seed.keys() & base.by_seed.keys()):
            found.append(
                f"{line.name} kept {own.mean:.1f} % of the data and {spec.reference} {base.mean:.1f} %: not an equal budget"
            )
    return found


def shared_model_work(spec: ExperimentConfig, runs: list[CellRun]) -> list[str]:
    """Says of which rows the seeds share one pass of model work: the deviation of their selection time is that of choosing alone."""
    if not {"selection_seconds", "feature_seconds"} & set(spec.show):
        return []
    shared = []
    for group in by_line(runs):
        stored = [
            one.run.stored.record.cost.get("feature_seconds") for one in group if one.run.stored and one.run.state == "complete"
        ]
        if len(stored) > 1 and stored[0] and len(set(stored)) == 1:
            shared.append(group[0].cell.row)
    names = ", ".join(dict.fromkeys(shared))
    return [f"selection time of {names}: model work was done once and counts in full for every seed"] if shared else []
