"""The report of an output folder: what `clusterft.report` needs, found in the folder and the feature store.

folder ► header, run directory, selection.parquet ► pool, tokens, proxies, labels ► report.html, report.md
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
from omegaconf import DictConfig

from clusterft import stages
from clusterft.api import SelectResult, check_unchanged, open_folder
from clusterft.config import load_frozen
from clusterft.overrides import UserError
from clusterft.records import Cost, Selection


def report_folder(folder: Path, others: Sequence[Path] = ()) -> list[Path]:
    """Writes report.html and report.md into `folder` and returns their paths.

    others  further output folders of the same pool, compared with this one. Raises StoreError for a folder without a finished
    selection, ValueError if the data have changed or another folder is of another pool.
    """
    result = open_folder(folder)
    check_unchanged(result.header)
    cfg = load_frozen(result.run_dir / "config.yaml")
    return report_result(result, cfg, stages.prepare(cfg), {p.name: open_folder(p).selection for p in others})


def report_result(result: SelectResult, cfg: DictConfig, ready: Any, others: Mapping[str, Selection]) -> list[Path]:
    """`report_folder` for a pool that is already prepared."""
    from clusterft.report import gather, write_report

    seconds = result.header["seconds"]
    have = stages.features(cfg, ready) if stages.needed_features(cfg) else {}
    facts = gather(
        ready.pool,
        ready.encoded,
        result.selection,
        have["gradient_proxy"].rows if "gradient_proxy" in have else None,
        labels=labels_on_disk(result.folder),
        heldout=ready.heldout_pool,
        validation_rows=len(ready.validation_examples),
        others=others,
        command=result.header["command"],
        cost=Cost(
            wall_seconds=seconds["selection_seconds"],
            cpu_seconds=seconds["selection_cpu_seconds"],
            forward_passes=seconds["forward_passes"],
            backward_passes=seconds["backward_passes"],
        ),
        seconds={"features": seconds["feature_seconds"], "choice": seconds["choose_seconds"]},
    )
    return write_report(facts, result.folder)


def labels_on_disk(folder: Path) -> dict[str, int] | None:
    """id -> cluster from selection.parquet; None for a method without clusters. Raises UserError if the file is gone."""
    path = folder / "selection.parquet"
    if not path.is_file():
        raise UserError(f"{path} is missing; select again into another folder")
    table = pq.read_table(path, columns=["id", "cluster"]).to_pydict()
    labels = {i: c for i, c in zip(table["id"], table["cluster"], strict=True) if c is not None}
    return labels or None
