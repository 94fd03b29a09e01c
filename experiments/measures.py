"""From gradients and selections to the values of artifacts: what a stage with a model hands in, and what it then writes.

In come numpy arrays (true gradients, possibly sketched; clusters; kept rows) and, for the pool, tokens; out come mappings that
`write_artifact` takes. The mathematics is in `clusterft.diagnostics` and `experiments.theory`; nothing here needs torch.

    write_artifact(run_dir, "gradient_diversity", run_id, diversity_values(gradients[kept], "all parameters, sketched to 4096"))
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from clusterft.diagnostics import (
    centroid_preservation,
    gradient_diversity,
    inter_worker_similarity,
    permutation_test,
    worker_gradients,
)
from clusterft.records import Encoded, Pool
from clusterft.seeding import generator
from experiments.artifacts import write_artifact
from experiments.theory import measure

PERMUTATIONS = 10_000
BATCHES = (4, 8, 16, 32, 64, 128, 256, 512)
DRAWS = 2_000


def diversity_values(kept_gradients: np.ndarray, gradient: str) -> dict[str, Any]:
    """Table 8. kept_gradients: (m, d) of the selected rows; `gradient` says which gradients they are."""
    return {"diversity": gradient_diversity(kept_gradients), "n": len(kept_gradients), "gradient": gradient}


def centroid_values(gradients: np.ndarray, clusters: np.ndarray, kept: np.ndarray, gradient: str) -> dict[str, Any]:
    """Table 10. gradients (n, d) and clusters (n,) of all rows, kept (m,) positions of the selected ones."""
    cosines = centroid_preservation(gradients, kept, clusters)
    entries = [
        {"cluster": c, "rows": int((clusters == c).sum()), "kept": int((clusters[kept] == c).sum()), "cosine": float(cosine)}
        for c, cosine in sorted(cosines.items())
    ]
    return {"clusters": entries, "gradient": gradient}


def worker_values(gradients: np.ndarray, steps: Sequence[Sequence[Sequence[int]]], gradient: str) -> dict[str, Any]:
    """Figure 6, left. steps[s][w]: rows of `gradients` (n, d) that worker w has in step s, as the run's sampler gives them.

    A last, short step in which some worker has nothing is left out. Raises ValueError for no steps or steps with different
    numbers of workers.
    """
    steps = [step for step in steps if all(len(part) for part in step)]
    counts = {len(step) for step in steps}
    if len(counts) != 1:
        raise ValueError(f"steps have {sorted(counts) or 'no'} workers; all need the same number")
    similarities = []
    for step in steps:
        rows = np.concatenate([np.asarray(part, dtype=int) for part in step])
        owner = np.repeat(np.arange(len(step)), [len(part) for part in step])
        similarities.append(inter_worker_similarity(worker_gradients(gradients[rows], owner)))
    return {"steps": similarities, "workers": counts.pop(), "gradient": gradient}


def similarity_values(
    gradients: np.ndarray, clusters: np.ndarray, gradient: str, rng: np.random.Generator, permutations: int = PERMUTATIONS
) -> dict[str, Any]:
    """Figure 6, right: within against between clusters, with the permutation test that keeps cluster sizes."""
    test = permutation_test(gradients, clusters, rng, permutations=permutations)
    counts, edges = np.histogram(test.gaps, bins=40)
    return {
        "intra": float(test.observed.intra),
        "inter": float(test.observed.inter),
        "permutations": permutations,
        "p_value": float(test.p_value),
        "null_edges": edges.tolist(),
        "null_counts": counts.tolist(),
        "n": len(gradients),
        "gradient": gradient,
    }


def variance_values(gradients: np.ndarray, clusters: np.ndarray, gradient: str, rng: np.random.Generator) -> dict[str, Any]:
    """The propositions on true gradients: every batch size of `BATCHES` that all five schemes can draw from these clusters."""
    return {**measure(gradients, clusters, list(BATCHES), DRAWS, rng), "gradient": gradient}


def category_values(ids: Sequence[str], clusters: Sequence[int], categories: Sequence[str], labelled_by: str) -> dict[str, Any]:
    """Table 17. Raises ValueError unless the three lists are aligned."""
    if not len(ids) == len(clusters) == len(categories):
        raise ValueError(f"{len(ids)} ids, {len(clusters)} clusters, {len(categories)} categories: they must be aligned")
    return {
        "ids": list(ids),
        "clusters": [int(c) for c in clusters],
        "categories": [str(c) for c in categories],
        "labelled_by": labelled_by,
    }


def pool_values(pool: Pool, encoded: Sequence[Encoded], group_field: str | None, cluster_sizes: Sequence[int]) -> dict[str, Any]:
    """Table 11. `encoded` is aligned with the pool; group_field: the meta field that names a row's family."""
    reasons: dict[str, int] = {}
    for rejection in pool.rejected:
        reasons[rejection.reason] = reasons.get(rejection.reason, 0) + 1
    groups = {str(e.meta[group_field]) for e in pool.examples} if group_field else set()
    return {
        "pool": pool.name,
        "rows": len(pool),
        "rejected": dict(sorted(reasons.items())),
        "tokens": length_summary([len(e) for e in encoded]),
        "target_tokens": length_summary([e.n_target for e in encoded]),
        "truncated": sum(e.truncated for e in encoded),
        "groups": len(groups),
        "cluster_sizes": [int(s) for s in cluster_sizes],
    }


