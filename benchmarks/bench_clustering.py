"""Capacity-constrained K-means against its peers, side by side: CPU seconds, objective, extra memory, and the physical floor.

    python benchmarks/bench_clustering.py --quick          a small grid, under a minute
    python benchmarks/bench_clustering.py                  the whole grid, with a limit for each peer's run
    python benchmarks/bench_clustering.py --only 75000x2048x8 --peer-limit 120
    python benchmarks/bench_clustering.py --only growth flow-growth

Peers: `k-means-constrained` with one start; the released procedure (plain K-means with ten starts, then one greedy pass);
scikit-learn's KMeans without limits, for reference. Every fit runs in its own process on made-up unit-length rows of uneven cluster
sizes (`clustering_cases.py`, `clustering_fits.py`). The floor is the matrix product of all rows with the centres, once for every
iteration. Growth with N and K is measured on single assignments, that of k-means-constrained at D = 2,048 on sizes that it can do.
Results are merged into `benchmarks/results/clustering.json` and printed as Markdown tables.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path

from clustering_cases import FLOW_GROWTH, FULL, PEERS, QUICK, Case
from clustering_fits import growth, run_one
from threadpoolctl import threadpool_info

RESULTS = Path(__file__).parent / "results" / "clustering.json"
TITLES = {"min_cost_flow": "k-means-constrained", "released": "released", "unconstrained": "no limits (scikit-learn)"}
PARTS = {"growth": "one assignment over N and K", "flow-growth": "k-means-constrained over N"}


def in_a_process(argument: dict, limit: float) -> dict | list:
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
    for solver in case.peers:
        result[solver] = in_a_process({"case": asdict(case), "solver": solver, "seed": 0}, peer_limit)
    return result


def table(results: list[dict]) -> str:
    head = ["N, D, K, α", "exact: CPU s / objective / extra MB", *TITLES.values(), "× faster than these"]
    head += ["loop ÷ its products", "iterations", "product, s"]
    lines = ["| " + " | ".join(head) + " |", "|---" * len(head) + "|"]
    for result in results:
        case, ours = result["case"], result["exact"]
        peers = [result.get(solver) for solver in PEERS]
        loop = ours["lloyd_s"] / (ours["n_iter"] * ours["product_s"])
        name = f"{case['n']:,}, {case['d']}, {case['k']}, {case['alpha']}" + (" float16 map" if case["mapped"] else "")
        cells = [name, _cell(ours), *map(_cell, peers), " / ".join(_ratio(peer, ours) for peer in peers)]
        cells += [f"{loop:.2f}", f"{ours['n_iter']:.0f}", f"{ours['product_s']:.3g}"]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def growth_table(points: list[dict]) -> str:
    rows = sorted({p["n"] for p in points})
    lines = ["| K | " + " | ".join(f"N = {n:,}" for n in rows) + " | growth with N |", "|---" * (len(rows) + 2) + "|"]
    for k in sorted({p["k"] for p in points}):
        mine = sorted((p for p in points if p["k"] == k), key=lambda p: p["n"])
        cells = [f"{1e3 * p['cold_s']:.0f} / {1e3 * p['warm_s']:.0f} / {1e3 * p['product_s']:.0f}" for p in mine]
        lines.append(f"| {k} | " + " | ".join(cells) + f" | N^{exponent(mine, 'cold_s'):.2f} |")
    return "One exact assignment, D = 64, CPU ms from cold prices / from warm prices / of the bare product:\n\n" + "\n".join(
        lines
    )


def flow_table(points: list[dict]) -> str:
    lines = ["| N | k-means-constrained, CPU s / objective / extra MB | exact |", "|---|---|---|"]
    lines += [f"| {p['n']:,} | {_cell(p['min_cost_flow'])} | {_cell(p['exact'])} |" for p in points]
    text = "k-means-constrained at D = 2,048, K = 8, on sizes that it can do:\n\n" + "\n".join(lines)
    done = [{"n": p["n"], "cpu_s": p["min_cost_flow"]["cpu_s"]} for p in points if "cpu_s" in p["min_cost_flow"]]
    if len(done) < 2:
        return text
    power, last = exponent(done, "cpu_s"), done[-1]
    guess = last["cpu_s"] * (75_000 / last["n"]) ** power
    return (
        f"{text}\n\nGrowth N^{power:.2f}: at N = 75,000 that would be about {guess:.0f} CPU s (an estimate, not a measurement)."
    )


def exponent(points: list[dict], key: str) -> float:
    """Between the smallest and the largest N."""
    first, last = points[0], points[-1]
    return math.log(last[key] / first[key]) / math.log(last["n"] / first["n"])


def page(data: dict) -> str:
    """All tables of a results file."""
    parts = [table(data["results"])]
    parts += [growth_table(data["growth"])] if "growth" in data else []
    parts += [flow_table(data["flow_growth"])] if "flow_growth" in data else []
    return "\n\n".join(parts)


def _cell(run: dict | None) -> str:
    if run is None:
        return "not run"
    if "over_limit_s" in run:
        return f"over {run['over_limit_s']:.0f} s"
    return f"{run['cpu_s']:.3g} / {run['objective']:.6g} / {run['extra_mb']:.0f}"


def _ratio(peer: dict | None, ours: dict) -> str:
    if peer is None:
        return "—"
    beyond = "> " if "over_limit_s" in peer else ""
    return beyond + f"{peer.get('cpu_s', peer.get('over_limit_s')) / ours['cpu_s']:.1f}"


def merge(old: dict, new: dict) -> dict:
    """The file's parts with the newly measured ones in the place of old ones of the same case."""
    key = lambda r: tuple(r["case"][name] for name in ("d", "n", "k", "alpha", "mapped"))  # noqa: E731
    results = {key(r): r for r in [*old.get("results", []), *new.pop("results", [])]}
    machine = {
        "cores": os.cpu_count(),
        "processor": platform.processor() or platform.machine(),
        "blas": [i["architecture"] for i in threadpool_info() if i["user_api"] == "blas"],
        "threads": os.environ.get("OMP_NUM_THREADS", "default"),
    }
    return {**old, **new, "machine": machine, "results": [results[k] for k in sorted(results)]}


