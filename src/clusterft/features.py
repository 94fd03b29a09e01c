"""Features: expensive model work on a pool, done once, sharded over ranks, kept on disk.

In come `FeatureSpec`s (from a selector) and a `FeatureContext`; out come `Feature`s: rows (n, d) in pool order.

    spec ► key ► on disk? ─yes─► load
                    └─no─► lock ► every rank: extractor(context, spec, writer) ► merge ► manifest ► load

`feature_context` says what an extractor sees, `feature_writer` how rows reach the disk, `feature_store` where they live.
"""

from __future__ import annotations

import importlib
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from clusterft.feature_context import DistLike, FeatureContext, SingleProcess
from clusterft.feature_store import FeatureDamaged, FeatureMissing, FeatureStore
from clusterft.feature_writer import Finaliser, RowWriter
from clusterft.interfaces import Feature, FeatureSpec

__all__ = [
    "DistLike",
    "FeatureContext",
    "FeatureDamaged",
    "FeatureMissing",
    "FeatureStore",
    "Finaliser",
    "RowWriter",
    "SingleProcess",
    "compute",
]

POLL_SECONDS = 2.0
"""How often a process looks whether another one has finished the feature that both want."""

log = logging.getLogger(__name__)


def compute(specs: Sequence[FeatureSpec], context: FeatureContext, store: FeatureStore) -> dict[str, Feature]:
    """Every feature of `specs` by name, computed where it is missing. All ranks call it alike.

    A killed pass goes on where it stopped, also with another number of ranks. Two runs that want one feature share the work of
    the first. Raises ValueError for two specs of one name, FeatureDamaged for changed files, and what an extractor raises.
    """
    names = [s.name for s in specs]
    if len(set(names)) != len(names):
        raise ValueError(f"feature names must differ, got {names}")
    for spec in specs:
        _ensure(spec, context, store)
    return {spec.name: store.load(spec, context) for spec in specs}


def _ensure(spec: FeatureSpec, context: FeatureContext, store: FeatureStore) -> None:
    """Returns on all ranks once the feature is complete."""
    waiting = False
    while True:
        verdict, lock = "", None
        if context.dist.rank == 0:
            verdict, lock = _decide(spec, context, store)
        try:
            verdict = context.dist.broadcast_object(verdict)
            if verdict == "load":
                return
            if verdict == "compute":
                return _run(spec, context, store)
        finally:
            if lock is not None:
                lock.release()
        if not waiting and context.dist.rank == 0:
            log.warning("feature %s is being computed by another process; waiting for it", spec.name)
        waiting = True
        time.sleep(POLL_SECONDS)


def _decide(spec: FeatureSpec, context: FeatureContext, store: FeatureStore) -> tuple[str, Any]:
    if store.complete(spec, context):
        store.sweep(spec, context)
        return "load", None
    lock = store.try_lock(spec, context)
    if lock is None:
        return "wait", None
    return ("load" if store.complete(spec, context) else "compute"), lock


def _run(spec: FeatureSpec, context: FeatureContext, store: FeatureStore) -> None:
    extractor = load_extractor(spec)
    work_dir = store.path(spec, context) / "work"
    work_dir.mkdir(parents=True, exist_ok=True)
    writer = store.writer(spec, context)
    context.dist.barrier()  # nobody writes before everybody has read the same bitmap
    if context.dist.rank == 0 and writer.done.any():
        log.info("feature %s: %d of %d rows were already there", spec.name, int(writer.done.sum()), len(writer.done))
    extractor(replace(context, work_dir=work_dir), spec, writer)
    writer.close()
    context.dist.barrier()
    problem = ""
    if context.dist.rank == 0:
        try:
            store.finish(spec, context, writer)
        except (ValueError, OSError) as error:
            problem = f"feature {spec.name!r}: {error}"
    problem = context.dist.broadcast_object(problem)
    if problem:
        raise ValueError(problem)


def load_extractor(spec: FeatureSpec) -> Callable[[FeatureContext, FeatureSpec, RowWriter], None]:
    """The function that `spec.extractor` ("package.module:function") names. Raises ValueError, ImportError, AttributeError."""
    module, colon, function = spec.extractor.partition(":")
    if not (module and colon and function):
        raise ValueError(f"feature {spec.name!r}: extractor {spec.extractor!r} is not of the form 'package.module:function'")
    return getattr(importlib.import_module(module), function)
