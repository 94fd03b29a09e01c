"""A selection from text to chosen rows, ours against the released procedure, in one run: CPU seconds of each part.

    python benchmarks/bench_selection.py [--rows 48] [--quick]

Ours: packed proxies, exact clustering under the cap, balanced choice. Released: padded batches of 8 in data-set order with all hidden
states and all logits, K-means with 10 restarts and one greedy pass, then the same balance. Writes benchmarks/results/selection.json.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from bench_proxy import released
from proxy_inputs import RESULTS, load, machine, pairs, pool_rows

from clusterft.cluster import Clustering, ClusterSelector, balanced_rows, own_sq_distances
from clusterft.proxy import gradient_proxies
from clusterft.released import released_clustering
from clusterft.within import pick_within

K, ALPHA, RATIO = 4, 1.5, "1.00"


def normalised(rows: np.ndarray) -> np.ndarray:
    return rows / np.maximum(np.linalg.norm(rows, axis=1, keepdims=True), 1e-12)


def choose(clustering: Clustering, proxies: np.ndarray) -> int:
    q = balanced_rows(clustering.sizes, RATIO)
    rng = np.random.default_rng(0)
    kept = [pick_within("peripheral", np.flatnonzero(clustering.labels == c), q, clustering, proxies, rng) for c in range(K)]
    return sum(map(len, kept))


def ours(model: Any, samples: list) -> dict[str, float]:
    start = time.process_time()
    proxies = gradient_proxies(model, samples, token_budget=4096)
    middle = time.process_time()
    settings = {"capacity_factor": ALPHA, "solver": "exact", "n_init": 10, "within": "peripheral"}
    selector = ClusterSelector(n_clusters=K, allocation="equal", weights="balanced", proxy={}, **settings)
    clustering = selector.cluster(proxies, np.random.default_rng(0))
    kept = choose(clustering, proxies)
    return parts(start, middle, kept, clustering)


def theirs(model: Any, samples: list) -> dict[str, float]:
    start = time.process_time()
    proxies = normalised(released(model, samples)).astype(np.float32)
    middle = time.process_time()
    found = released_clustering(proxies, K, capacity_factor=ALPHA, random_state=42)
    labels = np.asarray(found.labels, dtype=np.int32)
    clustering = Clustering(labels, found.centers, own_sq_distances(proxies, found.centers, labels))
    kept = choose(clustering, proxies)
    return parts(start, middle, kept, clustering)


def parts(start: float, middle: float, kept: int, clustering: Clustering) -> dict[str, float]:
    end = time.process_time()
    facts = {"proxy_cpu_s": middle - start, "cluster_and_choose_cpu_s": end - middle, "total_cpu_s": end - start}
    return {**facts, "rows_kept": kept, "objective": float(clustering.sq_distances.sum())}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=48)
    parser.add_argument("--max-length", type=int, default=1216)
    parser.add_argument("--quick", action="store_true", help="8 rows of at most 200 tokens")
    options = parser.parse_args()
    if options.quick:
        options.rows, options.max_length = 8, 200
    torch.set_num_threads(1)
    model, tokenizer = load(None)
    samples = pairs(pool_rows(tokenizer, options.rows, options.max_length))
    small = samples[: max(K, 4)]
    ours(model, small)
    report = {"rows": len(samples), "machine": machine(), "released": theirs(model, samples), "ours": ours(model, samples)}
    report["speedup"] = report["released"]["total_cpu_s"] / report["ours"]["total_cpu_s"]
    name = "selection_quick.json" if options.quick else "selection.json"
    Path(RESULTS).mkdir(parents=True, exist_ok=True)
    (RESULTS / name).write_text(json.dumps(report, indent=1) + "\n")
    print(markdown(report))


def markdown(report: dict[str, Any]) -> str:
    """The table of a report, as it is committed."""
    lines = [f"{report['rows']} rows, K = {K}, r = {RATIO}; {report['speedup']:.2f} x in all", ""]
    lines += ["| | proxies, CPU s | cluster and choose, CPU s | total | rows kept |", "|---|---|---|---|---|"]
    for way in ("released", "ours"):
        x = report[way]
        cells = f"{x['proxy_cpu_s']:.1f} | {x['cluster_and_choose_cpu_s']:.2f} | {x['total_cpu_s']:.1f} | {x['rows_kept']}"
        lines.append(f"| {way} | {cells} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
