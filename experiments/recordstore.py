"""Reads record.json files for tables: what is complete, what failed, what contradicts itself.

In come one or several folders: run directories (`*/record.json`) or exported records (`*.json`). Out comes `Records`, from which
`plan` and `aggregate` ask one run at a time. Unlike `clusterft.store`, which writes one machine's runs, this reader may see the
same run from two machines, numbers that are none, and files that are no record: it names them instead of refusing the table.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from clusterft.atomic import write_atomic
from clusterft.inputs import changed_input
from clusterft.records import RECORD_SCHEMA, Metric, RunRecord, is_number
from clusterft.records import parse_record as parse_json


@dataclass(frozen=True)
class Stored:
    """One record as found.

    data         what the file says, word for word: tables read it and exports write it, so that both name the same
    bad_metrics  "task/name" of values that are no finite number; they are not in `record.metrics`, nor are such costs in `record.cost`
    """

    record: RunRecord
    path: Path
    data: Mapping[str, Any]
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
            error = str(stored[0].record.error or "").strip() or f"status {stored[0].record.status}"
            return Run(run_id, "failed", error.splitlines()[0], stored[0], stored[0].artifacts)
        clash = _first_clash(complete) or (self.check_inputs and changed_input(complete[0].record.inputs))
        if clash:
            return Run(run_id, "conflict", clash, complete[0], complete[0].artifacts)
        notes = [f"recorded {len(complete)} times with equal metrics; times are the first's"] if len(complete) > 1 else []
        notes += [f"of another copy {self.unreadable[run_id]}"] if run_id in self.unreadable else []
        return Run(run_id, "complete", "", complete[0], complete[0].artifacts, tuple(notes))

    def runs(self) -> list[Run]:
        return [self.run(run_id) for run_id in sorted(self.found.keys() | self.unreadable.keys())]


def load_records(folders: Sequence[Path], *, check_inputs: bool = False) -> Records:
    """Reads all records below `folders`. Copies of one file count once. check_inputs: for runs of this machine."""
    records = Records(check_inputs=check_inputs)
    seen: set[tuple[str, str]] = set()
    for path in _record_files(folders):
        name = path.parent.name if path.name == "record.json" else path.stem
        try:
            stored = parse_record(path.read_text(encoding="utf-8"), path)
        except UnicodeDecodeError:
            records.unreadable[name] = f"{path.name} cannot be read: it is not UTF-8"
            continue
        except (OSError, ValueError, TypeError, RecursionError) as problem:
            records.unreadable[name] = f"{path.name} cannot be read: {problem}"
            continue
        key = (stored.record.run_id, json.dumps(comparable(stored.data), sort_keys=True))
        if key not in seen:
            seen.add(key)
            records.found.setdefault(stored.record.run_id, []).append(stored)
    return records


def _record_files(folders: Sequence[Path]) -> Iterable[Path]:
    for folder in folders:
        yield from sorted([*Path(folder).glob("*/record.json"), *Path(folder).glob("*.json")])


def parse_record(text: str, path: Path) -> Stored:
    """One record; metrics and costs that are no finite numbers are set apart. Raises ValueError for anything else that is wrong.

    NaN, Infinity and 1e999 are kept as these words: JSON has no other way to hold them, and no reader takes them for numbers.
    """
    data = json.loads(text, parse_constant=str, parse_float=_float_or_text)
    if isinstance(data, Mapping) and data.get("schema") == RECORD_SCHEMA and isinstance(data.get("metrics"), list):
        _refuse_unknown(data, RunRecord)
        _check_metrics(data["metrics"])
    record, bad = parse_json(data)
    if not all(isinstance(facts, Mapping) for facts in record.inputs.values()):
        raise ValueError("its inputs are no facts about files")
    cost = {key: value for key, value in record.cost.items() if value is None or is_number(value)}
    return Stored(replace(record, cost=cost), path, data, tuple(bad))


def _float_or_text(text: str) -> float | str:
    return float(text) if math.isfinite(float(text)) else text


def _refuse_unknown(data: Mapping[str, Any], kind: type[RunRecord] | type[Metric]) -> None:
    unknown = data.keys() - {one.name for one in fields(kind)}
    if unknown:
        raise ValueError(f"no {kind.__name__} has {', '.join(sorted(unknown))}")


_METRIC_TYPES = {"task": str, "name": str, "n": int, "dataset_hash": str}


def _check_metrics(metrics: Sequence[Any]) -> None:
    """Raises ValueError for the first metric that lacks its name or n, and for two values of one metric."""
    for metric in metrics:
        if not isinstance(metric, Mapping):
            raise ValueError("its metrics are no list of objects")
        _refuse_unknown(metric, Metric)
        for key, kind in _METRIC_TYPES.items():
            value = metric.get(key, "" if key == "dataset_hash" else None)
            if not isinstance(value, kind) or isinstance(value, bool):
                raise ValueError(f"of its metric {metric.get('task')}/{metric.get('name')} {key} is {value!r}")
    for (task, name, _), times in Counter((m["task"], m["name"], m.get("dataset_hash", "")) for m in metrics).items():
        if times > 1:
            raise ValueError(f"its metric {task}/{name} stands there {times} times")


def comparable(data: Mapping[str, Any]) -> dict[str, Any]:
    """A record's content without what says only where it was run: two copies of one run compare equal."""
    return {**data, "config": {key: value for key, value in data["config"].items() if key != "runtime"}}


