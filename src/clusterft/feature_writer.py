"""What an extractor writes through, and the merge at the end.

In come blocks of rows from `extractor(context, spec, writer)`; out comes one `rows.npy` (n, d) in canonical order (ids sorted),
with an account of what the attempts cost. The files in between are those of `feature_shards`.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import resource
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from clusterft.atomic import write_atomic
from clusterft.feature_shards import Shard, merged_blocks, npy_header, shard_numbers
from clusterft.records import Cost

COST_SECONDS = 5.0
"""The account of an attempt is written at most this often; a kill loses no more of it."""


class Finaliser(Protocol):
    """A change that needs all rows (subtracting the mean). Sees every block twice, in canonical order, on rank 0."""

    def observe(self, rows: np.ndarray) -> None: ...

    def apply(self, rows: np.ndarray) -> np.ndarray: ...


@dataclass
class Account:
    """What one rank spent in one attempt. Times in seconds; passes count samples."""

    attempt: int
    rank: int
    wall_seconds: float = 0.0
    cpu_seconds: float = 0.0
    peak_memory_gib: float = 0.0
    flops: float = 0.0
    forward_passes: float = 0.0
    backward_passes: float = 0.0


def total_cost(accounts: Sequence[Account], bytes_stored: int) -> Cost:
    """Wall time: the slowest rank of each attempt, attempts added. Peak memory: of the largest process. The rest: sums."""
    walls: dict[int, float] = {}
    for a in accounts:
        walls[a.attempt] = max(a.wall_seconds, walls.get(a.attempt, 0.0))
    return Cost(
        wall_seconds=sum(walls.values()),
        cpu_seconds=sum(a.cpu_seconds for a in accounts),
        peak_memory_gib=max((a.peak_memory_gib for a in accounts), default=0.0),
        flops=sum(a.flops for a in accounts),
        forward_passes=sum(a.forward_passes for a in accounts),
        backward_passes=sum(a.backward_passes for a in accounts),
        bytes_stored=bytes_stored,
    )


def read_accounts(folder: Path) -> list[Account]:
    return [Account(**json.loads(p.read_text())) for p in sorted(folder.glob("account-*.json"))]


@dataclass
class RowWriter:
    """What an extractor writes through. All row numbers are positions in the pool.

    done  (n,) bool: rows that an earlier attempt left behind, the same on every rank
    """

    folder: Path
    places: np.ndarray  # (n,) canonical place of each pool position
    rank: int
    done: np.ndarray = field(init=False)
    finaliser: Finaliser | None = field(init=False, default=None)
    notes: dict[str, Any] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        n = len(self.places)
        done = np.zeros(n, bool)
        for number in shard_numbers(self.folder):
            shard = Shard(self.folder, number, n)
            done |= shard.verified()
            shard.close()
        self.done = done[self.places]
        attempts = [a.attempt for a in read_accounts(self.folder)]
        self._account = Account(attempt=max(attempts, default=-1) + 1, rank=self.rank)
        self._extra: dict[str, np.ndarray] = {}
        self._shard: Shard | None = None
        self._wall, self._cpu, self._saved = time.perf_counter(), time.process_time(), time.perf_counter()

    @property
    def pending(self) -> np.ndarray:
        """Pool positions that no earlier attempt finished, ascending."""
        return np.flatnonzero(~self.done)

    def put(self, row_indices: np.ndarray | Sequence[int], rows: np.ndarray) -> None:
        """Stores rows (b, d) at pool positions (b,). Safe against SIGKILL as soon as it returns.

        The first call fixes d and the dtype. Raises ValueError on another shape, a value that is not finite, or a bad position.
        """
        row_indices = np.asarray(row_indices, np.int64)
        rows = np.ascontiguousarray(rows)
        if rows.ndim != 2 or row_indices.shape != (len(rows),):
            raise ValueError(f"put takes (b,) positions and (b, d) rows, got {row_indices.shape} and {rows.shape}")
        if len(rows) == 0:
            return
        if row_indices.min() < 0 or row_indices.max() >= len(self.places):
            raise ValueError(f"row positions must lie in [0, {len(self.places)}), got {row_indices.min()} to {row_indices.max()}")
        bad = np.flatnonzero(~np.isfinite(rows).all(axis=1))
        if len(bad):
            raise ValueError(f"{len(bad)} rows hold values that are not finite, the first at pool position {row_indices[bad[0]]}")
        if self._shard is None:
            self._shard = Shard(self.folder, self.rank, len(self.places))
        self._shard.put(self.places[row_indices], rows)
        if time.perf_counter() - self._saved > COST_SECONDS:
            self._save_account()

    def put_extra(self, **arrays: np.ndarray) -> None:
        """Small arrays beside the rows (validation rows, names). Only rank 0's are kept."""
        self._extra.update(arrays)

    def note(self, **facts: Any) -> None:
        """JSON-able facts for the manifest (ids of zero rows, ...). Only rank 0's are kept."""
        self.notes.update(facts)

    def finalise_with(self, finaliser: Finaliser) -> None:
        """Asks for a change over all rows after the merge. Call it alike on every rank."""
        self.finaliser = finaliser

    def add_cost(self, *, flops: float = 0.0, forward_passes: float = 0.0, backward_passes: float = 0.0) -> None:
        """Adds to this rank's account. Passes count samples, not batches."""
        self._account.flops += flops
        self._account.forward_passes += forward_passes
        self._account.backward_passes += backward_passes

    def _save_account(self) -> None:
        a = self._account
        a.wall_seconds = time.perf_counter() - self._wall
        a.cpu_seconds = time.process_time() - self._cpu
        a.peak_memory_gib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024**2
        name = f"account-{a.attempt}-{a.rank}.json"
        write_atomic(self.folder / name, json.dumps(asdict(a)).encode())
        self._saved = time.perf_counter()

    def close(self) -> None:
        """Syncs this rank's rows and account to disk."""
        if self._shard is not None:
            self._shard.close()
            self._shard = None
        self._save_account()

    def merge(self) -> tuple[int, np.dtype, str]:
        """Rank 0, after everybody closed: shards ► rows.npy. Returns (d, dtype, SHA-256 of the file).

        Raises ValueError if a row is missing or damaged, or shards disagree about the width.
        """
        n = len(self.places)
        shards = [s for s in (Shard(self.folder, i, n) for i in shard_numbers(self.folder)) if s.has_rows]
        widths = {(s.d, s.dtype) for s in shards}
        if len(widths) != 1:
            raise ValueError(f"{self.folder}: shards hold rows of {sorted(map(str, widths)) or 'no'} widths; delete the folder")
        ((d, dtype),) = widths
        try:
            if self.finaliser is not None:
                for block in merged_blocks(shards, n):
                    self.finaliser.observe(block)
            digest = self._write_rows(merged_blocks(shards, n), (n, d), dtype)
        finally:
            for shard in shards:
                shard.close()
        return d, dtype, digest

    def _write_rows(self, blocks: Iterator[np.ndarray], shape: tuple[int, int], dtype: np.dtype) -> str:
        temporary = self.folder / ".rows.npy.tmp"
        digest = hashlib.sha256()
        with temporary.open("wb") as file:
            header = npy_header(shape, dtype)
            file.write(header)
            digest.update(header)
            for block in blocks:
                out = block if self.finaliser is None else np.ascontiguousarray(self.finaliser.apply(block), dtype)
                file.write(out.data)
                digest.update(out.data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, self.folder / "rows.npy")
        return digest.hexdigest()

    def save_extra(self) -> None:
        """Rank 0: writes extra.npz when there is anything to keep."""
        if self._extra:
            buffer = io.BytesIO()
            np.savez(buffer, **self._extra)
            write_atomic(self.folder / "extra.npz", buffer.getvalue())

    def discard_shards(self) -> None:
        """Rank 0, once the manifest is down: the shards have served."""
        for path in leftovers(self.folder):
            path.unlink(missing_ok=True)


def leftovers(folder: Path) -> list[Path]:
    """Files in a finished feature's folder that only its making needed: shards, and what a killed process left half written."""
    return [p for pattern in ("shard-*", "done-*.npy", "sums-*.npy", ".*.tmp") for p in folder.glob(pattern)]
