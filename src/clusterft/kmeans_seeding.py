"""Where K-means starts: several restarts race on a small sample of the rows, and the best one is refined on all of them.

In go a surveyed `RowTable` and a seed; out come k centres. The sample is drawn by hashes of the rows' contents and worked on in
their order, on one thread, so that neither the order of the rows nor the number of threads has a say. Wide rows are projected
onto the leading directions of the sample first; the centres are then the means of the sample's unprojected rows.

Where the table is larger than the sample, restarts are cheap beside the passes over all rows, yet few of them avoid the local
optimum in which two clusters share a centre and one has two. The best is then improved by swaps (Fränti and Kivijärvi 2000):
one centre jumps to a far row, and the change stays if a few iterations make it pay.
"""

from __future__ import annotations

import numpy as np
from threadpoolctl import threadpool_limits

from clusterft.lloyd import LloydResult, lloyd, own_sq_distances
from clusterft.rows import RowTable
from clusterft.seeding import generator, seed_hash

WIDTH = 64
EARLY_ITERATIONS, FINALISTS = 6, 3
SWAP_ITERATIONS, SWAP_GAIN = 3, 1e-3
BASIS_ROWS, BASIS_ROWS_PER_CLUSTER = 1024, 4
SAMPLE_ROWS = 4096
SAMPLE_ROWS_PER_CLUSTER = 96


def starting_centers(
    table: RowTable, k: int, low: np.ndarray, high: np.ndarray, *, n_init: int, max_iter: int, seed: int
) -> np.ndarray:
    """(k, d) float64 centres: the best of n_init restarts of K-means under the limits, scaled down to the sample."""
    rows = sample_rows(table, max(SAMPLE_ROWS, SAMPLE_ROWS_PER_CLUSTER * k), seed)
    scaled = _scaled_limits(low, high, rows.size, table.n)
    with threadpool_limits(1):
        sample = table.block(rows)
        narrow = _narrow(sample, max(BASIS_ROWS, BASIS_ROWS_PER_CLUSTER * k), seed)
        small = RowTable(narrow).survey()
        best = _race(small, narrow, k, scaled, n_init, max_iter, seed)
        if rows.size < table.n and k > 1:
            best = _swapped(small, narrow, best, scaled, n_init, max_iter, seed)
    if table.d <= 2 * WIDTH:
        return best.centers
    return np.stack([sample[best.labels == c].mean(0, dtype=np.float64) for c in range(k)])


def _scaled_limits(low: np.ndarray, high: np.ndarray, size: int, n: int) -> tuple[np.ndarray, np.ndarray]:
    """Limits for `size` of n rows, at least one row a cluster and always feasible."""
    few = np.maximum(np.floor(low * (size / n)).astype(np.int64), 1)
    few[few.argmax()] -= max(0, int(few.sum()) - size)
    return few, np.minimum(size, np.ceil(high * (size / n)).astype(np.int64))


def _race(table: RowTable, points: np.ndarray, k: int, limits, n_init: int, max_iter: int, seed: int) -> LloydResult:
    """All restarts run a few iterations, the best of them to the end."""
    early = min(max_iter, EARLY_ITERATIONS)
    starts = [plus_plus(points, k, generator(seed, "kmeans++", restart)) for restart in range(n_init)]
    runs = [lloyd(table, start, *limits, max_iter=early, tolerance=1e-3) for start in starts]
    runs.sort(key=lambda run: run.inertia)
    left = max_iter - early
    ended = [
        run if run.converged or not left else lloyd(table, run.centers, *limits, max_iter=left, tolerance=1e-3)
        for run in runs[:FINALISTS]
    ]
    return min(ended, key=lambda run: run.inertia)


def _swapped(
    table: RowTable, points: np.ndarray, best: LloydResult, limits, n_init: int, max_iter: int, seed: int
) -> LloydResult:
    """Swaps until 2 x n_init in a row were in vain: a centre drawn evenly moves to a row drawn by its squared distance to its own centre.
    Never worse than `best`."""
    rng = generator(seed, "kmeans swaps")
    few, k = min(max_iter, SWAP_ITERATIONS), len(best.centers)
    first, vain = best, 0
    while vain < 2 * n_init:
        cumulative = np.cumsum(own_sq_distances(table, best.centers, best.labels))
        row = int(np.searchsorted(cumulative, rng.random() * cumulative[-1], side="right").clip(max=len(points) - 1))
        centers = best.centers.copy()
        centers[rng.integers(k)] = points[row]
        run = lloyd(table, centers, *limits, max_iter=few, tolerance=1e-3)
        vain = 0 if run.inertia < best.inertia * (1 - SWAP_GAIN) else vain + 1
        best = run if run.inertia < best.inertia else best
    if best is first or best.converged or max_iter == few:
        return best
    return lloyd(table, best.centers, *limits, max_iter=max_iter - few, tolerance=1e-3)


def sample_rows(table: RowTable, size: int, seed: int) -> np.ndarray:
    """Rows whose seeded lot is smallest, in the order of the lots: the same contents for any order of the table."""
    size = min(size, table.n)
    mixed = (table.draws ^ np.uint64(seed_hash(seed, "kmeans sample"))) * np.uint64(0x9E3779B97F4A7C15)
    mixed ^= mixed >> np.uint64(32)
    few = np.argpartition(mixed, size - 1)[:size] if size < table.n else np.arange(table.n)
    return few[np.argsort(mixed[few], kind="stable")]


def plus_plus(points: np.ndarray, k: int, rng: np.random.Generator) -> np.ndarray:
    """(k, d) rows of points (n, d) by greedy k-means++ (Arthur and Vassilvitskii 2007; 2 + log k candidates a step)."""
    tries = 2 + int(np.log(k))
    lengths = (points**2).sum(1)
    chosen = [int(rng.integers(len(points)))]
    nearest = _sq_distances_to(points, lengths, chosen)[0]
    for _ in range(1, k):
        cumulative = np.cumsum(nearest)
        if cumulative[-1] > 0:
            picks = np.searchsorted(cumulative, rng.random(tries) * cumulative[-1], side="right").clip(max=len(points) - 1)
        else:  # fewer distinct rows than clusters: any row is as good as another
            picks = rng.integers(len(points), size=tries)
        candidates = np.minimum(_sq_distances_to(points, lengths, picks), nearest)
        best = int(candidates.sum(1).argmin())
        chosen.append(int(picks[best]))
        nearest = candidates[best]
    return points[chosen]


def _sq_distances_to(points: np.ndarray, lengths: np.ndarray, picks) -> np.ndarray:
    distances = lengths[picks][:, None] - 2.0 * points[picks] @ points.T + lengths
    distances[np.arange(len(distances)), picks] = 0.0
    return distances.clip(min=0.0)


def _narrow(sample: np.ndarray, most: int, seed: int) -> np.ndarray:
    """The sample on its WIDTH leading directions, or itself if it is narrow.

    The directions come from a randomised range finder with two power iterations over the first `most` rows: the sample is in
    random order.
    """
    if sample.shape[1] <= 2 * WIDTH:
        return sample.astype(np.float64)
    centred = (sample - sample.mean(0, dtype=np.float64).astype(sample.dtype)).astype(np.float32, copy=False)
    basis = generator(seed, "kmeans projection").standard_normal((sample.shape[1], WIDTH + 8), dtype=np.float32)
    few = centred[:most]
    for _ in range(2):
        basis = np.linalg.qr(few.T @ (few @ basis))[0]
    found = (centred @ basis).astype(np.float64)
    return found @ np.linalg.eigh(found.T @ found)[1][:, ::-1][:, :WIDTH]
