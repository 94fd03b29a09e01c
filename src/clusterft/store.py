"""Run directories: their names, their locks, their records.

    <runs_dir>/<run_id>/config.yaml      first, and never changed
    <runs_dir>/<run_id>/selection/       header.json, selection.parquet
    <runs_dir>/<run_id>/train/           metrics.jsonl, checkpoints
    <runs_dir>/<run_id>/eval/            per-problem results
    <runs_dir>/<run_id>/record.json      last, atomically; only `status: complete` is ever tabulated

A run is named by the hash of the configuration that can change its result, so the same cell of two tables is one run, and two
processes that start in the same second never share a directory by accident. No torch here: tables are built from this module.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from clusterft.atomic import write_atomic
from clusterft.exact import decimal_ratio
from clusterft.locks import try_lock
from clusterft.records import RunRecord

# Nodes that say where, how or why, never what: a run is the same run without them.
_NOT_IDENTITY = (
    "runtime",
    "experiment",
    "scale",
    "domain",
    "baseline_sizes",
    "cell",
    "plan",
    "status",
    "check",
    "render",
    "explain",
)


class StoreError(Exception):
    """A run directory that cannot be used, with the reason and the remedy in one sentence."""


def identity(cfg: DictConfig) -> dict[str, Any]:
    """The part of a configuration that can change a result, in a normal form.

    0.5, "0.5" and "0.50" are one ratio. Where the budget does not come from CluSTER's clusters, the clustering is left out, and a
    selector that keeps everything has no ratio: full data at r = 1.00 and at r = 0.50 is one run. An option that is off (null) is
    left out, so that a new option does not rename the runs that never used it.
    """
    plain = OmegaConf.to_container(cfg, resolve=True)
    assert isinstance(plain, dict)
    return plain_identity(plain)


def plain_identity(plain: Mapping[str, Any]) -> dict[str, Any]:
    """`identity` of a configuration that is plain containers already, interpolations resolved. `plain` stays as it is."""
    kept = {key: value for key, value in plain.items() if key not in _NOT_IDENTITY}
    selector = kept["selector"] = dict(kept["selector"])
    if selector["budget"] in ("match_cluster", "fraction"):
        selector["ratio"] = format(decimal_ratio(selector["ratio"]).normalize(), "f")
    else:
        selector.pop("ratio")
    if selector["budget"] != "rows":
        selector.pop("rows")
    if selector["budget"] != "match_cluster":
        kept.pop("clustering")
    return _without_nulls(kept)


def _without_nulls(node: dict[str, Any]) -> dict[str, Any]:
    return {key: _without_nulls(value) if isinstance(value, dict) else value for key, value in node.items() if value is not None}


def run_id(cfg: DictConfig) -> str:
    """12 hex digits of the hash of `identity(cfg)`."""
    return _hashed(identity(cfg))


def plain_run_id(plain: Mapping[str, Any]) -> str:
    """`run_id` of a configuration that is plain containers already."""
    return _hashed(plain_identity(plain))


def _hashed(kept: Mapping[str, Any]) -> str:
    text = json.dumps(kept, sort_keys=True, ensure_ascii=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:12]


class RunStore:
    """The run directories below `root`."""

    def __init__(self, root: Path) -> None:
        self.root = Path(root)

    def path(self, run: str) -> Path:
        return self.root / run

    def begin(self, cfg: DictConfig) -> Path:
        """Makes the run directory, writes config.yaml first, and returns the directory.

        Raises StoreError if the directory holds another configuration: nothing is overwritten.
        """
        folder = self.path(run_id(cfg))
        folder.mkdir(parents=True, exist_ok=True)
        frozen = folder / "config.yaml"
        if frozen.exists():
            refuse_other_config(frozen, cfg)
        else:
            write_atomic(frozen, OmegaConf.to_yaml(cfg, resolve=True))
        return folder

    @contextmanager
    def lock(self, run: str) -> Iterator[None]:
        """Holds a run for this process; what happens when its holder dies is said in `locks`.

        Raises StoreError, naming the holder, if another process works on it: at once on one host.
        """
        lock, holder = try_lock(self.path(run))
        if lock is None:
            raise StoreError(
                f"run {run} is being worked on by {'another process' if holder is None else f'another process, {holder}'}; "
                "leave it alone or wait for its record.json"
            )
        try:
            yield
        finally:
            lock.release()

    def read(self, run: str) -> RunRecord | None:
        """The record of a run, or None if it has none yet. Raises StoreError for a record that cannot be read."""
        path = self.path(run) / "record.json"
        if not path.exists():
            return None
        try:
            return RunRecord.from_json(json.loads(path.read_text(encoding="utf-8")))
        except (ValueError, TypeError, KeyError) as problem:
            raise StoreError(f"{path} cannot be read ({problem}); move it away to run this cell again") from problem

    def write(self, record: RunRecord) -> Path:
        path = self.path(record.run_id) / "record.json"
        write_atomic(path, json.dumps(record.to_json(), indent=1, sort_keys=True, allow_nan=False) + "\n")
        return path

    def records(self) -> Iterator[RunRecord]:
        """All readable records, by run id."""
        for path in sorted(self.root.glob("*/record.json")):
            record = self.read(path.parent.name)
            if record is not None:
                yield record


def refuse_other_config(frozen: Path, cfg: DictConfig) -> None:
    """Raises StoreError, naming the first key that differs, if `frozen` is not this configuration."""
    there = _flat(identity(OmegaConf.load(frozen)))
    here = _flat(identity(cfg))
    for key in sorted(there.keys() | here.keys()):
        if there.get(key) != here.get(key):
            raise StoreError(
                f"{frozen.parent} belongs to another configuration: it differs in {key} ({here.get(key)!r} in the command, "
                f"{there.get(key)!r} on disk); nothing was changed, choose another runtime.runs_dir or move that folder away"
            )


def _flat(node: Any, prefix: str = "") -> dict[str, Any]:
    if isinstance(node, Mapping) and node:
        return {k: v for key, value in node.items() for k, v in _flat(value, f"{prefix}{key}.").items()}
    return {prefix[:-1]: node}
