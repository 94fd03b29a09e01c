"""What no table needs any more: run directories and cached features.

    python -m experiments.gc --runs runs/laptop                 lists, with the reason and the size
    python -m experiments.gc --runs runs/laptop --delete        removes what was listed as removable

In come a folder of run directories, the scale that it belongs to (its own name unless --scale says so) and the feature cache;
out comes one `Item` for everything found there. Needed are the runs of every experiment in conf/experiment at that scale, whether
complete or not. A feature is removable once every needed run on its pool is complete with its artifacts: it can always be made
again. Nothing is removed that another process holds, that is no run directory or feature, or whose pool these runs do not tell.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_dir

from clusterft.app import register_schema
from clusterft.locks import try_lock
from experiments.composing import Composer
from experiments.drive import ALL, members
from experiments.recordstore import Records, load_records
from experiments.resolve import DROPPED, ROOT


@dataclass(frozen=True)
class Item:
    """One folder. lock: name of its lock file; removable: no table needs it; reason: a sentence part for a person."""

    path: Path
    kind: str  # run | feature
    removable: bool
    reason: str
    lock: str

    @property
    def bytes(self) -> int:
        return sum(p.stat().st_size for p in self.path.rglob("*") if p.is_file())


@dataclass(frozen=True)
class Needs:
    """owners: needed run id -> the experiments that need it; configs: run id -> configuration; open: runs that are not finished."""

    owners: Mapping[str, tuple[str, ...]]
    configs: Mapping[str, Mapping[str, Any]]
    open: frozenset[str]


def every_experiment() -> list[str]:
    """The names of all experiments but the one that stands for several."""
    return [p.stem for p in sorted((ROOT / "conf/experiment").glob("*.yaml")) if p.stem != ALL]


def needs(scale: str, records: Records, names: Sequence[str]) -> Needs:
    """What the experiments `names` need at a scale. Raises ValueError for an unknown scale."""
    register_schema()
    known = sorted(p.stem for p in (ROOT / "conf/scale").glob("*.yaml"))
    if scale not in known and scale != "paper":
        raise ValueError(f"scale {scale!r} is not one of paper, {', '.join(known)}; name it with --scale")
    owners: dict[str, tuple[str, ...]] = {}
    configs: dict[str, Mapping[str, Any]] = {}
    unfinished: set[str] = set()
    with initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):
        overrides = [f"+experiment={ALL}"] + ([f"+scale={scale}"] if scale != "paper" else [])
        for driver in members(compose("config", overrides=overrides), overrides, Composer(dropped=DROPPED), names):
            for planned in driver.plan(records, costs=False).cells:
                if planned.run_id is None:
                    continue
                owners[planned.run_id] = (*owners.get(planned.run_id, ()), driver.spec.id)
                configs[planned.run_id] = driver.resolve(planned.cell.overrides)[1]
                if planned.state != "complete" or planned.artifacts:
                    unfinished.add(planned.run_id)
    return Needs({run: tuple(dict.fromkeys(of)) for run, of in owners.items()}, configs, frozenset(unfinished))


def runs(folder: Path, needed: Needs) -> list[Item]:
    """Every run directory below `folder`: those with a config.yaml. Anything else there is not looked at."""
    items = []
    for path in sorted(p.parent for p in folder.glob("*/config.yaml")):
        owners = needed.owners.get(path.name)
        reason = f"needed by {', '.join(owners)}" if owners else "no table at this scale has this run"
        items.append(Item(path, "run", not owners, reason, ".lock"))
    return items


def features(cache: Path, needed: Needs, records: Records) -> list[Item]:
    """Every feature below `cache`/features."""
    known = pools(records)
    open_pools = {known.get(pool_key(needed.configs[run])) for run in needed.open}
    finished = {known.get(pool_key(c)) for run, c in needed.configs.items() if run not in needed.open} - open_pools
    unknown = sum(pool_key(needed.configs[run]) not in known for run in needed.open)
    items = []
    for identity in sorted(cache.glob("features/*/identity.json")):
        pool = json.loads(identity.read_text(encoding="utf-8"))["pool"]
        if pool not in known.values():
            verdict = (False, "these runs do not tell its pool: it may be another place's")
        elif pool in open_pools:
            verdict = (False, "runs on its pool are not finished")
        elif unknown:
            verdict = (False, f"{unknown} needed runs have not got as far as to tell their pool")
        elif pool in finished:
            verdict = (True, "every table's runs on its pool are complete")
        else:
            verdict = (True, "no table at this scale has runs on its pool")
        items.append(Item(identity.parent, "feature", *verdict, "lock"))
    return items


def pools(records: Records) -> dict[str, str]:
    """What decides on a pool -> its fingerprint, as far as records tell."""
    found = {}
    for run in records.runs():
        if run.stored is not None and "pool_fingerprint" in run.stored.record.selection:
            found[pool_key(run.stored.record.config)] = run.stored.record.selection["pool_fingerprint"]
    return found


def pool_key(config: Mapping[str, Any]) -> str:
    """The part of a configuration that decides which rows the pool has. Options that are off do not count."""
    parts = {"data": config["data"], "model": config["model"], "max_length": config["trainer"]["max_length"]}
    return json.dumps(_without_nulls(parts), sort_keys=True, default=str)


def _without_nulls(node: Any) -> Any:
    if isinstance(node, Mapping):
        return {k: _without_nulls(v) for k, v in node.items() if v is not None}
    return node


def delete(items: Iterable[Item]) -> tuple[list[Item], list[Item]]:
    """(removed, held by another process). Each folder is locked, moved out of sight and then removed: never half of it remains."""
    removed, held = [], []
    for item in items:
        if not item.removable:
            raise ValueError(f"{item.path} is needed: {item.reason}")
        lock, _ = try_lock(item.path, item.lock)
        if lock is None:
            held.append(item)
            continue
        gone = item.path.with_name(f".gone-{item.path.name}")
        try:
            item.path.rename(gone)
        finally:
            lock.release()
        shutil.rmtree(gone)
        removed.append(item)
    return removed, held


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m experiments.gc", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--runs", type=Path, required=True, help="folder of run directories, for example runs/laptop")
    parser.add_argument("--scale", help="the scale of these runs; default: the folder's name")
    parser.add_argument(
        "--cache", type=Path, default=Path("~/.cache/clusterft"), help="cache folder whose features are looked at"
    )
    parser.add_argument("--delete", action="store_true", help="remove what is removable; without it nothing is touched")
    options = parser.parse_args(arguments)
    if not options.runs.is_dir():
        parser.error(f"{options.runs} is no folder")
    try:
        items = survey(options.runs, options.scale or options.runs.resolve().name, options.cache.expanduser())
    except ValueError as problem:
        parser.error(str(problem))
    return report(items, options.delete)


def survey(folder: Path, scale: str, cache: Path) -> list[Item]:
    """Everything found, runs first."""
    records = load_records([folder])
    needed = needs(scale, records, every_experiment())
    return [*runs(folder, needed), *features(cache, needed, records)]


def report(items: Sequence[Item], really: bool) -> int:
    """Prints a line for every item and deletes if asked to; 1 if something removable was held by another process."""
    removable = [i for i in items if i.removable]
    for item in items:
        print(f"{'remove' if item.removable else 'keep  '}  {item.bytes / 2**20:9.1f} MiB  {item.path}: {item.reason}")
    size = sum(i.bytes for i in removable) / 2**20
    print(f"{len(removable)} of {len(items)} folders are needed by no table, {size:.1f} MiB")
    if not really:
        if removable:
            print("nothing was touched; --delete removes them")
        return 0
    removed, held = delete(removable)
    for item in held:
        print(f"left alone: {item.path} is held by another process", file=sys.stderr)
    print(f"{len(removed)} folders removed")
    return 1 if held else 0


if __name__ == "__main__":
    sys.exit(main())
