"""DataConfig and ModelConfig nodes for tests: from conf/, or spelt out with the fewest words."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from clusterft.config import DataConfig, ModelConfig

ROOT = Path(__file__).resolve().parent.parent
CASES = Path(__file__).parent / "golden" / "cases"


def files_config(path: Any, **changes: Any) -> DataConfig:
    values: dict[str, Any] = {
        "name": "test",
        "kind": "files",
        "path": path,
        "file_format": "auto",
        "fields": {},
        "template": "alpaca",
        "instruction_prefix": "",
        "holdout_rows": 0,
    }
    return DataConfig(**{**values, **changes})


def conf(group: str, name: str, **changes: Any) -> Any:
    schema = {"data": DataConfig, "model": ModelConfig}[group]
    node = OmegaConf.merge(OmegaConf.structured(schema), OmegaConf.load(ROOT / "conf" / group / f"{name}.yaml"))
    return OmegaConf.merge(node, changes)


def case(name: str) -> tuple[Path, dict[str, Any]]:
    """Folder and expected values of the case whose name starts with `name`."""
    (folder,) = CASES.glob(f"{name}-*")
    return folder, json.loads((folder / "expected.json").read_text(encoding="utf-8"))


def write_jsonl(path: Path, rows: list[Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path
