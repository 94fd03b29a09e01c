"""Which rows a gradient-matching selector (LESS) may look at: never a row that is scored later.

In come the configuration and the encoded held-out rows; out come encoded validation rows by subtask, and the held-out rows that are left
for the loss. What a run's selector does not use is not loaded.

    heldout           a part of the held-out rows, cut off by content hash; the loss is taken on the others
    code_subtasks     MBPP problems outside MBPP+ and sanitised MBPP, written in two ways (needs the hub)
    medical_subtasks  validation or training parts of the medical benchmarks (needs the hub)
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hydra.utils import get_object
from omegaconf import DictConfig

from clusterft.prompting import encode_pool
from clusterft.records import Encoded, Example, Pool
from clusterft.validation_sets import Subtasks, check_no_leak, load_code_subtasks, load_medical_subtasks, split_heldout

KINDS = ("heldout", "code_subtasks", "medical_subtasks")
Validation = Mapping[str, tuple[Encoded, ...]]


def check_kind(kind: str) -> None:
    if kind not in KINDS:
        raise ValueError(f"data.validation.kind {kind!r} is unknown; known are {', '.join(KINDS)}")


def cut_heldout(
    cfg: DictConfig, heldout: Pool, encoded: tuple[Encoded, ...]
) -> tuple[Validation, tuple[Example, ...], Pool, tuple[Encoded, ...]]:
    """(validation by subtask, its rows, the pool that is left, that one's encoded rows). Nothing is cut for the kinds that come from elsewhere, nor where
    the held-out rows do not suffice for both parts: a selector that needs them is then refused, the others need not care.
    """
    check_kind(cfg.data.validation.kind)
    rows = cfg.data.validation.rows
    if cfg.data.validation.kind != "heldout" or not 1 <= rows < len(heldout):
        return {}, (), heldout, encoded
    validation, left = split_heldout(heldout, rows)
    by_id = {row.id: row for row in encoded}
    cut = {"heldout": tuple(by_id[i] for i in validation.ids)}
    return cut, validation.examples, left, tuple(by_id[i] for i in left.ids)


def subtasks_elsewhere(cfg: DictConfig, pool: Pool, tokenizer: Any) -> Validation:
    """Validation rows of the kinds that come from public benchmarks, encoded as in training and checked against the pool.

    Raises DataError if they are not to be had, or if one of them is a row of the pool.
    """
    node = cfg.data.validation
    if node.kind == "heldout":
        raise ValueError(
            f"this selector needs validation rows: data.holdout_rows={cfg.data.holdout_rows} must be above data.validation.rows, now "
            f"{node.rows} and at least 1, so that some rows can be matched and others scored"
        )
    found = code_rows(cfg) if node.kind == "code_subtasks" else load_medical_subtasks(node.rows, get_object(node.is_tested))
    check_no_leak(found, ids=set(pool.ids), texts=[], against=f"pool {pool.name}")
    return {
        name: encode_pool(Pool(name, rows), tokenizer, cfg.data.template, cfg.trainer.max_length)[1]
        for name, rows in found.items()
    }


def code_rows(cfg: DictConfig) -> Subtasks:
    """MBPP rows without the problems of the very MBPP+ file that the run will be scored on."""
    if "mbpp" not in cfg.evaluators or cfg.evaluators.mbpp.problems_file is None:
        raise ValueError(
            "data.validation.kind=code_subtasks needs evaluators.mbpp.problems_file, to leave out what will be scored"
        )
    lines = Path(cfg.evaluators.mbpp.problems_file).read_text(encoding="utf-8").splitlines()
    tested = {int(json.loads(line)["task_id"].partition("/")[2]) for line in lines if line.strip()}
    return load_code_subtasks(cfg.data.validation.rows, tested)