def save(out: Path, **new) -> None:
    """Merges into the file after every row of the grid, so that a run cut short keeps what it has measured."""
    merged = merge(json.loads(out.read_text()) if out.exists() else {}, new)
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(merged, indent=1) + "\n")


def flow_growth(limit: float) -> list[dict]:
    points = []
    for case in FLOW_GROWTH:
        result = measure(case, limit)
        points.append({"n": case.n, "min_cost_flow": result["min_cost_flow"], "exact": result["exact"]})
        if "over_limit_s" in result["min_cost_flow"]:
            break
    return points


def run(cases: list[Case], parts: list[str], options: argparse.Namespace) -> None:
    if options.out.exists() and options.quick:
        options.out.unlink()  # a quick run reports itself alone
    for case in cases:
        print(f"{case.name}, alpha {case.alpha} ...", file=sys.stderr, flush=True)
        save(options.out, results=[measure(case, options.peer_limit)])
    if "growth" in parts:
        save(options.out, growth=in_a_process({"growth": True}, 3600))
    if "flow-growth" in parts:
        save(options.out, flow_growth=flow_growth(options.peer_limit))
    print(page(json.loads(options.out.read_text())))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="small grid")
    parser.add_argument("--only", nargs="*", metavar="NxDxK", help=f"only these rows of the grid; also {', '.join(PARTS)}")
    parser.add_argument("--peer-limit", type=float, default=1800.0, help="wall seconds for each fit of a peer")
    parser.add_argument("--no-peers", action="store_true", help="our own solver only")
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--job", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.job:
        job = json.loads(options.job)
        print(json.dumps(growth() if "growth" in job else run_one(Case(**job["case"]), job["solver"], job["seed"])))
        return
    cases, parts = list(QUICK if options.quick else FULL), [] if options.quick else list(PARTS)
    if options.only is not None:
        known = [*(case.name for case in cases), *PARTS]
        if unknown := [name for name in options.only if name not in known]:
            parser.error(f"unknown rows {', '.join(unknown)}; known are {', '.join(known)}")
        cases, parts = [case for case in cases if case.name in options.only], [p for p in PARTS if p in options.only]
    if options.no_peers:
        cases, parts = [replace(case, peers=()) for case in cases], [p for p in parts if p != "flow-growth"]
    run(cases, parts, options)


if __name__ == "__main__":
    main()
