"""`clusterft select --dry-run`: what would run, how long, how much memory, which files. Nothing is written to the output folder.

The time comes from 20 rows that are really passed through the method's own model work, scaled by tokens; a short first pass only
warms up and is repeated; the memory from this process after those rows and the size of the features.
"""

from __future__ import annotations

import resource
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from omegaconf import DictConfig

from clusterft import stages
from clusterft.api import check_rows, claimed, default_folder
from clusterft.cli.console import console, duration, facts_table, size
from clusterft.composing import Request, compose_request
from clusterft.distributed import single_process
from clusterft.exact import floor_product
from clusterft.export import FILES
from clusterft.features import FeatureStore, compute
from clusterft.memory_plan import memory_text
from clusterft.preflight import preflight

MEASURED_ROWS = 20
LONG_SECONDS = 10.0
REPORT_FILES = ("report.html", "report.md")


@dataclass(frozen=True)
class Measured:
    """Seconds of `rows` rows with `tokens` tokens, seconds to load the model, bytes of features a row."""

    rows: int
    tokens: int
    seconds: float
    load_seconds: float
    bytes_per_row: int


def dry_run(request: Request, out: Path | None, *, strict: bool, report: bool) -> None:
    """Prints the plan. Raises what the real run would raise before its model work."""
    cfg = compose_request(request)
    folder = (out or default_folder(cfg, request)).absolute()
    cfg.runtime.runs_dir = str(folder / "run")
    claimed(folder, cfg)
    preflight(cfg)
    ready = stages.prepare(cfg, strict=strict)
    check_rows(cfg, ready)
    lines = [*plan_lines(cfg, ready, measure(cfg, ready), folder)]
    lines.append(("files", "\n".join([*FILES, *(REPORT_FILES if report else ())])))
    console().print(facts_table("plan (dry run: nothing is written)", lines))


def measure(cfg: DictConfig, ready: Any) -> Measured | None:
    """Runs the selector's features on a few rows, the first by content hash; None for methods without model work."""
    specs = stages.needed_features(cfg)
    if not specs:
        return None
    chosen = set(sorted(ready.pool.ids)[:MEASURED_ROWS])
    examples = tuple(e for e in ready.pool.examples if e.id in chosen)
    encoded = tuple(e for e in ready.encoded if e.id in chosen)
    few = replace(ready, pool=replace(ready.pool, examples=examples), encoded=encoded)
    context = stages.feature_context(cfg, few, single_process(cfg.runtime.device))
    context.progress = False
    started = time.perf_counter()
    context.load_model()
    loaded = time.perf_counter() - started
    for _ in range(2):  # the first pass compiles and allocates; where it is long, that no longer matters
        with tempfile.TemporaryDirectory() as scratch:
            started = time.perf_counter()
            have = [f for spec in specs for f in compute([spec], context, FeatureStore(Path(scratch))).values()]
            seconds = time.perf_counter() - started
            width = sum(f.rows.dtype.itemsize * f.rows.shape[1] for f in have)
            del have
        if seconds > LONG_SECONDS:
            break
    return Measured(len(encoded), sum(map(len, encoded)), seconds, loaded, width)


def plan_lines(cfg: DictConfig, ready: Any, measured: Measured | None, folder: Path) -> Iterator[tuple[str, str]]:
    report, n = ready.report, len(ready.pool)
    set_aside = len(ready.pool.rejected) + len(ready.heldout_pool.rejected)
    held = len(ready.heldout_pool) + len(ready.validation_examples)
    yield "data", f"{report.rows_read:,} rows read, {set_aside:,} set aside, {held:,} held out, {n:,} to choose from"
    yield "keep", rows_wanted(cfg, n)
    yield (
        "method",
        f"{cfg.selector._target_.rsplit('.', 1)[-1]} with {cfg.model.name}, {cfg.data.template}, {cfg.trainer.max_length} tokens",
    )
    if measured is None:
        yield "time", "seconds: this method needs no model work"
    else:
        yield "time", time_estimate(measured, sum(map(len, ready.encoded)), cfg.runtime.feature_processes)
        yield "memory", memory_estimate(measured, n)
        yield "disk", f"{size(measured.bytes_per_row * n)} of features in {stages.places(cfg)['cache_dir']}"
    yield "training", memory_text(cfg.model, cfg.trainer, cfg.runtime)
    yield "folder", str(folder)


def rows_wanted(cfg: DictConfig, n: int) -> str:
    """How many rows the budget means, as far as it is known before clustering."""
    selector = cfg.selector
    if selector.budget == "rows":
        return f"{selector.rows:,} rows"
    if selector.budget == "all":
        return f"all {n:,} rows"
    if selector.budget == "fraction":
        rows = floor_product(selector.ratio, n)
        limit = (
            f"; refused if the {cfg.clustering.n_clusters} clusters cannot give that many evenly"
            if "Cluster" in selector._target_
            else ""
        )
        return f"{rows:,} of {n:,} rows{limit}"
    most = floor_product(selector.ratio, n // cfg.clustering.n_clusters) * cfg.clustering.n_clusters
    return f"floor({selector.ratio} n_min) rows of each of {cfg.clustering.n_clusters} clusters, at most {most:,} of {n:,}"


def time_estimate(measured: Measured, tokens: int, processes: int) -> str:
    seconds = measured.seconds * tokens / measured.tokens / processes
    return (
        f"about {duration(seconds)} of model work and {duration(measured.load_seconds)} to load the model (measured: "
        f"{measured.rows} rows, {measured.tokens:,} tokens, {measured.seconds:.2f} s; scaled to {tokens:,} tokens)"
    )


def memory_estimate(measured: Measured, n: int) -> str:
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    features = measured.bytes_per_row * n
    return f"about {size(peak + 2 * features)}: {size(peak)} peak so far, and {size(features)} of features read for the choice"
