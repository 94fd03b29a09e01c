"""The runs of one method: complete ones, what they are called, and whether two groups may be compared at all.

    RunRecords ► Group (one method, several seeds) ► check_same_problems

Refused: a group without a complete run, a group whose runs differ in more than seed and machine, and two groups that were
scored on different problems (other hash or other count). Noted: failed runs, metrics that only one side has, settings in which
the two sides differ beside the selection. No torch.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from clusterft.records import Metric, RunRecord

Key = tuple[str, str]

# What may differ between the seeds of one method, and beside that between two methods without being worth a note.
_NOT_THE_METHOD = ("seed", "runtime", "experiment", "scale", "domain", "cell", "plan", "explain")
_THE_SELECTION = ("selector", "clustering", "budget", "sampler", "baseline_sizes")


COSTS = ("selection_seconds", "training_seconds", "total_seconds")
"""Costs of a record that a comparison shows."""


def is_average(task: str) -> bool:
    """True for a task that is itself a mean over other tasks: it must not enter a further mean."""
    return task == "average" or task.endswith("_average")


@dataclass(frozen=True)
class Group:
    """One method. runs: its complete runs; all_seeds: the failed ones' as well; notes: what was left out."""

    name: str
    runs: tuple[RunRecord, ...]
    all_seeds: tuple[int, ...]
    notes: tuple[str, ...]

    @classmethod
    def of(cls, records: Sequence[RunRecord], side: str) -> Group:
        """Raises ValueError if no run is complete or the runs are not one method."""
        complete = tuple({r.run_id: r for r in records if r.status == "complete"}.values())
        if not complete:
            seen = ", ".join(f"{r.run_id} is {r.status}" for r in records) or "none was given"
            raise ValueError(f"the {side} has no complete run ({seen}); finish one first")
        for other in complete[1:]:
            changed = changed_keys(complete[0].config, other.config, _NOT_THE_METHOD)
            if changed:
                raise ValueError(
                    f"the {side} mixes settings: {complete[0].run_id} and {other.run_id} differ in {', '.join(changed[:3])}; "
                    f"give runs that differ in their seed only, each by its own folder (FOLDER/run/{other.run_id})"
                )
        notes = tuple(f"run {r.run_id} (seed {r.seed}) is {r.status} and left out" for r in records if r.status != "complete")
        return cls(_name(complete), complete, tuple(sorted({r.seed for r in records})), notes)

    @property
    def seeds(self) -> tuple[int, ...]:
        return tuple(sorted({r.seed for r in self.runs}))

    def metric(self, run: RunRecord, key: Key) -> Metric | None:
        """The metric of a run. Raises ValueError if the run has it twice."""
        found = [m for m in run.metrics if (m.task, m.name) == key]
        if len(found) > 1:
            raise ValueError(f"run {run.run_id} has {'/'.join(key)} {len(found)} times; its record is damaged")
        return found[0] if found else None

    def metrics(self) -> dict[Key, Metric]:
        """Every metric that any run has. Raises ValueError if two runs scored it on different problems."""
        out: dict[Key, Metric] = {}
        for run in self.runs:
            for m in run.metrics:
                refuse_other_problems(out.setdefault((m.task, m.name), m), m)
        return out

    def mean_cost(self, key: str) -> float | None:
        """Mean of a cost over the runs; None unless every run has measured it."""
        found = [r.cost.get(key) for r in self.runs]
        return None if any(v is None for v in found) else sum(v for v in found if v is not None) / len(found)

    def differences(self, other: Group) -> list[str]:
        """A note on settings that differ beside the selection, if any do."""
        changed = changed_keys(self.runs[0].config, other.runs[0].config, (*_NOT_THE_METHOD, *_THE_SELECTION))
        return [f"the two also differ in {', '.join(changed)}: not only the selection is compared"] if changed else []


def compare_costs(a: Group, b: Group) -> dict[str, tuple[float, float]]:
    """Cost -> means of both sides, for the costs in seconds that all runs have measured."""
    both = {key: (a.mean_cost(key), b.mean_cost(key)) for key in COSTS}
    return {key: (x, y) for key, (x, y) in both.items() if x is not None and y is not None}


def _name(runs: Sequence[RunRecord]) -> str:
    """The method, and the share of the data that it kept: from the least to the most of its seeds where they differ."""
    method = str(runs[0].selection.get("method", runs[0].run_id))
    shares = [r.selection.get("data_usage") for r in runs]
    if None in shares or min(shares) >= 1:
        return method
    shown = list(dict.fromkeys(f"{100 * share:.0f}" for share in (min(shares), max(shares))))
    return f"{method} ({' to '.join(shown)} % of the data)"


def refuse_other_problems(a: Metric, b: Metric) -> None:
    """Raises ValueError if two metrics of one name were not measured on the same problems."""
    if a.dataset_hash != b.dataset_hash or a.n != b.n or a.unit != b.unit:
        raise ValueError(
            f"{a.task}/{a.name}: measured on {a.n} problems (data {a.dataset_hash or 'not named'}) and on {b.n} "
            f"(data {b.dataset_hash or 'not named'}); these are different benchmarks and are not compared"
        )


def check_same_problems(a: Group, b: Group) -> tuple[dict[Key, Metric], list[str]]:
    """Metrics that both sides have, and notes on the rest. Raises ValueError for different problems or nothing in common."""
    left, right = a.metrics(), b.metrics()
    shared = {k: m for k, m in left.items() if k in right}
    if not shared:
        raise ValueError(f"{a.name} and {b.name} have no metric in common; evaluate both with the same evaluators")
    for key, metric in shared.items():
        refuse_other_problems(metric, right[key])
    notes = [
        f"only {g.name} has {'/'.join(k)}"
        for g, mine, other in ((a, left, right), (b, right, left))
        for k in mine
        if k not in other
    ]
    notes += [f"{'/'.join(k)}: the problems are not named by a hash" for k, m in shared.items() if not m.dataset_hash]
    return shared, notes


def changed_keys(a: Mapping[str, Any], b: Mapping[str, Any], without: Sequence[str]) -> list[str]:
    """Dotted keys whose values differ, leaving out some top-level keys."""
    x = dict(_flat({k: v for k, v in a.items() if k not in without}))
    y = dict(_flat({k: v for k, v in b.items() if k not in without}))
    return [k for k in sorted({*x, *y}) if x.get(k, _ABSENT) != y.get(k, _ABSENT)]


_ABSENT = object()


def _flat(node: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in node.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value
