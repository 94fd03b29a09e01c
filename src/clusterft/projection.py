"""Random sign projection of gradients: the same numbers on any device, for any chunk, batch and thread count.

In come rows (b, p) of per-sample gradients; out come rows (b, d) float32 with E[<Pa, Pb>] = <a, b> (Johnson and Lindenstrauss;
the released LESS leaves the signs unscaled, here the entries are +-1/sqrt(d)).

Two ideas make it reproducible:

- The sign in row i and column j is bit j mod 64 of hash(seed, i, j // 64). It is computed where it is needed and stored
nowhere, so a
  matrix of 10**7 x 8,192 takes the memory of one block of it. Signs of a block are made once and used for every row of a batch.
- Sums are exact. A row is rounded to a grid of 2**-22 of its largest entry and cut into two parts of 11 bits, whose partial sums
  float32 holds without rounding, or into three of 8 bits for the integer units of newer processors. Exact sums do not depend on
  their order: blocks, threads, BLAS, number format and GPU may differ, the result may not. The rounding is far below the
  projection's own error of 1/sqrt(d).
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise

import numpy as np
import torch

from clusterft.feature_columns import PROJECTION_VERSION
from clusterft.jit import compiled

GRID_BITS = 22  # a row's largest entry becomes an integer of at most this many bits
PART_BITS = 11  # of the lower part; the upper part then has at most 11 bits as well
MAX_BLOCK = 1 << (24 - PART_BITS)  # so many 11-bit integers sum exactly in float32
MAX_FEATURES = 1 << (53 - GRID_BITS)  # so many 22-bit integers sum exactly in float64
BLOCK_BYTES = 1 << 23  # a block of int8 signs that a processor's last cache holds; float32 ones take four times that
SIGNS_A_THREAD = 1 << 19
BACKENDS = ("numba", "torch")

_ROW_STEP = 0x9E3779B97F4A7C15
_WORD_STEP = 0xD1B54A32D192ED03
_MIX_1 = 0xBF58476D1CE4E5B9
_MIX_2 = 0x94D049BB133111EB
_SIGN_TABLE = (1 - 2 * ((np.arange(256)[:, None] >> np.arange(8)) & 1)).astype(np.int8)
_SIGN_WORDS = np.ascontiguousarray(_SIGN_TABLE).view(np.uint64)[:, 0].copy()  # eight signs of one byte each, as one word


@dataclass(frozen=True)
class SignProjection:
    """A projection from p = `n_features` to d = `dim` columns, named by its seed.

    backend         numba (CPU) | torch (any device); bit-identical, also with each other
    block_features  rows of the sign matrix made at a time, at most 8,192, None for about 8 MiB of them as int8 (at least 64
                    rows); changes speed, never a result
    products        float32 | int8: how the exact sums are made; None takes what is faster here (int8 on the CPU only)

    Raises ValueError for an unknown backend or sizes outside the exact range.
    """

    n_features: int
    dim: int
    seed: int
    backend: str = "numba"
    block_features: int | None = None
    products: str | None = None

    def __post_init__(self) -> None:
        if self.backend not in BACKENDS:
            raise ValueError(f"projection backend {self.backend!r} is unknown; known are {', '.join(BACKENDS)}")
        if not 1 <= self.n_features <= MAX_FEATURES or self.dim < 1:
            raise ValueError(f"projection from {self.n_features} to {self.dim} columns; p is 1 ... {MAX_FEATURES}, d >= 1")
        if self.products not in (None, "float32", "int8"):
            raise ValueError(f"products {self.products!r} is unknown; known are float32, int8")
        if self.block_features is not None and not 1 <= self.block_features <= MAX_BLOCK:
            raise ValueError(f"block_features is {self.block_features}; exact sums need 1 ... {MAX_BLOCK}")

    @property
    def fingerprint(self) -> str:
        """Names the matrix: features projected under different fingerprints must never meet. The backend is no part of it."""
        text = f"sign-projection/{PROJECTION_VERSION}/{self.n_features}/{self.dim}/{self.seed}"
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def signs(self, start: int, stop: int, device: str | torch.device = "cpu") -> torch.Tensor:
        """(stop - start, d) float32 of +-1: rows start ... stop - 1 of the matrix, not yet scaled."""
        return self._signs(start, stop, device).float()

    def _signs(self, start: int, stop: int, device: str | torch.device, space: np.ndarray | None = None) -> torch.Tensor:
        """(stop - start, d) int8. space (rows, 64 words) int8: memory to make them in, new memory costs as much as the signs."""
        words = -(-self.dim // 64)
        if self.backend == "numba":
            out = np.empty((stop - start, words * 64), np.int8) if space is None else space[: stop - start]
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
        products = self.products or ("float32" if rows.is_cuda else faster_products())
        blocks = list(self._blocks())
        space = np.empty((blocks[0][1], -(-self.dim // 64) * 64), np.int8) if self.backend == "numba" else None
        for start, stop in blocks:
            signs = self._signs(start, stop, rows.device, space)
            if products == "int8":
                total += _int8_sums(self._int8_parts(rows[:, start:stop], exponent), signs)
            else:
                total += _float32_sums(_on_grid(rows[:, start:stop], exponent), signs.float())
        scaled = torch.ldexp(total, exponent[:, None] - GRID_BITS) / self.dim**0.5
        return torch.where(finite[:, None], scaled, torch.nan).float()

    def _blocks(self) -> Iterator[tuple[int, int]]:
        step = self.block_features or max(64, min(MAX_BLOCK, BLOCK_BYTES // self.dim))
        for start in range(0, self.n_features, step):
            yield start, min(start + step, self.n_features)

    def _int8_parts(self, block: torch.Tensor, exponent: torch.Tensor) -> torch.Tensor:
        """(3 b, c) int8: low, middle and high parts of the rows on their grid; one compiled loop where there is numba."""
        if self.backend == "numba" and block.dtype == torch.float32:
            out = np.empty((3, *block.shape), np.int8)
            _cut_rows(block.detach().numpy(), exponent.numpy(), out)
            return torch.from_numpy(out).view(-1, block.shape[1])
        return _int8_parts_of(_on_grid(block, exponent))


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


def _on_grid(block: torch.Tensor, exponent: torch.Tensor) -> torch.Tensor:
    """(b, c) float64 of integers, at most 2**22: round(block * 2**(22 - e)), and 0 where the block is not finite."""
    grid = torch.ldexp(block.double(), GRID_BITS - exponent[:, None]).round_()
    return torch.nan_to_num(grid, nan=0.0, posinf=0.0, neginf=0.0)


def _float32_sums(grid: torch.Tensor, signs: torch.Tensor) -> torch.Tensor:
    """(b, d) float64: grid @ signs, exact. Two parts of at most 11 bits, in a product that is really float32."""
    upper = torch.floor(grid / (1 << PART_BITS) + 0.5)
    parts = torch.cat([upper, grid - upper * (1 << PART_BITS)]).float()
    with _full_float32():
        sums = (parts @ signs).double()
    return sums[: len(grid)] * (1 << PART_BITS) + sums[len(grid) :]


def _int8_parts_of(grid: torch.Tensor) -> torch.Tensor:
    """(3 b, c) int8 parts of a grid (b, c) of whole numbers: grid = low + 2**8 middle + 2**16 high."""
    rest, parts = grid.int(), []
    for _ in range(3):
        part = ((rest + 128) & 255) - 128
        parts.append(part.to(torch.int8))
        rest = (rest - part) >> 8
    return torch.cat(parts)


def _int8_sums(parts: torch.Tensor, signs: torch.Tensor) -> torch.Tensor:
    """(b, d) float64: grid @ signs, exact, from the grid's three parts (3 b, c). Summed in int32."""
    low, middle, high = torch._int_mm(parts, signs.contiguous()).double().chunk(3)
    return low + middle * 256 + high * 65536


