"""Size limits of clusters: are they possible at all, and in which form do the solvers want them.

In go row and cluster counts with a smallest and a largest size; out come a clear refusal or two (k,) int64 arrays. Nothing here
needs data or a model, so that an impossible request fails in the first second.
"""

from __future__ import annotations

import logging
import math

import numpy as np

logger = logging.getLogger(__name__)

Limit = int | np.ndarray | None


def check_feasible(n: int, k: int, min_size: Limit = None, max_size: Limit = None) -> None:
    """Returns silently if n rows can be divided into k clusters of min_size to max_size rows each.

    min_size, max_size: int, (k,) integer array, or None for no limit. A max_size above n is harmless.
    Raises ValueError that shows the arithmetic of every broken rule, for example "4 x 3 = 12 > 10".
    """
    if k < 1:
        raise ValueError(f"the number of clusters must be at least 1, got k={k}")
    why = [f"k={k} > {n} rows"] if k > n else []
    why += _broken_rules(n, k, min_size, max_size)
    if why:
        raise ValueError(
            f"{n} rows cannot be divided into {k} clusters under the limits asked for: {'; '.join(why)}. "
            "Change the number of clusters, the limits or the number of rows."
        )


def effective_clusters(n: int, k: int) -> int:
    """The number of clusters that n rows can fill when there are no size limits: k, or n (with a logged warning) if k > n.

    Raises ValueError if n or k is below 1.
    """
    if n < 1 or k < 1:
        raise ValueError(f"at least 1 row and 1 cluster are needed, got {n} rows and k={k}")
    if k > n:
        logger.warning("k lowered from %d to %d: there are only %d rows to cluster", k, n, n)
    return min(n, k)


def default_capacity(n: int, k: int, factor: float | None) -> int:
    """Largest cluster size ceil(factor n / k), PAPER section 1; n when factor is None or infinite.

    The product is rounded to nine decimals first, so that 1.1 * 10 / 1 is 11 and not 12. Raises ValueError if factor < 1.
    """
    if factor is None or factor == math.inf:
        return n
    if not factor >= 1:
        raise ValueError(f"capacity_factor must be at least 1 (at 1 all clusters are equal), got {factor!r}")
    return min(n, max(1, math.ceil(round(factor * n / k, 9))))


def size_limits(n: int, k: int, min_size: Limit, max_size: Limit) -> tuple[np.ndarray, np.ndarray]:
    """Checked limits as two (k,) int64 arrays, the upper one cut at n. Raises ValueError as `check_feasible`, except that
    more clusters than rows are allowed here (an assignment may leave clusters empty)."""
    why = _broken_rules(n, k, min_size, max_size)
    if why:
        raise ValueError(f"{n} rows cannot be assigned to {k} clusters under the limits asked for: {'; '.join(why)}.")
    return _as_limits("min_size", min_size, k, 0), np.minimum(_as_limits("max_size", max_size, k, n), n)


def _broken_rules(n: int, k: int, min_size: Limit, max_size: Limit) -> list[str]:
    low, high = _as_limits("min_size", min_size, k, 0), _as_limits("max_size", max_size, k, n)
    why = []
    if (total := int(low.sum())) > n:
        why.append(f"{_product(low, k)} = {total} > {n}")
    if (total := int(high.sum())) < n:
        why.append(f"{_product(high, k)} = {total} < {n}")
    if max_size is not None and (crossed := np.flatnonzero(low > high)).size:
        c = int(crossed[0])
        why.append(f"min {low[c]} > max {high[c]}" + ("" if np.ndim(min_size) == np.ndim(max_size) == 0 else f" in cluster {c}"))
    return why


def _as_limits(name: str, value: Limit, k: int, absent: int) -> np.ndarray:
    array = np.asarray(absent if value is None else value)
    if array.dtype.kind not in "iu":
        if array.dtype.kind != "f" or not (array == np.floor(array)).all():
            raise ValueError(f"{name} must hold whole numbers, got {value!r}")
        array = np.minimum(array, 2**62)
    if array.shape not in ((), (k,)):
        raise ValueError(f"{name} must be one number or one a cluster ({k}), got shape {array.shape}")
    if (array < 0).any():
        raise ValueError(f"{name} must not be negative, got {value!r}")
    return np.ascontiguousarray(np.broadcast_to(array.astype(np.int64), (k,)))


def _product(limits: np.ndarray, k: int) -> str:
    if (limits == limits[0]).all():
        return f"{k} x {limits[0]}"
    return " + ".join(map(str, limits)) if k <= 8 else f"sum of the {k} limits"
