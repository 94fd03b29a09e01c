"""Random sign projection of gradients: the same numbers on any device, for any chunk, batch and thread count.

In come rows (b, p) of per-sample gradients; out come rows (b, d) float32 with E[<Pa, Pb>] = <a, b> (Johnson and Lindenstrauss;
the released LESS leaves the signs unscaled, here the entries are +-1/sqrt(d)).

Two ideas make it reproducible:

- The sign in row i and column j is bit j mod 64 of hash(seed, i, j // 64). It is computed where it is needed and stored
nowhere, so a
  matrix of 10**7 x 8,192 takes the memory of one block of it. Signs of a block are made once and used for every row of a batch.
- Sums are exact. A row is rounded to a grid of 2**-22 of its largest entry and cut into two parts of 11 bits, whose partial
  sums float32 holds without rounding. Exact sums do not depend on their order: blocks, threads, BLAS and GPU may differ, the
  result may not. The rounding is far below the projection's own error of 1/sqrt(d).
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise

import numpy as np
import torch

from clusterft.jit import compiled

VERSION = 1
GRID_BITS = 22  # a row's largest entry becomes an integer of at most this many bits
PART_BITS = 11  # of the lower part; the upper part then has at most 11 bits as well
MAX_BLOCK = 1 << (24 - PART_BITS)  # so many 11-bit integers sum exactly in float32
MAX_FEATURES = 1 << (53 - GRID_BITS)  # so many 22-bit integers sum exactly in float64
BLOCK_SIGNS = 1 << 21
SIGNS_A_THREAD = 1 << 19
BACKENDS = ("numba", "torch")

_ROW_STEP = 0x9E3779B97F4A7C15
_WORD_STEP = 0xD1B54A32D192ED03
_MIX_1 = 0xBF58476D1CE4E5B9
_MIX_2 = 0x94D049BB133111EB
_SIGN_TABLE = (1 - 2 * ((np.arange(256)[:, None] >> np.arange(8)) & 1)).astype(np.float32)


@dataclass(frozen=True)
class SignProjection:
    """A projection from p = `n_features` to d = `dim` columns, named by its seed.

    backend         numba (CPU) | torch (any device); bit-identical, also with each other
    block_features  rows of the sign matrix made at a time, at most 8,192, None for about 8 MiB; changes speed, never a result

    Raises ValueError for an unknown backend or sizes outside the exact range.
    """

    n_features: int
    dim: int
    seed: int
    backend: str = "numba"
    block_features: int | None = None

    def __post_init__(self) -> None:
        if self.backend not in BACKENDS:
            raise ValueError(f"projection backend {self.backend!r} is unknown; known are {', '.join(BACKENDS)}")
        if not 1 <= self.n_features <= MAX_FEATURES or self.dim < 1:
            raise ValueError(f"projection from {self.n_features} to {self.dim} columns; p is 1 ... {MAX_FEATURES}, d >= 1")
        if self.block_features is not None and not 1 <= self.block_features <= MAX_BLOCK:
            raise ValueError(f"block_features is {self.block_features}; exact sums need 1 ... {MAX_BLOCK}")

    @property
    def fingerprint(self) -> str:
        """Names the matrix: features projected under different fingerprints must never meet. The backend is no part of it."""
        text = f"sign-projection/{VERSION}/{self.n_features}/{self.dim}/{self.seed}"
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def signs(self, start: int, stop: int, device: str | torch.device = "cpu") -> torch.Tensor:
        """(stop - start, d) float32 of +-1: rows start ... stop - 1 of the matrix, not yet scaled."""
        words = -(-self.dim // 64)
        if self.backend == "numba":
            out = np.empty((stop - start, words * 64), dtype=np.float32)
            _fill_in_threads(np.uint64(_key(self.seed)), start, out)
            return torch.from_numpy(out)[:, : self.dim]
        return _torch_signs(_key(self.seed), start, stop, words, device)[:, : self.dim]

    def project(self, rows: torch.Tensor) -> torch.Tensor:
        """(b, p) -> (b, d) float32. A row with a value that is not finite becomes a row of NaN.

        Raises ValueError if the rows have another number of columns, or lie on a GPU while the backend is numba.
        """
        if rows.ndim != 2 or rows.shape[1] != self.n_features:
            raise ValueError(f"rows of shape {tuple(rows.shape)} given to a projection of {self.n_features} features")
        if self.backend == "numba" and rows.device.type != "cpu":
            raise ValueError(f"projection backend numba works on the CPU, but the rows lie on {rows.device}; use backend=torch")
        exponent, finite = _row_exponents(rows)
        total = torch.zeros(len(rows), self.dim, dtype=torch.float64, device=rows.device)
        for start, stop in self._blocks():
            parts = _integer_parts(rows[:, start:stop], exponent)
            sums = _exact_matmul(parts, self.signs(start, stop, rows.device))
            total += sums[: len(rows)].double() * (1 << PART_BITS) + sums[len(rows) :].double()
        scaled = torch.ldexp(total, exponent[:, None] - GRID_BITS) / self.dim**0.5
        return torch.where(finite[:, None], scaled, torch.nan).float()

    def _blocks(self) -> Iterator[tuple[int, int]]:
        step = self.block_features or max(64, min(MAX_BLOCK, BLOCK_SIGNS // self.dim))
        for start in range(0, self.n_features, step):
            yield start, min(start + step, self.n_features)


def unit_rows(rows: torch.Tensor) -> torch.Tensor:
    """(b, d) float32 rows of norm 1, in float64 inside, so that large rows do not overflow. A zero row stays zero."""
    wide = rows.double()
    norms = wide.norm(dim=1, keepdim=True)
    return torch.where(norms > 0, wide / torch.where(norms > 0, norms, 1.0), wide).float()


def _row_exponents(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(b,) int32 e with max |row| <= 2**e, and (b,) whether the row is finite."""
    largest = rows.abs().amax(dim=1).float()
    finite = torch.isfinite(largest)
    return torch.frexp(torch.where(finite, largest, 0.0).double()).exponent.int(), finite


