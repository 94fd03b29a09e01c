"""The golden records of tests/golden/tables, with one thing changed, and the table that they give."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml

from experiments.aggregate import build
from experiments.recordstore import load_records
from experiments.spec import ExperimentConfig, load_spec
from experiments.table import Table

GOLDEN = Path(__file__).parent / "golden/tables"
Change = Callable[[dict[str, Any]], object]
NAN, INFINITE = float("nan"), float("inf")


def resolve(overrides: Sequence[str]) -> tuple[str, dict[str, str]]:
    given = dict(o.split("=", 1) for o in overrides)
    return "-".join(x for x in (given["selector"], given.get("selector.ratio", "").strip("'"), given["seed"]) if x), given


def spec(**changes: Any) -> ExperimentConfig:
    """The golden experiment without the lines that have something wrong of their own."""
    whole = load_spec(yaml.safe_load((GOLDEN / "spec.yaml").read_text()))
    rows = {name: whole.rows[name] for name in ("Full data", "Random", "CluSTER")}
    return replace(whole, **{"rows": rows, "columns": {"r=1.00": whole.columns["r=1.00"]}, **changes})


def table_of(folder: Path, changes: dict[str, Change] | None = None, **fields: Any) -> Table:
    """Writes the golden records to `folder`, some changed, and gives their table; `fields` of the experiment."""
    folder.mkdir(exist_ok=True)
    for path in sorted((GOLDEN / "machine_a").glob("*.json")):
        put(folder, path.stem, (changes or {}).get(path.stem, lambda data: None))
    return build(spec(**fields), resolve, load_records([folder]))


def put(folder: Path, run_id: str, change: Change) -> None:
    """Writes one golden record; a change may give the file's text or bytes in place of changing its content."""
    data = json.loads((GOLDEN / f"machine_a/{run_id}.json").read_text())
    got = change(data)
    content = got if isinstance(got, str | bytes) else json.dumps(data)
    (folder / f"{run_id}.json").write_bytes(content if isinstance(content, bytes) else content.encode())


def without(node: str, key: str) -> Change:
    return lambda data: data[node].pop(key)


def with_value(value: Any, *path: str | int) -> Change:
    def change(data: Any) -> None:
        for key in path[:-1]:
            data = data[key]
        data[path[-1]] = value

    return change


def no_score(data: dict[str, Any]) -> None:
    del data["metrics"][0]
