"""Capacity-constrained K-means against its peers, side by side: CPU seconds, objective, extra memory, and the physical floor.

    python benchmarks/bench_clustering.py --quick          a small grid, under a minute
    python benchmarks/bench_clustering.py                  the whole grid, with a limit for each peer's run
    python benchmarks/bench_clustering.py --only 75000x2048x8 --peer-limit 120

Peers: `k-means-constrained` with one start, and the released procedure (plain K-means with ten starts, then one greedy pass).
Every fit runs in its own process on made-up unit-length rows of uneven cluster sizes. The objective is the sum of squared
distances to the means of the labels, computed here for all alike; memory is the peak of anonymous memory above that of the data
(Linux only). The floor is the matrix product of all rows with the centres, once for every iteration. Results are merged into
`benchmarks/results/clustering.json` and printed as a Markdown table.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from threadpoolctl import threadpool_info

RESULTS = Path(__file__).parent / "results" / "clustering.json"
SOLVERS = ("exact", "min_cost_flow", "released")


@dataclass(frozen=True)
class Case:
    """One row of the grid. mapped: float16 in a memory map. repeats: runs of our own solver, of which the median counts."""

    n: int
    d: int
    k: int
    alpha: float = 1.5
    mapped: bool = False
    peers: bool = True
    repeats: int = 1

    @property
    def name(self) -> str:
        return f"{self.n}x{self.d}x{self.k}"


QUICK = (Case(5_000, 64, 8, 1.0, repeats=3), Case(10_000, 64, 8, repeats=3), Case(5_000, 512, 8, repeats=3))
FULL = (
    Case(10_000, 64, 16, repeats=3),
    Case(25_000, 64, 8, 1.0, repeats=3),
    Case(25_000, 64, 16, repeats=3),
    Case(75_000, 64, 8, repeats=3),
    Case(75_000, 64, 16, repeats=3),
    Case(10_000, 2048, 8, repeats=3),
    Case(75_000, 2048, 4, repeats=3),
    Case(75_000, 2048, 8, repeats=3),
    Case(1_000_000, 64, 4, peers=False),
    Case(1_000_000, 64, 16, peers=False),
    Case(1_000_000, 64, 64, peers=False),
    Case(5_000_000, 256, 16, mapped=True, peers=False),
)
GROWTH_ROWS, GROWTH_CLUSTERS = (62_500, 250_000, 1_000_000), (4, 16, 64)


def make_rows(case: Case, folder: Path, seed: int = 0, block: int = 8192) -> np.ndarray:
    """(n, d) rows of unit length around 2k directions with frequencies 1, 1/2, 1/3, ...; made in blocks to keep the peak low."""
    rng = np.random.default_rng(seed)
    parts = 2 * case.k
    weights = 1 / np.arange(1, parts + 1)
    centers = rng.normal(size=(parts, case.d)).astype(np.float32)
    own = rng.choice(parts, case.n, p=weights / weights.sum())
    shape = (case.n, case.d)
    rows = np.lib.format.open_memmap(folder / "rows.npy", "w+", np.float16, shape) if case.mapped else np.empty(shape, np.float32)
    for start in range(0, case.n, block):
        some = own[start : start + block]
        values = centers[some] + np.float32(0.6) * rng.standard_normal((some.size, case.d), dtype=np.float32)
        rows[start : start + block] = values / np.linalg.norm(values, axis=1, keepdims=True)
    if case.mapped:
        rows.flush()
        return np.load(folder / "rows.npy", mmap_mode="r")
    return rows


class PeakMemory:
    """Peak of the process's anonymous memory above that at entry, in MB, looked at 100 times a second."""

    def __enter__(self) -> PeakMemory:
        self.start = self.peak = self._now()
        self.done = threading.Event()
        self.thread = threading.Thread(target=self._watch)
        self.thread.start()
        return self

    def __exit__(self, *unused) -> None:
        self.done.set()
        self.thread.join()
        self.peak = max(self.peak, self._now())

    @property
    def extra(self) -> float:
        return (self.peak - self.start) / 1024

    def _watch(self) -> None:
        while not self.done.wait(0.01):
            self.peak = max(self.peak, self._now())

    @staticmethod
    def _now() -> int:
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("RssAnon:"):
                return int(line.split()[1])
        raise RuntimeError("this benchmark reads RssAnon from /proc/self/status, which this system does not have")


def product_seconds(rows: np.ndarray, centers: np.ndarray) -> float:
    """CPU seconds of one float32 product of all rows with the centres, in blocks (reading the rows included)."""
    factors = np.ascontiguousarray(centers.T.astype(np.float32))
    best = float("inf")
    for _ in range(3):
        started = time.process_time()
        for start in range(0, len(rows), 4096):
            np.asarray(rows[start : start + 4096], np.float32) @ factors
        best = min(best, time.process_time() - started)
    return best


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
    from clusterft.kmeans import CapacityKMeans

    starts = 1 if solver == "min_cost_flow" else 10
    model = CapacityKMeans(case.k, capacity_factor=case.alpha, n_init=starts, random_state=seed, solver=solver).fit(rows)
    return model.labels_, {"n_iter": model.n_iter_}


def run_one(case: Case, solver: str, seed: int) -> dict:
    """One fit in this process."""
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
    """CPU seconds of one exact assignment from cold prices, over N and K at D = 64."""
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
            out.append({"n": n, "k": k, "cold_s": statistics.median(took[1:]), "warm_s": time.process_time() - started})
    return out


