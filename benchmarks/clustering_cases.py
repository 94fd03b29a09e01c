"""The grid of the clustering benchmark: sizes, made-up rows, and the two yardsticks (memory above the data, the bare product).

In comes a `Case`; out come its rows, of unit length and uneven cluster sizes, in memory or as a float16 memory map.
"""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np

PEERS = ("min_cost_flow", "released", "unconstrained")
"""k-means-constrained with one start; plain K-means with ten starts and one greedy pass; scikit-learn's KMeans with ten starts and no
limits, which solves an easier problem."""


@dataclass(frozen=True)
class Case:
    """One row of the grid. mapped: float16 in a memory map. repeats: runs of our own solver, of which the median counts."""

    n: int
    d: int
    k: int
    alpha: float = 1.5
    mapped: bool = False
    peers: tuple[str, ...] = PEERS
    repeats: int = 1

    @property
    def name(self) -> str:
        return f"{self.n}x{self.d}x{self.k}"


WITHOUT_FLOW = ("released", "unconstrained")

QUICK = (Case(10_000, 64, 8), Case(5_000, 512, 8))
FULL = (
    Case(10_000, 64, 16, repeats=3),
    Case(25_000, 64, 8, 1.0, repeats=3),
    Case(25_000, 64, 16, repeats=3),
    Case(75_000, 64, 8, repeats=3),
    Case(75_000, 64, 16, repeats=3),
    Case(10_000, 2048, 8, repeats=3),
    Case(75_000, 2048, 4, repeats=3, peers=WITHOUT_FLOW),
    Case(75_000, 2048, 8, repeats=3, peers=WITHOUT_FLOW),
    Case(1_000_000, 64, 4, peers=("unconstrained",)),
    Case(1_000_000, 64, 16, peers=("unconstrained",)),
    Case(1_000_000, 64, 64, peers=()),
    Case(5_000_000, 256, 16, mapped=True, peers=()),
)
GROWTH_ROWS, GROWTH_CLUSTERS = (62_500, 250_000, 1_000_000), (2, 4, 8, 16, 64, 256)
FLOW_GROWTH = tuple(Case(n, 2048, 8, peers=("min_cost_flow",)) for n in (2_500, 5_000, 10_000, 20_000))
"""Sizes that k-means-constrained can do at the width of the largest case, from which its growth is read."""


def make_rows(case: Case, folder: Path, seed: int = 0, block: int = 8192) -> np.ndarray:
    """(n, d) rows of unit length around 2k directions with frequencies 1, 1/2, 1/3, ...; made in blocks to keep the peak low."""
    rng = np.random.default_rng(seed)
    parts = 2 * case.k
    weights = 1 / np.arange(1, parts + 1)
    centers = rng.normal(size=(parts, case.d)).astype(np.float32)
    own = rng.choice(parts, case.n, p=weights / weights.sum())
    shape = (case.n, case.d)
    rows = np.lib.format.open_memmap(folder / "rows.npy", "w+", np.float16, shape) if case.mapped else np.empty(shape, np.float32)
    for start in range(0, case.n, block):
        some = own[start : start + block]
        values = centers[some] + np.float32(0.6) * rng.standard_normal((some.size, case.d), dtype=np.float32)
        rows[start : start + block] = values / np.linalg.norm(values, axis=1, keepdims=True)
    if case.mapped:
        rows.flush()
        return np.load(folder / "rows.npy", mmap_mode="r")
    return rows


class PeakMemory:
    """Peak of the process's anonymous memory above that at entry, in MB, looked at 100 times a second."""

    def __enter__(self) -> PeakMemory:
        self.start = self.peak = self._now()
        self.done = threading.Event()
        self.thread = threading.Thread(target=self._watch)
        self.thread.start()
        return self

    def __exit__(self, *unused) -> None:
        self.done.set()
        self.thread.join()
        self.peak = max(self.peak, self._now())

    @property
    def extra(self) -> float:
        return (self.peak - self.start) / 1024

    def _watch(self) -> None:
        while not self.done.wait(0.01):
            self.peak = max(self.peak, self._now())

    @staticmethod
    def _now() -> int:
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("RssAnon:"):
                return int(line.split()[1])
        raise RuntimeError("this benchmark reads RssAnon from /proc/self/status, which this system does not have")


def product_seconds(rows: np.ndarray, centers: np.ndarray) -> float:
    """CPU seconds of one float32 product of all rows with the centres, in blocks (reading the rows included)."""
    factors = np.ascontiguousarray(centers.T.astype(np.float32))
    best = float("inf")
    for _ in range(3):
        started = time.process_time()
        for start in range(0, len(rows), 4096):
            np.asarray(rows[start : start + 4096], np.float32) @ factors
        best = min(best, time.process_time() - started)
    return best
