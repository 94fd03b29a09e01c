"""A pool of two million rows through clustering, selection, allocation and a thousand planned steps, within 8 GiB.

    python benchmarks/bench_scale.py             2,000,000 rows of 256 float16 values in a memory map
    python benchmarks/bench_scale.py --rows 20000    any other size

Proxies are drawn (unit-length rows around uneven directions), everything behind them is the project's own code and objects: a Pool
with two million Examples, `ClusterSelector.choose`, the Selection written and read back, and the batches of every rank. The kernel
refuses this process any address space beyond `--limit-gib` of what it holds before the pool is made, so that the limit cannot be passed
unseen. Writes benchmarks/results/scale.json.
"""

from __future__ import annotations

import argparse
import json
import resource
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from clustering_cases import Case, PeakMemory, make_rows
from proxy_inputs import machine

RESULTS = Path(__file__).parent / "results" / "scale.json"
CLUSTERS, WORKERS, GLOBAL_BATCH, STEPS = 16, 16, 512, 1000


def make_pool(n: int) -> Any:
    """n short examples with the ids that such content gets; the order of ids is not that of the pool."""
    from clusterft.records import Example, Pool, content_id

    examples = []
    for i in range(n):
        prompt, response = f"question {i}", f"answer {i}"
        examples.append(Example(content_id(prompt, response), prompt, response))
    return Pool("simulated", tuple(examples))


class Phases:
    """Wall and processor seconds and the peak of anonymous memory of each phase."""

    def __init__(self) -> None:
        self.found: dict[str, dict[str, float]] = {}

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        base = PeakMemory._now()
        with PeakMemory() as memory:
            wall, cpu = time.perf_counter(), time.process_time()
            yield
            wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
        self.found[name] = {"wall_s": wall, "cpu_s": cpu, "peak_gib": (base / 1024 + memory.extra) / 1024}
        print(f"{name}: {cpu:.1f} CPU s, {wall:.1f} s, {self.found[name]['peak_gib']:.2f} GiB", flush=True)


def limit_address_space(gib: float) -> None:
    """From now on this process gets at most `gib` more of address space, maps of files included: MemoryError beyond."""
    size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (size + int(gib * 2**30), resource.getrlimit(resource.RLIMIT_AS)[1]))


def warm_up(folder: Path) -> None:
    """Imports and compiled code, so that they are neither timed nor counted against the limit."""
    from clusterft.kmeans import CapacityKMeans

    CapacityKMeans(4, capacity_factor=1.5, n_init=2, random_state=0).fit(make_rows(Case(2_000, 256, 4, mapped=True), folder))


def selection_of(pool: Any, rows: np.ndarray, budget: int) -> Any:
    from clusterft.cluster import ClusterSelector
    from clusterft.interfaces import Feature
    from clusterft.records import Cost

    settings = {"capacity_factor": 1.5, "solver": "exact", "n_init": 10, "within": "peripheral", "allocation": "equal"}
    selector = ClusterSelector(n_clusters=CLUSTERS, weights="balanced", proxy={}, **settings)
    features = {"gradient_proxy": Feature(rows=rows, cost=Cost(wall_seconds=0.0))}
    return selector.choose(pool, features, budget, np.random.default_rng(0))


def planned_steps(selection: Any, lengths: np.ndarray) -> tuple[int, int]:
    """(steps, rows) of the first `STEPS` steps over all ranks; every rank makes its micro-batches and no row may come twice."""
    from clusterft.allocation import ClusterBatchSampler

    layout = {"global_batch": GLOBAL_BATCH, "seed": 0, "micro_batch": 8, "workers": WORKERS, "world": WORKERS}
    layout |= {"ids": selection.ids, "lengths": lengths}
    samplers = [ClusterBatchSampler(selection.clusters, rank=0, **layout)]
    samplers += [samplers[0].for_rank(rank) for rank in range(1, WORKERS)]
    seen = np.zeros(len(selection.ids), np.int8)
    steps = 0
    for step in islice(samplers[0].plan(0), STEPS):
        for sampler in samplers:
            for batch in sampler.step_batches(step):
                seen[batch] += 1
        steps += 1
    if seen.max() != 1:
        raise AssertionError("a row came twice within an epoch")
    return steps, int(seen.sum())


def run(rows: int, limit_gib: float) -> dict[str, Any]:
    """The whole chain; facts of each phase."""
    from clusterft.selection_io import read_selection, write_selection

    phases, steps = Phases(), min(STEPS, rows // (3 * GLOBAL_BATCH))
    budget = steps * GLOBAL_BATCH
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        warm_up(folder)
        proxies = make_rows(Case(rows, 256, CLUSTERS, mapped=True), folder)
        limit_address_space(limit_gib)
        with phases.phase("pool of examples"):
            pool = make_pool(rows)
        with phases.phase("clustering and selection"):
            selection = selection_of(pool, proxies, budget)
        with phases.phase("selection written and read back"):
            write_selection(selection, folder / "selection")
            del selection
            selection = read_selection(folder / "selection")
            selection.check_against(pool)
        with phases.phase("allocation and steps of all ranks"):
            lengths = np.random.default_rng(1).integers(20, 1024, budget)
            planned, used = planned_steps(selection, lengths)
    sizes = np.bincount(selection.clusters, minlength=CLUSTERS)
    facts = {
        "rows": rows,
        "d": 256,
        "clusters": CLUSTERS,
        "workers": WORKERS,
        "budget": budget,
        "steps": planned,
        "rows_planned": used,
    }
    facts |= {"kept_per_cluster": [int(sizes.min()), int(sizes.max())], "limit_gib": limit_gib, "phases": phases.found}
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    return facts | {"peak_resident_gib": peak, "machine": machine()}


def markdown(report: dict[str, Any]) -> str:
    """The table of the benchmark page."""
    lines = [
        f"{report['rows']:,} rows of {report['d']} float16 values in a memory map, {report['clusters']} clusters, "
        f"{report['budget']:,} rows kept, {report['steps']:,} steps of {GLOBAL_BATCH} rows on {report['workers']} ranks. "
        f"Largest resident memory {report['peak_resident_gib']:.2f} GiB with the mapped rows in it; "
        f"address space was limited to {report['limit_gib']:g} GiB.",
        "",
        "| phase | CPU s | wall s | peak anonymous memory, GiB |",
        "|---|---|---|---|",
    ]
    for name, facts in report["phases"].items():
        lines.append(f"| {name} | {facts['cpu_s']:.1f} | {facts['wall_s']:.1f} | {facts['peak_gib']:.2f} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=2_000_000)
    parser.add_argument("--limit-gib", type=float, default=8.0)
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    report = run(options.rows, options.limit_gib)
    options.out.write_text(json.dumps(report, indent=1) + "\n")
    print(markdown(report))


if __name__ == "__main__":
    main()
