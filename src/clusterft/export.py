"""The output folder: a selection in every form that a person's own tools read.

    header.json             last, so that a header means a whole folder: hashes of data, model, template, configuration; versions
    selection.parquet       every row that could be chosen: id, file, line, cluster, distance, weight, kept (also as .jsonl)
    subset.jsonl            the kept rows as they stand in the source, with all columns, in source order (source_rows)
    heldout.jsonl           the rows set apart for the loss after training, likewise
    validation.jsonl        held-out rows that only selectors which match rows look at (LESS), likewise
    rejected.jsonl          what was set aside: file, line, reason
    messages.jsonl          the kept rows as role and content
    dataset/                `datasets.load_from_disk`, with a data card
    llama_factory/ axolotl.yaml trl_example.py      entries for other trainers
    run/<id>/               the run directory that `clusterft train` and `clusterft eval` continue

All names are fixed; text of the data only ever stands inside files.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from omegaconf import DictConfig, OmegaConf

from clusterft import provenance
from clusterft.atomic import write_atomic
from clusterft.export_recipes import write_card, write_recipes
from clusterft.export_rows import dataset_columns, messages, pool_table, unsupervised_answers
from clusterft.load_report import LoadReport
from clusterft.records import Example, Rejection, Selection
from clusterft.source_rows import source_lines
from clusterft.store import StoreError, identity, run_id

HEADER = "header.json"
HEADER_SCHEMA = 1
FILES = (
    "header.json",
    "selection.parquet",
    "selection.jsonl",
    "subset.jsonl",
    "heldout.jsonl",
    "validation.jsonl",
    "rejected.jsonl",
    "messages.jsonl",
    "dataset/",
    "llama_factory/dataset_info.json",
    "axolotl.yaml",
    "trl_example.py",
    "run/",
)


def write_folder(
    folder: Path,
    cfg: DictConfig,
    ready: Any,
    selection: Selection,
    facts: Mapping[str, Any],
    labels: Mapping[str, int] | None,
) -> dict[str, Any]:
    """Writes everything and returns the header. Each file is whole or absent; the header comes last.

    ready   stages.Prepared
    facts   further entries of the header: the command, the seconds
    labels  cluster of every usable row of the pool, None for methods without clusters

    Raises DataError if labels contradict the selection.
    """
    folder.mkdir(parents=True, exist_ok=True)
    kept = set(selection.ids)
    rows = [e for e in ready.pool.examples if e.id in kept]
    table = pool_table(ready.pool.examples, selection, labels)
    _write_table(table, folder / "selection.parquet")
    write_lines(folder / "selection.jsonl", map(_json_line, _dicts(table)))
    own = _write_source_lines(folder / "subset.jsonl", rows, ready.report)
    _write_source_lines(folder / "heldout.jsonl", ready.heldout_pool.examples, ready.report)
    _write_source_lines(folder / "validation.jsonl", ready.validation_examples, ready.report)
    rejected = (*ready.pool.rejected, *ready.heldout_pool.rejected)
    write_lines(folder / "rejected.jsonl", map(_rejection_line, rejected))
    write_lines(folder / "messages.jsonl", (_json_line({"messages": messages(e)}) for e in rows))
    header = make_header(cfg, ready, selection) | {
        **facts,
        "subset": {"rows": len(rows), "source_bytes": own, "re_encoded": len(rows) - own},
        "unsupervised_answers": unsupervised_answers(rows),
        "rejected": len(rejected),
    }
    write_dataset(folder, rows, selection, header)
    write_recipes(folder, cfg, header)
    write_atomic(folder / HEADER, json.dumps(header, indent=1, sort_keys=True, ensure_ascii=True, allow_nan=False) + "\n")
    return header


def make_header(cfg: DictConfig, ready: Any, selection: Selection) -> dict[str, Any]:
    """What names a selection: the contents it was made from, how, with which versions."""
    from clusterft.models import model_identity

    return {
        "schema": HEADER_SCHEMA,
        "run_id": run_id(cfg),
        "method": selection.method,
        "budget": selection.budget,
        "pool_rows": len(ready.pool),
        "heldout_rows": len(ready.heldout_pool),
        "validation_rows": len(ready.validation_examples),
        "share": selection.budget / len(ready.pool),
        "seed": cfg.seed,
        "pool_fingerprint": selection.pool_fingerprint,
        "data": {"files": [file_facts(Path(p)) for p in cfg.data.path], "load": ready.report.to_json()},
        "model": model_identity(cfg.model, assets_dir=cfg.runtime.assets_dir),
        "template": {"name": cfg.data.template, "max_length": cfg.trainer.max_length, "sha256": template_hash(ready)},
        "config": identity(cfg),
        "config_sha256": hashlib.sha256(OmegaConf.to_yaml(cfg, resolve=True).encode()).hexdigest(),
        "versions": provenance.packages(),
        "commit": provenance.commit()[0],
        "info": dict(selection.info),
        "rejected_by_method": len(selection.rejected),
    }


def template_hash(ready: Any) -> str:
    """Hash of all tokens and labels of the pool: tokenizer, template and cut in one number."""
    from clusterft.feature_context import encoded_digest

    return encoded_digest(ready.encoded)


def file_facts(path: Path) -> dict[str, Any]:
    """Path, size in bytes and SHA-256 of a data file. Raises FileNotFoundError if it is gone."""
    with path.open("rb") as stream:
        digest = hashlib.file_digest(stream, "sha256").hexdigest()
    return {"path": str(path), "bytes": path.stat().st_size, "sha256": digest}


def read_header(folder: Path) -> dict[str, Any]:
    """header.json of a folder. Raises StoreError if it is absent, damaged or of another schema."""
    path = folder / HEADER
    if not path.is_file():
        raise StoreError(f"{folder} holds no finished selection ({HEADER} is missing); run `clusterft select` first, or again")
    try:
        header = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as problem:
        raise StoreError(f"{path} cannot be read ({problem}); select again into another folder") from problem
    if not isinstance(header, dict) or header.get("schema") != HEADER_SCHEMA:
        raise StoreError(f"{path} is of another schema than {HEADER_SCHEMA}; select again with this version")
    return header


def write_dataset(folder: Path, rows: Sequence[Example], selection: Selection, header: Mapping[str, Any]) -> None:
    """`dataset/` by save_to_disk, with its card. Written beside and renamed."""
    import datasets

    schema = datasets.Features(
        {name: datasets.Value("string") for name in ("id", "prompt", "input", "response")}
        | {"messages": [{"role": datasets.Value("string"), "content": datasets.Value("string")}]}
        | {"cluster": datasets.Value("int32"), "weight": datasets.Value("float64"), "distance": datasets.Value("float64")}
        | {"file": datasets.Value("string"), "line": datasets.Value("int64")}
    )
    part, final = folder / ".dataset.part", folder / "dataset"
    if part.exists():
        shutil.rmtree(part)
    quiet = datasets.are_progress_bars_disabled()
    datasets.disable_progress_bars()
    try:
        datasets.Dataset.from_dict(dataset_columns(rows, selection), features=schema).save_to_disk(str(part))
    finally:
        if not quiet:
            datasets.enable_progress_bars()
    write_card(part / "README.md", header)
    if final.exists():  # left by an interrupted export of this very selection: there is no header yet
        shutil.rmtree(final)
    part.rename(final)


def write_lines(path: Path, lines: Iterable[bytes]) -> None:
    """Writes lines with a line feed each; the file is whole or absent."""
    part = path.with_name(f".{path.name}.part")
    with part.open("wb") as stream:
        for line in lines:
            stream.write(line + b"\n")
    part.replace(path)


def _write_source_lines(path: Path, examples: Sequence[Example], report: LoadReport) -> int:
    """Writes the rows as their sources have them, one at a time; returns how many lines are the source's own bytes."""
    own = 0

    def lines() -> Iterator[bytes]:
        nonlocal own
        for line, same in source_lines(examples, report):
            own += same
            yield line

    write_lines(path, lines())
    return own


def _dicts(table: pa.Table) -> Iterator[dict[str, Any]]:
    """The rows of a table, some thousand at a time: a million dictionaries at once would take a gigabyte."""
    for batch in table.to_batches(max_chunksize=8192):
        yield from batch.to_pylist()


def _json_line(value: Mapping[str, Any]) -> bytes:
    return json.dumps(value, ensure_ascii=False, allow_nan=False).encode()


def _rejection_line(one: Rejection) -> bytes:
    value = {"file": one.source, "line": one.line, "reason": one.reason, "detail": one.detail}
    return json.dumps(value, ensure_ascii=True).encode()


def _write_table(table: pa.Table, path: Path) -> None:
    part = path.with_name(f".{path.name}.part")
    pq.write_table(table, part, compression="zstd")
    part.replace(path)