@compiled
def _cut_rows(block, exponents, out):
    """`_int8_parts_of(_on_grid(block, exponents))` in one pass: block (b, c) float32, out (3, b, c) int8."""
    for i in range(block.shape[0]):
        scale = 2.0 ** (GRID_BITS - exponents[i])
        for j in range(block.shape[1]):
            value = np.float64(block[i, j])
            whole = np.int32(np.rint(value * scale)) if np.isfinite(value) else np.int32(0)
            low = np.int32(((whole + 128) & 255) - 128)
            whole = (whole - low) >> 8
            middle = np.int32(((whole + 128) & 255) - 128)
            out[0, i, j], out[1, i, j], out[2, i, j] = low, middle, (whole - middle) >> 8


@lru_cache(maxsize=1)
def faster_products() -> str:
    """float32 | int8: the faster on this CPU, by a few milliseconds of trial. Both give the same bits, so the choice is free."""
    if not hasattr(torch, "_int_mm"):
        return "float32"
    grid = torch.arange(64 * 1024, dtype=torch.float64).reshape(64, 1024) * 61 - (1 << 20)
    signs = torch.ones(1024, 512, dtype=torch.int8)
    seconds = {}
    ways = {
        "float32": lambda: _float32_sums(grid, signs.float()),
        "int8": lambda: _int8_sums(_int8_parts_of(grid), signs),
    }
    for name, sums in ways.items():
        sums()
        started = time.process_time()
        for _ in range(4):
            sums()
        seconds[name] = time.process_time() - started
    return min(seconds, key=seconds.__getitem__)


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
    """Fills runs of rows (c, 64 w) int8 in as many threads as torch has. Not by numba's own threads: their OpenMP layer would
    change torch's number."""
    threads = max(1, min(torch.get_num_threads(), out.size // SIGNS_A_THREAD))
    edges = [len(out) * i // threads for i in range(threads + 1)]
    words = out.view(np.uint64)
    others = [_threads().submit(_fill_signs, key, start + a, words[a:b], _SIGN_WORDS) for a, b in pairwise(edges[1:])]
    _fill_signs(key, start, words[: edges[1]], _SIGN_WORDS)
    for other in others:
        other.result()


@lru_cache(maxsize=1)
def _threads() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(thread_name_prefix="signs")


@compiled
def _fill_signs(key: np.uint64, start: int, out: np.ndarray, table: np.ndarray) -> None:
    """out (c, 8 w) uint64, eight signs each; table (256,) uint64. The hash is the finaliser of SplitMix64 (Steele, Lea and Flood
    2014), applied to the row, then the word. Eight signs are one look-up and one store, with either order of bytes in memory."""
    for row in range(out.shape[0]):
        base = key + np.uint64(start + row) * np.uint64(_ROW_STEP)
        base = (base ^ (base >> np.uint64(30))) * np.uint64(_MIX_1)
        base = (base ^ (base >> np.uint64(27))) * np.uint64(_MIX_2)
        base = base ^ (base >> np.uint64(31))
        for word in range(out.shape[1] // 8):
            bits = base + np.uint64(word) * np.uint64(_WORD_STEP)
            bits = (bits ^ (bits >> np.uint64(30))) * np.uint64(_MIX_1)
            bits = (bits ^ (bits >> np.uint64(27))) * np.uint64(_MIX_2)
            bits = bits ^ (bits >> np.uint64(31))
            for byte in range(8):
                out[row, word * 8 + byte] = table[(bits >> np.uint64(8 * byte)) & np.uint64(255)]


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
