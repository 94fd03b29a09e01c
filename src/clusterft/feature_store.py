"""Where finished features live: one folder each, named by a key that says what the values depend on.

In come a `FeatureSpec` and a `FeatureContext`; out come a path, a lock, and a `Feature` in the order of the context's pool.

    root/<name>-<key>/   identity.json   what the key stands for, to read
                         rows.npy        (n, d), rows in the order of their sorted ids
                         ids.txt         those ids, a line each
                         extra.npz       small named arrays, if any
                         manifest.json   sizes, checksums, cost, notes: written last, atomically; without it nothing is loaded
                         work/           an extractor's own artefacts
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from clusterft.atomic import write_atomic
from clusterft.feature_context import FeatureContext, encoded_digest
from clusterft.feature_shards import row_ranges
from clusterft.feature_writer import RowWriter, leftovers, read_accounts, total_cost
from clusterft.interfaces import Feature, FeatureSpec
from clusterft.locks import FolderLock, try_lock
from clusterft.records import Cost

MANIFEST_SCHEMA = 1
COPY_BYTES = 256 * 1024 * 1024
"""Rows asked for in another order than the stored one are copied: below this size into memory, above into an unlinked file."""

_MODEL_FIELDS = ("source", "gguf_file", "architecture", "weights_dtype")


class FeatureMissing(FileNotFoundError):
    """The feature has not been computed, or not to its end."""


class FeatureDamaged(ValueError):
    """A file of a finished feature is not what its manifest says."""


@lru_cache(maxsize=4096)
def _file_sha256(path: str, size: int, mtime_ns: int) -> str:
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while block := file.read(1 << 22):
            digest.update(block)
    return digest.hexdigest()


def file_sha256(path: Path) -> str:
    """SHA-256 of a file; remembered within the process while size and modification time stay."""
    stat = path.stat()
    return _file_sha256(str(path.resolve()), stat.st_size, stat.st_mtime_ns)


def weights_identity(model_cfg: Any) -> dict[str, Any]:
    """What names a model's weights: the declared checksum, else the contents of a local folder, else hub id and revision.

    Paths of folders never enter, so that a moved folder keeps its features. `model_cfg` is a `config.ModelConfig` or its node.
    """
    identity: dict[str, Any] = {name: getattr(model_cfg, name) for name in _MODEL_FIELDS}
    folder = Path(model_cfg.path)
    if model_cfg.sha256:
        identity["sha256"] = model_cfg.sha256
    elif folder.is_dir():
        names = sorted(
            p.name for p in folder.iterdir() if p.suffix in (".safetensors", ".bin", ".gguf") or p.name == "config.json"
        )
        identity["files"] = {name: file_sha256(folder / name) for name in names}
    else:
        identity |= {"path": str(model_cfg.path), "revision": model_cfg.revision}
    if model_cfg.source == "tiny":
        identity["shape"] = _plain(model_cfg.shape)
    return identity


def _plain(value: Any) -> Any:
    """Mappings and sequences of any kind (OmegaConf's too) as plain, sorted JSON values. Raises TypeError for anything else."""
    if isinstance(value, Mapping) or hasattr(value, "items"):
        return {str(k): _plain(v) for k, v in sorted(value.items(), key=lambda pair: str(pair[0]))}
    if isinstance(value, str | bool | int | float) or value is None:
        return value
    if isinstance(value, Sequence):
        return [_plain(v) for v in value]
    raise TypeError(f"feature parameters must be JSON values, got {value!r} of type {type(value).__name__}")


def identity_of(spec: FeatureSpec, context: FeatureContext) -> dict[str, Any]:
    """Everything that a feature's values depend on, as JSON. The seed and the validation rows enter only when asked for.

    Reserved parameters: `uses_seed: true` and `uses_validation: true`.
    """
    params = _plain(spec.params)
    identity = {
        "extractor": spec.extractor,
        "version": spec.version,
        "params": params,
        "pool": context.pool.fingerprint,
        "tokens": context.tokens_digest,
        "model": weights_identity(context.model_cfg),
        "template": context.template,
        "max_length": context.max_length,
    }
    if context.weights is not None:
        identity["weights"] = context.weights
    if params.get("uses_seed"):
        identity["seed"] = context.seed
    if params.get("uses_validation"):
        identity["validation"] = {name: encoded_digest(rows) for name, rows in sorted(context.validation.items())}
    return identity


class FeatureStore:
    """Finished and half-finished features under one root."""

    def __init__(self, root: Path | str) -> None:
        self.root = Path(root)

    def key(self, spec: FeatureSpec, context: FeatureContext) -> str:
        """16 hex digits. Independent of the order of the pool, of ranks, budgets and paths."""
        text = json.dumps(identity_of(spec, context), sort_keys=True, ensure_ascii=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def path(self, spec: FeatureSpec, context: FeatureContext) -> Path:
        """The feature's folder. Raises ValueError for a name that cannot be one."""
        if not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9_.-]*", spec.name):
            raise ValueError(f"feature name {spec.name!r} must be letters, digits, '_', '-' and '.': it names a folder")
        return self.root / f"{spec.name}-{self.key(spec, context)}"

    def complete(self, spec: FeatureSpec, context: FeatureContext) -> bool:
        return (self.path(spec, context) / "manifest.json").exists()

    def try_lock(self, spec: FeatureSpec, context: FeatureContext) -> FolderLock | None:
        """The folder's lock, or None while another process computes this feature."""
        return try_lock(self.path(spec, context), "lock")[0]

    def sweep(self, spec: FeatureSpec, context: FeatureContext) -> None:
        """Removes what a process left behind that was killed between the manifest and the removal of its shards."""
        folder = self.path(spec, context)
        if not leftovers(folder) or not os.access(folder, os.W_OK):
            return
        lock = self.try_lock(spec, context)
        if lock is not None:
            for path in leftovers(folder):
                path.unlink(missing_ok=True)
            lock.release()

    def writer(self, spec: FeatureSpec, context: FeatureContext) -> RowWriter:
        """This rank's writer. Open it on every rank, then pass a barrier before the first `put`."""
        return RowWriter(self.path(spec, context), canonical_places(context.pool.ids), context.dist.rank)

    def finish(self, spec: FeatureSpec, context: FeatureContext, writer: RowWriter) -> None:
        """Rank 0, after every rank closed its writer: merges, checks, writes the manifest, drops the shards."""
        folder = writer.folder
        write_atomic(folder / "identity.json", json.dumps(identity_of(spec, context), indent=1).encode())
        write_atomic(folder / "ids.txt", "".join(f"{i}\n" for i in sorted(context.pool.ids)).encode())
        d, dtype, rows_sha256 = writer.merge()
        writer.save_extra()
        names = [n for n in ("rows.npy", "ids.txt", "extra.npz") if (folder / n).exists()]
        files = {
            n: {
                "bytes": (folder / n).stat().st_size,
                "sha256": rows_sha256 if n == "rows.npy" else file_sha256(folder / n),
            }
            for n in names
        }
        cost = total_cost(read_accounts(folder), sum(f["bytes"] for f in files.values()))
        manifest = {
            "schema": MANIFEST_SCHEMA,
            "name": spec.name,
            "key": self.key(spec, context),
            "shape": [len(context.pool), d],
            "dtype": str(dtype),
            "files": files,
            "cost": asdict(cost),
            "notes": writer.notes,
        }
        write_atomic(folder / "manifest.json", json.dumps(manifest, indent=1).encode())
        writer.discard_shards()

    def manifest(self, spec: FeatureSpec, context: FeatureContext) -> dict[str, Any]:
        """The manifest as read. Raises FeatureMissing before the feature is complete."""
        path = self.path(spec, context) / "manifest.json"
        if not path.exists():
            raise FeatureMissing(f"feature {spec.name!r} is not complete under {path.parent}; compute it first")
        manifest = json.loads(path.read_text())
        if manifest["schema"] != MANIFEST_SCHEMA:
            raise FeatureDamaged(
                f"{path} has schema {manifest['schema']}, this version reads {MANIFEST_SCHEMA}; delete {path.parent}"
            )
        return manifest

    def load(self, spec: FeatureSpec, context: FeatureContext, *, verify: bool = True) -> Feature:
        """The finished feature, rows (n, d) in the order of `context.pool`: a read-only memory map when that is the stored order.

        `verify` compares checksums as well as sizes. Raises FeatureMissing, FeatureDamaged.
        """
        folder, manifest = self.path(spec, context), self.manifest(spec, context)
        if manifest["key"] != (key := self.key(spec, context)):
            raise FeatureDamaged(
                f"{folder} holds a feature whose key is {manifest['key']}, asked for is {key}: it was computed with other "
                "parameters, rows or weights; delete the folder to compute the feature again"
            )
        for name, facts in manifest["files"].items():
            _check_file(folder / name, facts, verify)
        rows = _in_pool_order(folder / "rows.npy", canonical_places(context.pool.ids))
        extra: dict[str, np.ndarray] = {}
        if "extra.npz" in manifest["files"]:
            with np.load(folder / "extra.npz", allow_pickle=False) as archive:
                extra = {name: archive[name] for name in archive.files}
        return Feature(rows=rows, extra=extra, cost=Cost(**manifest["cost"]))

    def discard(self, spec: FeatureSpec, context: FeatureContext) -> None:
        """Removes the feature's folder, finished or not."""
        shutil.rmtree(self.path(spec, context), ignore_errors=False)


def canonical_places(ids: Sequence[str]) -> np.ndarray:
    """(n,) int64: for each pool position the rank of its id among the sorted ids."""
    places = np.empty(len(ids), np.int64)
    places[sorted(range(len(ids)), key=ids.__getitem__)] = np.arange(len(ids))
    return places


def _check_file(path: Path, facts: Mapping[str, Any], verify: bool) -> None:
    remedy = f"delete the folder {path.parent} to compute the feature again"
    if not path.exists():
        raise FeatureDamaged(f"{path} is gone although its manifest lists it; {remedy}")
    size = path.stat().st_size
    if size != facts["bytes"]:
        raise FeatureDamaged(f"{path} has {size} bytes, its manifest says {facts['bytes']}; {remedy}")
    if verify and file_sha256(path) != facts["sha256"]:
        raise FeatureDamaged(f"{path} was changed after it was written: its checksum is not the manifest's; {remedy}")


def _in_pool_order(path: Path, places: np.ndarray) -> np.ndarray:
    stored = np.load(path, mmap_mode="r")
    if np.array_equal(places, np.arange(len(places))):
        return stored
    if stored.nbytes <= COPY_BYTES:
        return np.asarray(stored)[places]
    with tempfile.TemporaryFile(dir=path.parent) as file:
        rows = np.memmap(file, stored.dtype, "w+", shape=stored.shape)
    for start, stop in row_ranges(len(places), stored[:1].nbytes):
        rows[start:stop] = stored[places[start:stop]]
    return rows
