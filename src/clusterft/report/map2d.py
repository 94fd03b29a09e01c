"""Pictures and comparisons in the space of the proxies: the 2-D map and the near-duplicates that the balance removed.

In: proxies (n, h), which may be a memory map. Only the rows that are drawn or compared are read, in blocks.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np

from clusterft.seeding import seed_hash

MAP_POINTS = 5000
"""Most points on a map: more only hide each other and make the page heavy."""
SIDE_ROWS = 8000
"""Most kept and most dropped rows of a cluster that are compared for near-duplicates."""
BLOCK_ROWS = 2048


def by_hash(ids: Sequence[str], most: int) -> np.ndarray:
    """Up to `most` positions, in order of the SHA-256 of the ids: the same rows whatever their order or number of processes."""
    keys = [hashlib.sha256(i.encode("utf-8", "surrogatepass")).digest() for i in ids]
    return np.array(sorted(range(len(keys)), key=keys.__getitem__)[:most], dtype=np.int64)


def usable_mask(proxies: np.ndarray) -> np.ndarray:
    """(n,) bool: proxies that are finite and not zero, read in blocks."""
    mask = np.empty(len(proxies), dtype=bool)
    for start in range(0, len(proxies), BLOCK_ROWS):
        block = np.asarray(proxies[start : start + BLOCK_ROWS])
        mask[start : start + BLOCK_ROWS] = np.isfinite(block).all(axis=1) & block.any(axis=1)
    return mask


def drawable(proxies: np.ndarray, usable: np.ndarray) -> bool:
    """True if `project` can place the usable rows."""
    return bool(usable.sum() >= 3 and proxies.shape[1] >= 2)


def project(points: np.ndarray, seed: int) -> tuple[np.ndarray, tuple[float, float]]:
    """(p, 2) float64 first two principal components of points (p, h) and the share of variance of each.

    The randomised solver is seeded, and signs are fixed by scikit-learn. Raises ValueError for fewer than 3 rows or 2 columns.
    """
    from sklearn.decomposition import PCA

    if points.shape[0] < 3 or points.shape[1] < 2:
        raise ValueError(f"a map needs at least 3 rows of 2 numbers, got {points.shape}")
    pca = PCA(n_components=2, svd_solver="randomized", random_state=seed_hash(seed, "report_map") % 2**32)
    shown = np.asarray(points, dtype=np.float64)
    if not np.ptp(shown, axis=0).any():
        return np.zeros((len(shown), 2)), (0.0, 0.0)
    out = pca.fit_transform(shown)
    return out, (float(pca.explained_variance_ratio_[0]), float(pca.explained_variance_ratio_[1]))


def near_pairs(
    proxies: np.ndarray, kept: np.ndarray, dropped: np.ndarray, threshold: float, show: int
) -> tuple[int, int, list[tuple[float, int, int]]]:
    """Pairs of a kept and a dropped row with cosine >= threshold: how many, of how many dropped rows, and the `show` closest.

    kept (a,), dropped (b,): rows of `proxies` (n, h); a pair shown is (cosine, kept row, dropped row), each dropped row once.
    Time a b h, memory BLOCK_ROWS (a + h).
    """
    left = _unit(proxies[kept])
    pairs, rows, best = 0, 0, []
    for start in range(0, len(dropped), BLOCK_ROWS):
        part = dropped[start : start + BLOCK_ROWS]
        cosine = _unit(proxies[part]) @ left.T
        close = cosine >= threshold
        pairs += int(close.sum())
        hit = np.flatnonzero(close.any(axis=1))
        rows += len(hit)
        nearest = cosine[hit].argmax(axis=1)
        best += [(float(cosine[h, j]), int(kept[j]), int(part[h])) for h, j in zip(hit.tolist(), nearest.tolist(), strict=True)]
        best = sorted(best, key=lambda pair: (-pair[0], pair[1:]))[:show]
    return pairs, rows, best


def _unit(rows: np.ndarray) -> np.ndarray:
    rows = np.asarray(rows, dtype=np.float32)
    return rows / np.linalg.norm(rows, axis=1, keepdims=True)