def length_summary(lengths: Sequence[int]) -> dict[str, float]:
    """mean, median, p95 (linear interpolation) and max of token counts."""
    values = np.asarray(lengths, dtype=np.float64)
    return {
        "mean": float(values.mean()),
        "median": float(np.median(values)),
        "p95": float(np.percentile(values, 95)),
        "max": float(values.max()),
    }


class Analysed(Protocol):
    """What `clusterft.analyse.analyse` gives: arrays over the pool, see there."""

    pool: Pool
    encoded: Sequence[Encoded]
    gradients: np.ndarray
    gradient: str
    clusters: np.ndarray
    kept: np.ndarray
    steps: Sequence[Sequence[Sequence[int]]]
    group_field: str | None
    seed: int


def make_artifact(name: str, run: Analysed, run_dir: Path, run_id: str) -> Path:
    """Computes and writes one artifact of a run. Raises KeyError for an unknown name, ValueError where it is not defined."""
    return write_artifact(run_dir, name, run_id, MAKERS[name](run))


def _clustered(run: Analysed) -> np.ndarray:
    """Positions of rows that have a cluster and a gradient."""
    return np.flatnonzero((run.clusters >= 0) & run.gradients.any(axis=1))


def _kept_of(run: Analysed, rows: np.ndarray) -> np.ndarray:
    """Positions within `rows` of the selected ones."""
    return np.flatnonzero(np.isin(rows, run.kept))


def _centroids(run: Analysed) -> dict[str, Any]:
    rows = _clustered(run)
    return centroid_values(run.gradients[rows], run.clusters[rows], _kept_of(run, rows), run.gradient)


def _similarity(run: Analysed) -> dict[str, Any]:
    rows = _clustered(run)
    return similarity_values(run.gradients[rows], run.clusters[rows], run.gradient, generator(run.seed, "permutation test"))


def _variance(run: Analysed) -> dict[str, Any]:
    rows = _clustered(run)
    return variance_values(run.gradients[rows], run.clusters[rows], run.gradient, generator(run.seed, "variance"))


def _categories(run: Analysed) -> dict[str, Any]:
    if run.group_field is None:
        raise ValueError(
            "categories: the pool names no families (data.group_field); let a person label the sheet of experiments.labels"
        )
    rows = np.flatnonzero(run.clusters >= 0)
    families = [str(run.pool.examples[i].meta[run.group_field]) for i in rows]
    return category_values(
        [run.pool.ids[i] for i in rows], run.clusters[rows].tolist(), families, f"the pool's own {run.group_field}"
    )


def _pool(run: Analysed) -> dict[str, Any]:
    sizes = np.bincount(run.clusters[run.clusters >= 0])
    return pool_values(run.pool, run.encoded, run.group_field, sizes.tolist())


MAKERS: dict[str, Callable[[Analysed], dict[str, Any]]] = {
    "gradient_diversity": lambda run: diversity_values(run.gradients[run.kept], run.gradient),
    "centroid_cosine": _centroids,
    "worker_similarity": lambda run: worker_values(run.gradients, run.steps, run.gradient),
    "cluster_similarity": _similarity,
    "variance": _variance,
    "categories": _categories,
    "pool_statistics": _pool,
}