def _integer_parts(block: torch.Tensor, exponent: torch.Tensor) -> torch.Tensor:
    """(2b, c) float32 of integers: upper parts, then lower parts, with upper * 2**11 + lower = round(block * 2**(22 - e))."""
    grid = torch.ldexp(block.double(), GRID_BITS - exponent[:, None]).round_()
    grid = torch.nan_to_num(grid, nan=0.0, posinf=0.0, neginf=0.0)
    upper = torch.floor(grid / (1 << PART_BITS) + 0.5)
    return torch.cat([upper, grid - upper * (1 << PART_BITS)]).float()


def _exact_matmul(parts: torch.Tensor, signs: torch.Tensor) -> torch.Tensor:
    """Integer matrices in float32: exact as long as the hardware really multiplies in float32. Raises RuntimeError if it may
    not."""
    if torch.get_float32_matmul_precision() != "highest" or (parts.is_cuda and torch.backends.cuda.matmul.allow_tf32):
        with _full_float32():
            return parts @ signs
    return parts @ signs


class _full_float32:
    """Switches TF32 and its CPU sibling off for one product, and back."""

    def __enter__(self) -> None:
        self.before = torch.get_float32_matmul_precision()
        torch.set_float32_matmul_precision("highest")

    def __exit__(self, *_: object) -> None:
        torch.set_float32_matmul_precision(self.before)


def _key(seed: int) -> int:
    """64 bits from the seed, so that neighbouring seeds share nothing."""
    return int.from_bytes(hashlib.sha256(f"sign-projection:{seed}".encode()).digest()[:8], "little")


def _fill_in_threads(key: np.uint64, start: int, out: np.ndarray) -> None:
    """Fills runs of rows in as many threads as torch has. Not by numba's own threads: their OpenMP layer would change torch's
    number."""
    threads = max(1, min(torch.get_num_threads(), out.size // SIGNS_A_THREAD))
    edges = [len(out) * i // threads for i in range(threads + 1)]
    others = [_threads().submit(_fill_signs, key, start + a, out[a:b], _SIGN_TABLE) for a, b in pairwise(edges[1:])]
    _fill_signs(key, start, out[: edges[1]], _SIGN_TABLE)
    for other in others:
        other.result()


@lru_cache(maxsize=1)
def _threads() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(thread_name_prefix="signs")


@compiled
def _fill_signs(key: np.uint64, start: int, out: np.ndarray, table: np.ndarray) -> None:
    """out (c, 64 w) float32. The hash is the finaliser of SplitMix64 (Steele, Lea and Flood 2014), applied to the row, then the
    word."""
    words = out.shape[1] // 64
    for row in range(out.shape[0]):
        base = key + np.uint64(start + row) * np.uint64(_ROW_STEP)
        base = (base ^ (base >> np.uint64(30))) * np.uint64(_MIX_1)
        base = (base ^ (base >> np.uint64(27))) * np.uint64(_MIX_2)
        base = base ^ (base >> np.uint64(31))
        for word in range(words):
            bits = base + np.uint64(word) * np.uint64(_WORD_STEP)
            bits = (bits ^ (bits >> np.uint64(30))) * np.uint64(_MIX_1)
            bits = (bits ^ (bits >> np.uint64(27))) * np.uint64(_MIX_2)
            bits = bits ^ (bits >> np.uint64(31))
            for byte in range(8):
                at = (bits >> np.uint64(8 * byte)) & np.uint64(255)
                for k in range(8):
                    out[row, word * 64 + byte * 8 + k] = table[at, k]


def _torch_signs(key: int, start: int, stop: int, words: int, device: str | torch.device) -> torch.Tensor:
    """The same signs by torch operations on wrapping int64."""
    rows = torch.arange(start, stop, dtype=torch.int64, device=device)
    base = _torch_mix(rows * _signed(_ROW_STEP) + _signed(key))
    bits = _torch_mix(base[:, None] + torch.arange(words, dtype=torch.int64, device=device) * _signed(_WORD_STEP))
    table = torch.from_numpy(_SIGN_TABLE).to(device)
    return table[bits.view(torch.uint8).int()].reshape(len(rows), words * 64)


def _torch_mix(x: torch.Tensor) -> torch.Tensor:
    x = (x ^ _shift_right(x, 30)) * _signed(_MIX_1)
    x = (x ^ _shift_right(x, 27)) * _signed(_MIX_2)
    return x ^ _shift_right(x, 31)


def _shift_right(x: torch.Tensor, bits: int) -> torch.Tensor:
    """Logical shift: torch's >> on int64 copies the sign bit."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def _signed(word: int) -> int:
    """The int64 with the bits of an unsigned 64-bit word."""
    return word - (1 << 64) if word >= 1 << 63 else word
