"""A GGUF file to a transformers folder, once.

In: the file. Out: a folder with safetensors, config and tokenizer in the user's cache.

Reading GGUF takes 15 to 20 s, reading safetensors 0.1 s. The folder is named by the SHA-256 of the file, made under a lock in a
folder of its own and renamed when it is complete; its weights' hash is checked at every use.
"""

from __future__ import annotations

import fcntl
import functools
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

CONVERSION_VERSION = 1
"""Raised when the conversion writes other files."""

_MANIFEST = "conversion.json"


def user_cache_dir() -> Path:
    """$XDG_CACHE_HOME/clusterft, or ~/.cache/clusterft."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "clusterft"


def sha256_of(path: Path) -> str:
    """SHA-256 of a file, remembered within the process as long as size and time stay the same."""
    status = path.stat()
    return _sha256(str(path), status.st_size, status.st_mtime_ns)


@functools.lru_cache(maxsize=64)
def _sha256(path: str, size: int, mtime_ns: int) -> str:
    with open(path, "rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def converted_folder(gguf_file: Path, expected_sha256: str | None = None, cache_dir: str | Path | None = None) -> Path:
    """The converted model of a GGUF file, converting it if need be.

    Raises ValueError if the file's hash is not `expected_sha256`, or if converted weights were changed afterwards.
    """
    found = sha256_of(gguf_file)
    if expected_sha256 is not None and found != expected_sha256:
        raise ValueError(f"{gguf_file} has SHA-256 {found}, model.sha256 is {expected_sha256}; run 'make assets' again")
    base = (Path(cache_dir) if cache_dir is not None else user_cache_dir()) / "models"
    folder = base / f"{gguf_file.stem}-{found[:16]}-v{CONVERSION_VERSION}"
    if not folder.is_dir():
        base.mkdir(parents=True, exist_ok=True)
        with _lock(folder.with_name(folder.name + ".lock")):
            if not folder.is_dir():  # another process may have made it while this one waited
                _convert(gguf_file, found, folder)
    _verify(folder)
    return folder


@contextmanager
def _lock(path: Path) -> Iterator[None]:
    with path.open("w") as stream:
        fcntl.flock(stream, fcntl.LOCK_EX)
        yield


def _convert(gguf_file: Path, sha256: str, folder: Path) -> None:
    part = Path(tempfile.mkdtemp(prefix=folder.name + ".part-", dir=folder.parent))
    try:
        _write_model(gguf_file, part)
        weights = {p.name: sha256_of(p) for p in sorted(part.glob("*.safetensors"))}
        manifest = {"gguf": gguf_file.name, "sha256": sha256, "version": CONVERSION_VERSION, "weights": weights}
        (part / _MANIFEST).write_text(json.dumps(manifest, indent=1), encoding="utf-8")
        part.chmod(0o755)
        os.replace(part, folder)
    finally:
        shutil.rmtree(part, ignore_errors=True)


def _write_model(gguf_file: Path, part: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    where = {"pretrained_model_name_or_path": str(gguf_file.parent), "gguf_file": gguf_file.name}
    model = AutoModelForCausalLM.from_pretrained(**where, dtype=torch.float32)
    # transformers takes the model for a quantised one and refuses to save it, although its weights are plain float32 by now
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    for name in ("hf_quantizer", "is_quantized", "quantization_method"):
        model.__dict__.pop(name, None)
    model.save_pretrained(part, safe_serialization=True)
    AutoTokenizer.from_pretrained(**where).save_pretrained(part)


def _verify(folder: Path) -> None:
    manifest = json.loads((folder / _MANIFEST).read_text(encoding="utf-8"))
    for name, expected in manifest["weights"].items():
        if sha256_of(folder / name) != expected:
            raise ValueError(f"{folder / name} was changed after its conversion; delete the folder {folder} to convert again")