def in_a_process(argument: dict, limit: float) -> dict:
    """Runs this file on one job; a run beyond the limit is reported as such, any other failure stops the benchmark."""
    environment = {key: value for key, value in os.environ.items() if key not in ("OPENBLAS_CORETYPE", "OPENBLAS_L2_SIZE")}
    command = [sys.executable, __file__, "--job", json.dumps(argument)]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=limit, env=environment)
    except subprocess.TimeoutExpired:
        return {"over_limit_s": limit}
    if answer.returncode:
        raise RuntimeError(f"{argument} failed:\n{answer.stderr}")
    return json.loads(answer.stdout.splitlines()[-1])


def measure(case: Case, peer_limit: float) -> dict:
    runs = [in_a_process({"case": asdict(case), "solver": "exact", "seed": seed}, 3600) for seed in range(case.repeats)]
    runs.sort(key=lambda run: run["cpu_s"])
    result = {"case": asdict(case), "exact": runs[len(runs) // 2], "exact_cpu_s_all": [run["cpu_s"] for run in runs]}
    if case.peers:
        for solver in SOLVERS[1:]:
            result[solver] = in_a_process({"case": asdict(case), "solver": solver, "seed": 0}, peer_limit)
    return result


def table(results: list[dict]) -> str:
    lines = [
        "| N, D, K, α | exact: CPU s / objective / extra MB | k-means-constrained | released | × faster "
        "| loop ÷ its products | iterations | product, s |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for result in results:
        case, ours = result["case"], result["exact"]
        ratios, cells = [], []
        for solver in SOLVERS[1:]:
            peer = result.get(solver)
            cells.append(_cell(peer))
            ratios.append("—" if peer is None else f"{peer.get('cpu_s', peer.get('over_limit_s')) / ours['cpu_s']:.1f}")
            if peer and "over_limit_s" in peer:
                ratios[-1] = "> " + ratios[-1]
        loop = ours["lloyd_s"] / (ours["n_iter"] * ours["product_s"])
        name = f"{case['n']:,}, {case['d']}, {case['k']}, {case['alpha']}" + (" float16 map" if case["mapped"] else "")
        lines.append(
            f"| {name} | {_cell(ours)} | {cells[0]} | {cells[1]} | {' / '.join(ratios)} | {loop:.2f} "
            f"| {ours['n_iter']:.0f} | {ours['product_s']:.3g} |"
        )
    return "\n".join(lines)


def growth_table(points: list[dict]) -> str:
    lines = ["| K | " + " | ".join(f"N = {n:,}" for n in GROWTH_ROWS) + " |", "|---" * (len(GROWTH_ROWS) + 1) + "|"]
    for k in GROWTH_CLUSTERS:
        mine = [p for p in points if p["k"] == k]
        lines.append(f"| {k} | " + " | ".join(f"{1e3 * p['cold_s']:.0f} / {1e3 * p['warm_s']:.0f}" for p in mine) + " |")
    return "One exact assignment, D = 64, CPU ms from cold / warm prices:\n\n" + "\n".join(lines)


def _cell(run: dict | None) -> str:
    if run is None:
        return "not run"
    if "over_limit_s" in run:
        return f"over {run['over_limit_s']:.0f} s"
    return f"{run['cpu_s']:.3g} / {run['objective']:.6g} / {run['extra_mb']:.0f}"


def merge(old: dict, results: list[dict], grown: list[dict] | None) -> dict:
    kept = {json.dumps(r["case"], sort_keys=True): r for r in old.get("results", [])}
    kept |= {json.dumps(r["case"], sort_keys=True): r for r in results}
    machine = {
        "cores": os.cpu_count(),
        "processor": platform.processor() or platform.machine(),
        "blas": [i["architecture"] for i in threadpool_info() if i["user_api"] == "blas"],
        "threads": os.environ.get("OMP_NUM_THREADS", "default"),
    }
    merged = {
        "machine": machine,
        "results": sorted(kept.values(), key=lambda r: (r["case"]["d"], r["case"]["n"], r["case"]["k"])),
    }
    if points := grown or old.get("growth"):
        merged["growth"] = points
    return merged


def save(out: Path, results: list[dict], grown: list[dict] | None) -> dict:
    """Merges into the file after every row of the grid, so that a run cut short keeps what it has measured."""
    merged = merge(json.loads(out.read_text()) if out.exists() else {}, results, grown)
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(merged, indent=1) + "\n")
    return merged


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="small grid")
    parser.add_argument(
        "--only", nargs="*", metavar="NxDxK", help="only these rows of the full grid; 'growth' for the growth table"
    )
    parser.add_argument("--peer-limit", type=float, default=600.0, help="wall seconds for each fit of a peer")
    parser.add_argument("--no-peers", action="store_true", help="our own solver only")
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--job", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.job:
        job = json.loads(options.job)
        print(json.dumps(run_one(Case(**job["case"]), job["solver"], job["seed"])))
        return
    cases = QUICK if options.quick else FULL
    if options.only is not None:
        known = [*(case.name for case in cases), "growth"]
        if unknown := [name for name in options.only if name not in known]:
            parser.error(f"unknown rows {', '.join(unknown)}; known are {', '.join(known)}")
        cases = [case for case in cases if case.name in options.only]
    results = []
    for case in cases:
        print(f"{case.name}, alpha {case.alpha} ...", file=sys.stderr, flush=True)
        results.append(measure(Case(**(asdict(case) | {"peers": case.peers and not options.no_peers})), options.peer_limit))
        save(options.out, results, None)
    wants_growth = not options.quick and (options.only is None or "growth" in options.only)
    merged = save(options.out, results, growth() if wants_growth else None)
    print(table(results))
    if wants_growth:
        print("\n" + growth_table(merged["growth"]))


if __name__ == "__main__":
    main()
