"""The only place where random generators are made.

Every use of randomness has a name: `generator(run_seed, "shuffle", epoch)` is the same stream on every rank, in every process,
whatever ran before. Two purposes never share a stream, and seed 0 is a seed like any other.
"""

from __future__ import annotations

import hashlib

import numpy as np


def seed_hash(run_seed: int, *purpose: str | int) -> int:
    """A seed in [0, 2**63) from the run's seed and the purpose. Stable across processes, platforms and PYTHONHASHSEED.

    Raises TypeError if `run_seed` is not an integer: seeds such as "007" or 1.5 are mistakes, not seeds.
    """
    if isinstance(run_seed, bool) or not isinstance(run_seed, int | np.integer):
        raise TypeError(f"the seed must be an integer, got {run_seed!r} of type {type(run_seed).__name__}")
    text = "\x1f".join([str(int(run_seed)), *(f"{type(p).__name__}:{p}" for p in purpose)])
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little") >> 1


def generator(run_seed: int, *purpose: str | int) -> np.random.Generator:
    """A numpy generator for one purpose."""
    return np.random.default_rng(seed_hash(run_seed, *purpose))
