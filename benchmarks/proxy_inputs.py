"""What both proxy benchmarks start from: the small real model and rows of the embedded pool, the same on every run.

In come a model folder (or none: the configured SmolLM2) and sizes; out come the model, and encoded rows chosen by a seeded draw.
"""

from __future__ import annotations

import platform
import time
from pathlib import Path
from typing import Any

import torch
from omegaconf import OmegaConf
from transformers import AutoModelForCausalLM, AutoTokenizer

from clusterft.data import load_pool
from clusterft.models import load_model, load_tokenizer
from clusterft.prompting import encode_pool
from clusterft.records import Encoded
from clusterft.seeding import generator

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
SMALL = ROOT / "conf" / "model" / "smollm2_135m.yaml"


def load(model_path: str | None, dtype: str = "float32") -> tuple[Any, Any]:
    """(model, tokenizer): from a folder, else the configured small real model."""
    if model_path is not None:
        return AutoModelForCausalLM.from_pretrained(model_path, dtype=getattr(torch, dtype)).eval(), load_own_tokenizer(
            model_path
        )
    cfg = OmegaConf.load(SMALL)
    cfg.weights_dtype = dtype
    return load_model(cfg, assets_dir=ROOT / "assets"), load_own_tokenizer(None)


def load_own_tokenizer(model_path: str | None) -> Any:
    """The tokenizer alone."""
    if model_path is not None:
        return AutoTokenizer.from_pretrained(model_path)
    return load_tokenizer(OmegaConf.load(SMALL), assets_dir=ROOT / "assets")


def pool_rows(tokenizer: Any, rows: int, max_length: int, seed: int = 0) -> list[Encoded]:
    """`rows` encoded rows of the standard-library pool in a random order (data-set order of a shuffled set)."""
    cfg = OmegaConf.load(ROOT / "conf" / "data" / "stdlib_instruct.yaml")
    _, encoded = encode_pool(load_pool(cfg, assets_dir=RESULTS.parent / "scratch").train, tokenizer, cfg.template, max_length)
    ordered = sorted((e for e in encoded if e.n_target and not e.truncated), key=lambda e: e.id)
    picked = generator(seed, "benchmark rows").choice(len(ordered), rows, replace=False)
    return [ordered[i] for i in picked]


def pairs(encoded: list[Encoded]) -> list[tuple[list[int], list[int]]]:
    """(prompt ids, response ids) of rows whose labels follow one prompt."""
    starts = [int((e.labels == -100).sum()) for e in encoded]
    return [(e.input_ids[:s].tolist(), e.input_ids[s:].tolist()) for s, e in zip(starts, encoded, strict=True)]


def matrix_rate(dtype: torch.dtype, size: int = 1536, repeats: int = 8) -> float:
    """Floating-point operations a CPU second of a square matrix product with the threads set."""
    a, b = torch.randn(size, size, dtype=dtype), torch.randn(size, size, dtype=dtype)
    a @ b
    start = time.process_time()
    for _ in range(repeats):
        a @ b
    return repeats * 2 * size**3 / (time.process_time() - start)


def machine() -> dict[str, Any]:
    info = Path("/proc/cpuinfo")
    names = (
        [x.split(":")[1].strip() for x in info.read_text().splitlines() if x.startswith("model name")] if info.exists() else []
    )
    flags = {f for x in info.read_text().splitlines() if x.startswith("flags") for f in x.split()} if info.exists() else set()
    return {
        "cpu": names[0] if names else platform.processor(),
        "threads": torch.get_num_threads(),
        "bf16_instructions": sorted(f for f in flags if f in ("avx512_bf16", "amx_bf16")),
        "torch": torch.__version__,
    }