def export_records(records: Records, run_ids: Iterable[str], folder: Path) -> list[Path]:
    """Writes the records of complete runs as `folder/RUN_ID.json`, without `config.runtime`, for committing beside a table."""
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    for run_id in sorted(set(run_ids)):
        run = records.run(run_id)
        if run.state != "complete" or run.stored is None:
            continue
        path = folder / f"{run_id}.json"
        text = json.dumps(comparable(run.stored.data), indent=1, sort_keys=True, allow_nan=False)
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
            write_atomic(path, (source / f"{name}.json").read_bytes())
            written.append(path)
    return written


SHOWN_FACTS = {"selection": ("data_usage", "budget"), "train": ("steps", "tokens", "target_tokens", "last_loss")}
"""What a table shows of a run beside its metrics and its cost: two records of one run may differ in nothing but the cost."""


def _first_clash(complete: Sequence[Stored]) -> str:
    """Names the first metric or shown fact that two complete records of one run give differently, "" if none."""
    first = _facts(complete[0])
    for other in complete[1:]:
        facts = _facts(other)
        for key in sorted(first.keys() | facts.keys()):
            if first.get(key) != facts.get(key):
                return f"two records disagree: {key} is {_told_apart(first.get(key), facts.get(key))}"
    return ""


def _facts(stored: Stored) -> dict[str, Any]:
    """What has to be equal, by name: each metric with the problems behind it, then `SHOWN_FACTS`."""
    found: dict[str, Any] = {}
    problems: dict[str, list[str]] = {}
    for m in sorted(stored.record.metrics, key=lambda m: m.dataset_hash):
        name = f"{m.task}/{m.name}"
        problems.setdefault(name, []).append(m.dataset_hash or "not named")
        place = name if len(problems[name]) == 1 else f"{name} on {problems[name][-1]}"
        found |= {place: m.value, f"{place}, n": m.n, f"{place}, unit": m.unit}
    found |= {f"{name}, problems": " and ".join(hashes) for name, hashes in problems.items()}
    for node, keys in SHOWN_FACTS.items():
        found |= {key: getattr(stored.record, node).get(key) for key in keys}
    return found


def _told_apart(one: Any, other: Any) -> str:
    """ "0.475 and 0.525", with as many digits as it takes."""
    both = [_show(one), _show(other)]
    return " and ".join(both if both[0] != both[1] else [repr(one), repr(other)])


def _show(value: Any) -> str:
    return "absent" if value is None else f"{value:.6g}" if is_number(value) else str(value)
