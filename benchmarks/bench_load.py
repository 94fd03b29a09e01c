"""What loading costs: a million short rows through the loader, the doctor and a random selection, each in a process of its own.

    python benchmarks/bench_load.py [--rows 1000000] [--model smollm2_135m] [--out results/load.json]

In: rows made up here. Out: processor seconds (user and system, all threads) and peak resident memory of each step, to results/load.json and
as a table. Bounds: a million rows load within 2 GiB; the doctor takes under 10 s for 100,000 rows.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
WORDS = ["alpha", "beta", "gamma", "delta", "river", "stone", "cloud", "paper", "window", "garden", "letter", "number"]
LOAD = "import sys; from pathlib import Path; sys.path.insert(0, 'tests'); from data_configs import files_config; from clusterft.data import load_pool; "
LOAD += "assert len(load_pool(files_config(sys.argv[1])).train) == int(sys.argv[2])"


def write_rows(path: Path, count: int) -> None:
    """`count` different rows of some 140 bytes."""
    with path.open("w", encoding="utf-8") as out:
        for i in range(count):
            a, b = WORDS[i % 12], WORDS[i // 12 % 12]
            answer = " ".join([a, b, str(i)] * (1 + i % 5))
            out.write(f'{{"instruction": "Say {a} and {b}, number {i}.", "input": "", "output": "{answer}"}}\n')


def measured(command: list[str], cache: Path) -> dict[str, Any]:
    """Processor seconds and peak memory of a command and its children. Raises CalledProcessError if it fails."""
    code = (
        "import json, resource, subprocess, sys; status = subprocess.run(sys.argv[1:], stdout=subprocess.DEVNULL).returncode; "
        "u = resource.getrusage(resource.RUSAGE_CHILDREN); print(json.dumps([status, u.ru_utime, u.ru_stime, u.ru_maxrss]))"
    )
    environment = {**os.environ, "OMP_NUM_THREADS": "2", "CLUSTERFT_CACHE": str(cache)}
    done = subprocess.run(
        [sys.executable, "-c", code, *command], env=environment, capture_output=True, text=True, check=True, cwd=HERE.parent
    )
    status, user, system, peak = json.loads(done.stdout)
    if status not in (0, 1):
        raise subprocess.CalledProcessError(status, command, stderr=done.stderr)
    return {"cpu_seconds": round(user + system, 1), "peak_mib": round(peak / 1024)}


def steps(rows: int, model: str, folder: Path) -> Iterator[tuple[str, list[str]]]:
    path = folder / f"{rows}.jsonl"
    write_rows(path, rows)
    tool = [sys.executable, "-m", "clusterft.cli"]
    yield "load", [sys.executable, "-c", LOAD, str(path), str(rows)]
    yield "doctor", [*tool, "doctor", str(path), "--model", model]
    out = ["--out", str(folder / f"out{rows}"), "--no-report"]
    yield "select, random", [*tool, "select", str(path), "--model", model, "--selector", "random", "--keep", "0.1", *out]


def markdown(data: dict[str, Any]) -> str:
    lines = ["| step | rows | CPU s | peak memory, MiB |", "|---|---|---|---|"]
    lines += [f"| {r['step']} | {r['rows']:,} | {r['cpu_seconds']} | {r['peak_mib']:,} |" for r in data["steps"]]
    return "\n".join([f"Model: {data['model']}.", "", *lines])


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    p.add_argument("--rows", type=int, nargs="+", default=[100_000, 1_000_000])
    p.add_argument("--model", default="smollm2_135m")
    p.add_argument("--out", type=Path, default=HERE / "results" / "load.json")
    args = p.parse_args()
    found = []
    cache = Path(os.environ.get("CLUSTERFT_CACHE", Path.home() / ".cache" / "clusterft"))
    with tempfile.TemporaryDirectory() as scratch:
        for rows in args.rows:
            for step, command in steps(rows, args.model, Path(scratch)):
                found.append({"step": step, "rows": rows, **measured(command, cache)})
                print(found[-1], flush=True)
    data = {
        "model": args.model,
        "steps": found,
        "peak_of_this_process_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024,
    }
    args.out.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
    print(markdown(data))


if __name__ == "__main__":
    main()
