"""Rows of a hub data set. In: a `DataConfig` of kind hub. Out: `RawRow`s whose line is the row number, 1-based.

The hub, its cache and a local folder all go through `datasets.load_dataset`; code of a data set is never run.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from clusterft.network import hub_or_cache
from clusterft.sources import DataError, RawRow


def hub_rows(cfg: Any) -> Iterator[RawRow]:
    """Rows of `cfg.split` of `cfg.path` at `cfg.revision`.

    Raises DataError, naming the data set and the scale that needs no hub, if it can be neither downloaded nor found in the cache.
    """
    if not cfg.path or not cfg.split:
        raise DataError(f"data.path={cfg.path!r} and data.split={cfg.split!r}: a hub data set needs both")
    import datasets

    try:
        with hub_or_cache():
            rows = datasets.load_dataset(cfg.path, revision=cfg.revision, split=cfg.split)
    except (OSError, RuntimeError) as error:  # offline, not found and gated are OSErrors; script data sets a RuntimeError
        why = str(error).splitlines()[0][:200] if str(error) else type(error).__name__
        raise DataError(
            f"data set {cfg.path} (revision {cfg.revision or 'newest'}) is not available ({why}); "
            "connect to the hub, set data.path to a local copy with data.kind=files, or add +scale=laptop, which needs no hub"
        ) from error
    return (RawRow(number, row) for number, row in enumerate(rows, 1))
