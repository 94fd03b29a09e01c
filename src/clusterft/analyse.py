"""What diagnostics need of a finished run: true gradients of its pool, clusters, kept rows, steps (tables 8, 10, 11, figure 6).

In come the frozen configuration and the run directory with its selection; out comes one `Analysed`, all arrays in pool order.
The true gradients are a feature like any other: cached, resumable, and shared by every run of the same pool and model.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
from omegaconf import DictConfig

from clusterft import stages
from clusterft.cluster import ClusterSelector, usable_rows
from clusterft.config import load_frozen
from clusterft.distributed import Dist, single_process
from clusterft.feature_context import FeatureContext
from clusterft.feature_writer import RowWriter
from clusterft.features import compute
from clusterft.interfaces import FeatureSpec
from clusterft.records import Encoded, Pool
from clusterft.seeding import generator, seed_hash
from clusterft.selection_io import read_selection
from clusterft.train_setup import make_sampler
from clusterft.true_gradients import FoldedSketch, per_sample_gradients

SKETCH = {"dim": 2048, "sketch_seed": 0}
ROWS_A_PUT = 8  # what an interruption loses at most


@dataclass(frozen=True)
class Analysed:
    """A finished run, ready for its diagnostics. n rows of the pool, m selected, k clusters, w workers.

    gradients  (n, d) float32 true gradients of the base model, sketched; `gradient` says so in words. Computed or loaded when first
               asked for: statistics of a pool need none, and at the paper's scale they are the most expensive part
    clusters   (n,) int32 cluster of each row in the run's own clustering, -1 for rows without one
    kept       (m,) positions of the selected rows in the pool, in the selection's order
    steps      steps[s][w]: pool positions of worker w in step s of the first epoch
    """

    pool: Pool
    encoded: Sequence[Encoded]
    load_gradients: Callable[[], np.ndarray]
    gradient: str
    clusters: np.ndarray
    kept: np.ndarray
    steps: Sequence[Sequence[Sequence[int]]]
    group_field: str | None
    seed: int

    @cached_property
    def gradients(self) -> np.ndarray:
        return self.load_gradients()


def true_gradient_spec() -> FeatureSpec:
    return FeatureSpec("true_gradient", "clusterft.analyse:extract_true_gradients", dict(SKETCH))


def extract_true_gradients(context: FeatureContext, spec: FeatureSpec, writer: RowWriter) -> None:
    """Extractor: rows (n, dim) float32, the sketched gradient of each row's mean response loss. Sharded by rows, resumable."""
    sketch = FoldedSketch(spec.params["dim"], spec.params["sketch_seed"])
    mine = writer.pending[context.dist.rank :: context.dist.world]
    for start in range(0, len(mine), ROWS_A_PUT):
        block = [int(position) for position in mine[start : start + ROWS_A_PUT]]
        rows = [context.encoded[position] for position in block]
        writer.put(block, per_sample_gradients(context.load_model(), rows, projection=sketch))
        writer.add_cost(forward_passes=len(block), backward_passes=len(block))
    context.dist.barrier()


def gradients_entry(*, dist: Dist, config_path: str) -> None:
    """One rank of the pass over the pool; each takes every world-th row that is still missing."""
    cfg = load_frozen(Path(config_path))
    context = stages.feature_context(cfg, stages.prepare(cfg), dist)
    compute([true_gradient_spec()], context, stages.feature_store(cfg))


def true_gradients(cfg: DictConfig, run_dir: Path, context: FeatureContext) -> np.ndarray:
    """(n, dim) float32, computed by as many processes as features are, or loaded."""
    spec, store, runtime = true_gradient_spec(), stages.feature_store(cfg), cfg.runtime
    if runtime.feature_processes > 1 and not store.complete(spec, context):
        layout = {"processes": runtime.feature_processes, "threads": runtime.feature_threads, "run_dir": run_dir}
        stages.run_on_workers(cfg, "clusterft.analyse:gradients_entry", **layout)
    return np.asarray(compute([spec], context, store)["true_gradient"].rows)


def analyse(cfg: DictConfig, run_dir: Path, ready: stages.Prepared | None = None) -> Analysed:
    """Reads the run's selection, computes or loads proxies and clusters; `ready` saves loading the pool again.

    Raises StoreError if the run has no selection yet, ValueError if it was made from another pool.
    """
    selection = read_selection(run_dir / "selection")
    ready = ready or stages.prepare_for_cell(cfg)
    selection.check_against(ready.pool)
    context = stages.feature_context(cfg, ready, single_process(cfg.runtime.device))
    proxy = stages.cluster_selector(cfg).feature_specs()
    store = stages.feature_store(cfg)
    have = compute(proxy, context, store)
    place = {one: i for i, one in enumerate(ready.pool.ids)}
    kept = np.array([place[one] for one in selection.ids])
    sampler = make_sampler(
        selection,
        stages.selected_rows(ready, selection),
        cfg.trainer,
        cfg.sampler,
        single_process(cfg.runtime.device),
        seed_hash(cfg.seed, "train"),
    )
    steps = [[kept[run].tolist() for run in sampler.runs(step)] for step in sampler.plan(0)]
    return Analysed(
        pool=ready.pool,
        encoded=ready.encoded,
        load_gradients=lambda: true_gradients(cfg, run_dir, context),
        gradient=f"of the mean response loss by all parameters of {cfg.model.name}, before training, sketched to {SKETCH['dim']}",
        clusters=pool_clusters(cfg, ready.pool, np.asarray(have[proxy[0].name].rows)),
        kept=kept,
        steps=steps,
        group_field=cfg.data.group_field,
        seed=cfg.seed,
    )


def pool_clusters(cfg: DictConfig, pool: Pool, proxies: np.ndarray) -> np.ndarray:
    """(n,) int32 the clusters that the run's own selector (or, for a rival, its budget) saw, in pool order; -1 for none."""
    selector = stages.make_selector(cfg)
    clusterer = selector if isinstance(selector, ClusterSelector) else stages.cluster_selector(cfg)
    ids, usable, _ = usable_rows(pool, proxies)
    labels = clusterer.cluster(usable, generator(cfg.seed, "choose")).labels
    by_id = dict(zip(ids.tolist(), labels.tolist(), strict=True))
    return np.array([by_id.get(one, -1) for one in pool.ids], dtype=np.int32)
