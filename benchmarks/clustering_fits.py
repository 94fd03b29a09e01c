"""One fit of the clustering benchmark in this process: our own solver step by step, or a peer; and one exact assignment over N, K.

In come a `Case` and the name of a solver; out come CPU seconds, extra memory, sizes and the sum of squared distances to the means of
the labels, computed here for all alike.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from pathlib import Path

import numpy as np
from clustering_cases import GROWTH_CLUSTERS, GROWTH_ROWS, Case, PeakMemory, make_rows, product_seconds


def fit_ours(case: Case, rows: np.ndarray, seed: int) -> tuple[np.ndarray, dict]:
    """The steps of CapacityKMeans, timed one by one; what the estimator adds is the numbering of the clusters."""
    from clusterft.kmeans import canonical
    from clusterft.kmeans_seeding import starting_centers
    from clusterft.limits import default_capacity
    from clusterft.lloyd import lloyd
    from clusterft.rows import RowTable

    low, high = np.ones(case.k, np.int64), np.full(case.k, default_capacity(case.n, case.k, case.alpha))
    times = [time.process_time()]
    table = RowTable(rows).survey()
    times.append(time.process_time())
    centers = starting_centers(table, case.k, low, high, n_init=10, max_iter=300, seed=seed)
    times.append(time.process_time())
    found = lloyd(table, centers, low, high, max_iter=300, tolerance=1e-4)
    times.append(time.process_time())
    found = canonical(table, found, None, fixed_numbers=False)
    survey, seeding, refinement = np.diff(times)
    facts = {"survey_s": survey, "seeding_s": seeding, "lloyd_s": refinement, "n_iter": found.n_iter}
    return found.labels, {key: float(value) for key, value in facts.items()}


def fit_peer(case: Case, rows: np.ndarray, solver: str, seed: int) -> tuple[np.ndarray, dict]:
    if solver == "unconstrained":
        from sklearn.cluster import KMeans

        plain = KMeans(case.k, n_init=10, random_state=seed).fit(rows)
        return plain.labels_, {"n_iter": int(plain.n_iter_)}
    from clusterft.kmeans import CapacityKMeans

    starts = 1 if solver == "min_cost_flow" else 10
    model = CapacityKMeans(case.k, capacity_factor=case.alpha, n_init=starts, random_state=seed, solver=solver).fit(rows)
    return model.labels_, {"n_iter": model.n_iter_}


def run_one(case: Case, solver: str, seed: int) -> dict:
    """One fit in this process. A memory map lies in a temporary folder that is gone afterwards."""
    from clusterft.lloyd import inertia
    from clusterft.rows import ExactSums, RowTable

    fit = fit_ours if solver == "exact" else lambda c, r, s: fit_peer(c, r, solver, s)
    with tempfile.TemporaryDirectory() as folder:
        small = Case(2_000, case.d, min(case.k, 8), case.alpha)
        fit(small, make_rows(small, Path(folder)), 0)  # imports and compiled code
        rows = make_rows(case, Path(folder))
        with PeakMemory() as memory:
            wall, cpu = time.perf_counter(), time.process_time()
            labels, facts = fit(case, rows, seed)
            wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
        table = RowTable(rows).survey(keys=False)
        sums = ExactSums(table, case.k)
        sums.update(None, labels)
        sizes = np.bincount(labels, minlength=case.k)
        facts |= {
            "cpu_s": cpu,
            "wall_s": wall,
            "extra_mb": memory.extra,
            "largest": int(sizes.max()),
            "smallest": int(sizes.min()),
        }
        facts["objective"] = inertia(table, sums.means(), labels)
        if solver == "exact":
            facts["product_s"] = product_seconds(rows, sums.means())
    return facts


def growth() -> list[dict]:
    """CPU seconds of one exact assignment from cold and from warm prices, over N and K at D = 64."""
    from clusterft.assignment import solve
    from clusterft.cost_sources import PointCosts
    from clusterft.rows import RowTable

    out = []
    for k in GROWTH_CLUSTERS:
        for n in GROWTH_ROWS:
            rows = make_rows(Case(n, 64, k), Path())
            source = PointCosts(RowTable(rows), rows[np.random.default_rng(0).choice(n, k, replace=False)])
            took = []
            for _ in range(4):
                started = time.process_time()
                found = solve(source, int(np.ceil(1.5 * n / k)))
                took.append(time.process_time() - started)
            started = time.process_time()
            solve(source, int(np.ceil(1.5 * n / k)), prices=found.prices)
            warm = time.process_time() - started
            product = product_seconds(rows, source.centers)
            out.append({"n": n, "k": k, "cold_s": statistics.median(took[1:]), "warm_s": warm, "product_s": product})
    return out
