"""How well cheap signals follow true gradients: Spearman correlation of pairwise cosines, with a bootstrap interval.

    python benchmarks/bench_fidelity.py [--model FOLDER] [--rows 64] [--max-length 512] [--quick]

The truth is the gradient of each sample's mean response loss with respect to all parameters (torch.func), reduced by a count
sketch of a million buckets, whose error of a cosine is about 0.001. Cost is CPU time relative to the paper's proxy on these rows.
Writes benchmarks/results/fidelity.json and prints a Markdown table.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from typing import Any

import numpy as np
import torch
from proxy_inputs import RESULTS, load, machine, pairs, pool_rows

from clusterft.diagnostics import cosine_fidelity
from clusterft.proxy import gradient_proxies
from clusterft.seeding import generator
from clusterft.true_gradients import FoldedSketch, per_sample_gradients

SIGNALS: dict[str, dict[str, Any]] = {
    "paper": {},
    "paper, centred": {"centre": True},
    "output_gradient": {"proxy": "output_gradient"},
    "concat": {"proxy": "concat"},
    "last_layers, 10": {"proxy": "last_layers", "layers": 10},
    "lora_b, rank 8": {"proxy": "lora_b"},
}
SKETCH = 1 << 20


def measured(model: Any, samples: list, truth: np.ndarray, resamples: int) -> dict[str, dict[str, float]]:
    results: dict[str, dict[str, float]] = {}
    for name, options in SIGNALS.items():
        start = time.process_time()
        rows = gradient_proxies(model, samples, token_budget=2048, **options)
        seconds = time.process_time() - start
        found = cosine_fidelity(rows, truth, generator(0, "fidelity"), resamples=resamples)
        results[name] = {
            "correlation": found.value,
            "low": found.low,
            "high": found.high,
            "cpu_seconds": seconds,
            "dimensions": int(rows.shape[1]),
        }
        print(name, results[name], file=sys.stderr, flush=True)
    for facts in results.values():
        facts["cost"] = facts["cpu_seconds"] / results["paper"]["cpu_seconds"]
    return results


def markdown(report: dict) -> str:
    lines = [
        f"{report['rows']} rows, {report['tokens']:,} tokens; true gradients of {report['parameters']:,} parameters took "
        f"{report['truth_cpu_seconds']:.0f} CPU seconds; {report['machine']['cpu']}, {report['machine']['threads']} thread(s).",
        "",
        "| signal | dimensions | cost (paper's proxy = 1) | Spearman correlation of cosines | 95 % interval |",
        "|---|---|---|---|---|",
    ]
    for name, x in report["signals"].items():
        lines.append(
            f"| {name} | {x['dimensions']:,} | {x['cost']:.2f} | {x['correlation']:.3f} | {x['low']:.2f} to {x['high']:.2f} |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="folder of a model; default: the configured small real model")
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--max-length", type=int, default=512, help="longer rows are left out")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--resamples", type=int, default=1000)
    parser.add_argument("--quick", action="store_true", help="12 rows of at most 200 tokens")
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.rows, arguments.max_length, arguments.resamples = 12, 200, 200
    torch.set_num_threads(arguments.threads)
    model, tokenizer = load(arguments.model)
    encoded = pool_rows(tokenizer, arguments.rows, arguments.max_length)
    start = time.process_time()
    truth = per_sample_gradients(model, encoded, projection=FoldedSketch(SKETCH, 0))
    report = {
        "benchmark": "fidelity",
        "machine": machine(),
        "rows": len(encoded),
        "max_length": arguments.max_length,
        "tokens": sum(map(len, encoded)),
        "parameters": sum(p.numel() for p in model.parameters()),
        "sketch": SKETCH,
        "truth_cpu_seconds": time.process_time() - start,
    }
    report["signals"] = measured(model, pairs(encoded), truth, arguments.resamples)
    RESULTS.mkdir(parents=True, exist_ok=True)
    name = "fidelity_quick.json" if arguments.quick else "fidelity.json"
    (RESULTS / name).write_text(json.dumps(report, indent=1) + "\n")
    print(markdown(report))


if __name__ == "__main__":
    main()
