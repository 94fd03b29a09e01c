"""Reads record.json files for tables: what is complete, what failed, what contradicts itself.

In come one or several folders: run directories (`*/record.json`) or exported records (`*.json`). Out comes `Records`, from which
`plan` and `aggregate` ask one run at a time. Unlike `clusterft.store`, which writes one machine's runs, this reader may see the
same run from two machines, and metrics that are not numbers: it names them instead of refusing the table.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from clusterft.atomic import write_atomic
from clusterft.inputs import changed_input
from clusterft.records import RunRecord
from clusterft.records import parse_record as parse_json


@dataclass(frozen=True)
class Stored:
    """One record as found. `bad_metrics`: "task/name" of values that are no finite number; they are not in `record.metrics`."""

    record: RunRecord
    path: Path
    bad_metrics: tuple[str, ...] = ()

    @property
    def artifacts(self) -> Path:
        """Of a run directory `artifacts/`; of an exported record `../artifacts/RUN_ID/`."""
        if self.path.name == "record.json":
            return self.path.parent / "artifacts"
        return self.path.parent.parent / "artifacts" / self.path.stem


@dataclass(frozen=True)
class Run:
    """What is known of one run id.

    state      complete | failed | conflict | missing; reason: a sentence part for people, "" when complete
    artifacts  folder of the run's artifacts, beside its record; None when there is no record
    """

    run_id: str
    state: str
    reason: str = ""
    stored: Stored | None = None
    artifacts: Path | None = None
    notes: tuple[str, ...] = ()


@dataclass
class Records:
    """All records of some folders, by run id."""

    found: dict[str, list[Stored]] = field(default_factory=dict)
    unreadable: dict[str, str] = field(default_factory=dict)  # run id -> why
    check_inputs: bool = False  # whether a complete run must have been made from files as they are now

    def run(self, run_id: str) -> Run:
        """The state of a run: the same for whoever asks, whatever order the files were found in."""
        stored = self.found.get(run_id, [])
        if not stored:
            reason = self.unreadable.get(run_id)
            return Run(run_id, "failed", reason) if reason else Run(run_id, "missing", "never run")
        complete = [s for s in stored if s.record.status == "complete"]
        if not complete:
            error = stored[0].record.error
            reason = (error or f"status {stored[0].record.status}").strip().splitlines()[0]
            return Run(run_id, "failed", reason, stored[0], stored[0].artifacts)
        clash = _first_clash(complete) or (self.check_inputs and changed_input(complete[0].record.inputs))
        if clash:
            return Run(run_id, "conflict", clash, complete[0], complete[0].artifacts)
        notes = (f"recorded {len(complete)} times with equal metrics; times are the first's",) if len(complete) > 1 else ()
        return Run(run_id, "complete", "", complete[0], complete[0].artifacts, notes)

    def runs(self) -> list[Run]:
        return [self.run(run_id) for run_id in sorted(self.found.keys() | self.unreadable.keys())]


def load_records(folders: Sequence[Path], *, check_inputs: bool = False) -> Records:
    """Reads all records below `folders`. Copies of one file count once. check_inputs: for runs of this machine."""
    records = Records(check_inputs=check_inputs)
    seen: set[tuple[str, str]] = set()
    for path in _record_files(folders):
        text = path.read_text(encoding="utf-8")
        name = path.parent.name if path.name == "record.json" else path.stem
        try:
            stored = parse_record(text, path)
        except (ValueError, TypeError, KeyError) as problem:
            records.unreadable[name] = f"{path.name} cannot be read: {problem}"
            continue
        key = (stored.record.run_id, json.dumps(comparable(stored.record), sort_keys=True))
        if key not in seen:
            seen.add(key)
            records.found.setdefault(stored.record.run_id, []).append(stored)
    return records


def _record_files(folders: Sequence[Path]) -> Iterable[Path]:
    for folder in folders:
        yield from sorted([*Path(folder).glob("*/record.json"), *Path(folder).glob("*.json")])


def parse_record(text: str, path: Path) -> Stored:
    """One record; metrics that are no finite numbers are set apart by name. Raises ValueError for anything else that is wrong."""
    record, bad = parse_json(json.loads(text))
    return Stored(record, path, tuple(bad))


def comparable(record: RunRecord) -> dict[str, Any]:
    """A record without what says only where it was run: two copies of one run compare equal."""
    config = {key: value for key, value in record.config.items() if key != "runtime"}
    return replace(record, config=config).to_json()


def export_records(records: Records, run_ids: Iterable[str], folder: Path) -> list[Path]:
    """Writes the records of complete runs as `folder/RUN_ID.json`, without `config.runtime`, for committing beside a table."""
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    for run_id in sorted(set(run_ids)):
        run = records.run(run_id)
        if run.state != "complete" or run.stored is None:
            continue
        path = folder / f"{run_id}.json"
        text = json.dumps(comparable(run.stored.record), indent=1, sort_keys=True, allow_nan=False)
        write_atomic(path, text + "\n")
        written.append(path)
    return written


def export_artifacts(records: Records, wanted: Mapping[str, Collection[str]], folder: Path) -> list[Path]:
    """Copies artifacts (run id -> names) to `folder/RUN_ID/NAME.json`, so that tables can be made where the runs are not."""
    written = []
    for run_id, names in sorted(wanted.items()):
        source = records.run(run_id).artifacts
        for name in sorted(names):
            if source is None or not (source / f"{name}.json").exists():
                continue
            path = folder / run_id / f"{name}.json"
            path.parent.mkdir(parents=True, exist_ok=True)
            write_atomic(path, (source / f"{name}.json").read_text(encoding="utf-8"))
            written.append(path)
    return written


def _first_clash(complete: Sequence[Stored]) -> str:
    """Names the first metric that two complete records of one run give differently, "" if none."""
    first = _metric_values(complete[0])
    for other in complete[1:]:
        values = _metric_values(other)
        for key in sorted(first.keys() | values.keys()):
            if first.get(key) != values.get(key):
                return f"two records disagree: {key} is {_show(first.get(key))} and {_show(values.get(key))}"
    return ""


def _metric_values(stored: Stored) -> Mapping[str, float]:
    return {f"{m.task}/{m.name}": m.value for m in stored.record.metrics}


def _show(value: float | None) -> str:
    return "absent" if value is None else f"{value:.6g}"
