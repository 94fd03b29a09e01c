"""The files of a feature in the making: one sparse shard a rank, a done-bitmap, a checksum a row.

In come blocks of rows with their canonical places (ids sorted); out come the merged rows, block by block.

    put ► shard-<rank>.npy  (pwrite at the row's place)          ┐
        ► done-<rank>.npy   (n,) uint8, 1 once the row is there  ├► merged_blocks
        ► sums-<rank>.npy   (n,) uint32, CRC-32 of the row       ┘

No two ranks ever write to one file, so ranks may sit on several nodes over a shared file system. The page cache survives SIGKILL:
a row whose bit is set is never computed twice. A power failure may lose pages whose bit did reach the disk; the checksum tells.
"""

from __future__ import annotations

import io
import os
import re
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from clusterft.atomic import write_atomic

MERGE_BYTES = 32 * 1024 * 1024
"""Bytes of rows held at once while merging and verifying: memory does not depend on n."""


def npy_header(shape: tuple[int, ...], dtype: np.dtype) -> bytes:
    """The first bytes of an .npy file (version 1.0, C order) of this shape."""
    buffer = io.BytesIO()
    description = np.lib.format.dtype_to_descr(np.dtype(dtype))
    np.lib.format.write_array_header_1_0(buffer, {"descr": description, "fortran_order": False, "shape": shape})
    return buffer.getvalue()


def read_npy_header(path: Path) -> tuple[tuple[int, ...], np.dtype, int]:
    """(shape, dtype, offset of the first element in bytes) of an .npy file."""
    with path.open("rb") as file:
        np.lib.format.read_magic(file)
        shape, _, dtype = np.lib.format.read_array_header_1_0(file)
        return shape, dtype, file.tell()


def _map_flags(path: Path, n: int, dtype: type) -> np.ndarray:
    """A shared, writable memory map of n flags; made of zeros if it is not there."""
    if not path.exists():
        write_atomic(path, npy_header((n,), np.dtype(dtype)) + bytes(n * np.dtype(dtype).itemsize))
    flags = np.load(path, mmap_mode="r+")
    if flags.shape != (n,):
        raise ValueError(f"{path} has {flags.shape[0]} entries, this pool has {n} rows; delete the folder {path.parent}")
    return flags


class Shard:
    """The rows of one rank: a sparse file of the full (n, d), its bitmap and its checksums."""

    def __init__(self, folder: Path, number: int, n: int) -> None:
        self.path = folder / f"shard-{number}.npy"
        self.n = n
        self.done = _map_flags(folder / f"done-{number}.npy", n, np.uint8)
        self.sums = _map_flags(folder / f"sums-{number}.npy", n, np.uint32)
        self._file: int | None = None
        if self.path.exists():
            self._open_rows()

    @property
    def has_rows(self) -> bool:
        return self._file is not None

    def _open_rows(self) -> None:
        shape, self.dtype, self._offset = read_npy_header(self.path)
        self.d = shape[1]
        self._file = os.open(self.path, os.O_RDWR)

    def _make_rows(self, d: int, dtype: np.dtype) -> None:
        header = npy_header((self.n, d), dtype)
        temporary = self.path.with_suffix(".tmp")
        with temporary.open("wb") as file:
            file.write(header)
            file.truncate(len(header) + self.n * d * dtype.itemsize)
        os.replace(temporary, self.path)
        self._open_rows()

    def put(self, places: np.ndarray, rows: np.ndarray) -> None:
        """Rows (b, d) to canonical places (b,): first the bytes, then the checksum, last the bit."""
        if self._file is None:
            self._make_rows(rows.shape[1], rows.dtype)
        if (rows.shape[1], rows.dtype) != (self.d, self.dtype):
            raise ValueError(f"{self.path.name} holds rows of {self.d} {self.dtype}, got {rows.shape[1]} {rows.dtype}")
        width = self.d * self.dtype.itemsize
        sums = np.empty(len(rows), np.uint32)
        for i, place in enumerate(places):
            data = rows[i].tobytes()
            if os.pwrite(self._file, data, self._offset + int(place) * width) != width:
                raise OSError(f"{self.path}: a row could not be written whole; is the disk full?")
            sums[i] = zlib.crc32(data)
        self.sums[places] = sums
        self.done[places] = 1

    def read(self, start: int, stop: int) -> np.ndarray:
        """Rows start ... stop-1, (stop-start, d); rows that are not done hold zeros or the leavings of a crash."""
        assert self._file is not None
        width = self.d * self.dtype.itemsize
        data = os.pread(self._file, (stop - start) * width, self._offset + start * width)
        if len(data) != (stop - start) * width:
            raise ValueError(f"{self.path} is shorter than its header says; delete the folder {self.path.parent}")
        return np.frombuffer(data, self.dtype).reshape(stop - start, self.d)

    def verified(self) -> np.ndarray:
        """(n,) bool: done, and the bytes match their checksum. Reads every done row once."""
        good = np.zeros(self.n, bool)
        if self._file is None:
            return good
        for start, stop in row_ranges(self.n, self.d * self.dtype.itemsize):
            if self.done[start:stop].any():
                rows = self.read(start, stop)
                for i in np.flatnonzero(self.done[start:stop]):
                    good[start + i] = zlib.crc32(rows[i].tobytes()) == self.sums[start + i]
        return good

    def close(self) -> None:
        if self._file is not None:
            os.fsync(self._file)
            os.close(self._file)
            self._file = None
        self.done.flush()
        self.sums.flush()


def row_ranges(n: int, row_bytes: int) -> Iterator[tuple[int, int]]:
    """Consecutive (start, stop) that cover n rows, each about MERGE_BYTES."""
    step = max(1, MERGE_BYTES // max(1, row_bytes))
    for start in range(0, n, step):
        yield start, min(n, start + step)


def shard_numbers(folder: Path) -> list[int]:
    """Numbers of the shards that exist, ascending: those of ranks that no longer run count too."""
    found = (re.fullmatch(r"done-(\d+)\.npy", p.name) for p in folder.glob("done-*.npy"))
    return sorted(int(m.group(1)) for m in found if m)


def merged_blocks(shards: Sequence[Shard], n: int) -> Iterator[np.ndarray]:
    """Blocks of rows in canonical order, each row from the first shard that has it whole. Raises ValueError for a missing row."""
    d, dtype = shards[0].d, shards[0].dtype
    for start, stop in row_ranges(n, d * dtype.itemsize):
        block, filled = np.zeros((stop - start, d), dtype), np.zeros(stop - start, bool)
        for shard in shards:
            wanted = np.flatnonzero(shard.done[start:stop].astype(bool) & ~filled)
            if not len(wanted):
                continue
            rows = shard.read(start, stop)
            whole = [i for i in wanted if zlib.crc32(rows[i].tobytes()) == shard.sums[start + i]]
            block[whole], filled[whole] = rows[whole], True
        if not filled.all():
            first = start + int(np.flatnonzero(~filled)[0])
            raise ValueError(
                f"{shards[0].path.parent}: {int((~filled).sum())} rows of {start} to {stop - 1} are missing or damaged, "
                f"the first at canonical place {first}; start the run again to compute them"
            )
        yield block
