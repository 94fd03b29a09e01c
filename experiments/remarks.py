"""What stands below a table in words: cells without a usable run, and what a reader must know to compare its numbers fairly."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from experiments.cellruns import CellRun, by_line
from experiments.spec import NOT_BUILT, ExperimentConfig
from experiments.table import Line, Told

KEEPS_ALL = Told("keeps all data: there is no share saved to divide by")


def describe_problems(runs: list[CellRun], lines: Sequence[Line] = ()) -> list[str]:
    """Every cell without a usable run, with a metric that is no number, or without a value that its line shows, in order of position.

    Seeds of one line with the same reason share an entry; so do all cells of a row that is not built yet.
    """
    values = {(line.row, line.column): line.values for line in lines}
    groups: dict[tuple[str, str, str], list[CellRun]] = {}
    for one in runs:
        run, cell = one.run, one.cell
        if run.state == NOT_BUILT:
            groups.setdefault((cell.row, "", run.reason), [])
        elif run.state != "complete":
            groups.setdefault((cell.row, cell.column, f"{run.state}: {run.reason}"), []).append(one)
        else:
            reasons = [f"{name} is not a number" for name in run.stored.bad_metrics] if run.stored is not None else []
            reasons += [v.problems[cell.seed] for v in values.get(cell.line, {}).values() if cell.seed in v.problems]
            for reason in dict.fromkeys(r for r in reasons if not isinstance(r, Told)):
                groups.setdefault((cell.row, cell.column, reason), []).append(one)
    return [_problem(*key, found) for key, found in groups.items()]


def problem_sets(runs: list[CellRun], name: str) -> dict[frozenset[str], list[CellRun]]:
    """Hashes of the problems that a metric was scored on -> complete runs that scored it on just these, the most usual first."""
    found: dict[frozenset[str], list[CellRun]] = {}
    for one in runs:
        if one.run.state == "complete" and one.run.stored is not None:
            hashes = frozenset(m.dataset_hash for m in one.run.stored.record.metrics if f"{m.task}/{m.name}" == name)
            if hashes:
                found.setdefault(hashes, []).append(one)
    return dict(sorted(found.items(), key=lambda item: (-len(item[1]), sorted(item[0]))))


def mixed_problems(runs: list[CellRun], names: Iterable[str]) -> list[str]:
    """Metrics that not all runs were scored for on the same problems: their numbers stand in several columns and compare nothing."""
    found = []
    for name in names:
        usual, *others = [(_hashes(hashes), its) for hashes, its in problem_sets(runs, name).items()] or [("", [])]
        differ = "; ".join(f"{hashes} for {places(its, runs)}" for hashes, its in others)
        if differ:
            found.append(f"{name} was not scored on the same problems everywhere: {usual[0]}, but {differ}")
    return found


def _hashes(hashes: Iterable[str]) -> str:
    return " and ".join(digest[:8] or "problems that are not named" for digest in sorted(hashes))


def places(some: list[CellRun], runs: list[CellRun]) -> str:
    """ "Random r=0.50 seeds 0, 2; CluSTER r=1.00": the lines of some runs, with the seeds where the line has other complete runs."""
    whole = {group[0].cell.line: sum(one.run.state == "complete" for one in group) for group in by_line(runs)}
    return "; ".join(_line(group, len(group) < whole[group[0].cell.line]) for group in by_line(some))


def _line(group: list[CellRun], with_seeds: bool) -> str:
    name = " ".join(part for part in group[0].cell.line if part)
    return f"{name} {_seeds([one.cell.seed for one in group])}" if with_seeds else name


def _seeds(seeds: Sequence[int]) -> str:
    return f"seed={seeds[0]}" if len(seeds) == 1 else f"seeds {', '.join(map(str, seeds))}"


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


def without_saving(lines: Sequence[Line]) -> list[str]:
    """Names runs that have no time saved per data saved because they save no data: nothing is missing there."""
    found = []
    for line in lines:
        seeds = sorted({s for value in line.values.values() for s, reason in value.problems.items() if reason == KEEPS_ALL})
        if seeds:
            found.append(f"{line.name} {_seeds(seeds)} {KEEPS_ALL}")
    return found


def provenance_notes(runs: list[CellRun]) -> list[str]:
    """Says which numbers no commit can give again, and which lines mix runs of several commits."""
    made = [one for one in runs if one.run.state == "complete"]
    dirty = [one for one in made if one.run.stored and one.run.stored.record.dirty]
    mixed = [group for group in by_line(made) if len({one.run.stored.record.commit for one in group if one.run.stored}) > 1]
    notes = []
    if dirty:
        which = "all runs" if len(dirty) == len(made) else places(dirty, runs)
        notes.append(f"made from a working tree with uncommitted changes: {which}")
    if mixed:
        notes.append(f"seeds made at different commits: {'; '.join(_line(group, False) for group in mixed)}")
    return notes


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
        gaps = {s: abs(own.by_seed[s] - base.by_seed[s]) for s in sorted(own.by_seed.keys() & base.by_seed.keys())}
        if max(gaps.values(), default=0.0) <= 0.05:
            continue
        means = f"{own.mean:.1f}", f"{base.mean:.1f}"
        if means[0] != means[1]:
            found.append(f"{line.name} kept {means[0]} % of the data and {spec.reference} {means[1]} %: not an equal budget")
            continue
        seed = max(gaps, key=lambda s: gaps[s])
        widest = f"seed {seed}: {own.by_seed[seed]:.1f} % and {base.by_seed[seed]:.1f} %"
        found.append(
            f"{line.name} and {spec.reference} kept {means[0]} % of the data, but not an equal budget on every seed ({widest})"
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
