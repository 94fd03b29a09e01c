"""The gradient-proxy pass against the released procedure, in one run: CPU time, memory, agreement, and the physical floor.

    python benchmarks/bench_proxy.py [--model FOLDER] [--rows 48] [--quick] [--versions packed_float32,...]

Every version runs in its own process (its peak memory is its own) on the same rows. The released procedure: batches of 8 in
data-set order, padded, hidden states of all layers, log-softmax over all logits. The floor: operations that cannot be avoided
(2 a parameter outside the embedding and token, attention, 2 h v a response token) over the matrix rate measured in the same
process. "× released at the floor" is what a version could reach on this machine at most, if it did nothing but these operations at
that rate and shared no beginning of the rows.
Writes benchmarks/results/proxy.json and prints a Markdown table.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from proxy_inputs import RESULTS, load, load_own_tokenizer, machine, matrix_rate, pairs, pool_rows

from clusterft.proxy import ProxyPass, gradient_proxies

BATCH = 8


@torch.no_grad()
def released(model: Any, samples: list, batch: int = BATCH) -> np.ndarray:
    """The released procedure: padded batches in order, all hidden states, log-softmax of every logit."""
    rows = []
    for start in range(0, len(samples), batch):
        part = samples[start : start + batch]
        width = max(len(p) + len(r) for p, r in part)
        ids, mask, labels = (torch.full((len(part), width), fill) for fill in (0, 0, -100))
        for i, (prompt, response) in enumerate(part):
            n = len(prompt) + len(response)
            ids[i, :n], mask[i, :n] = torch.tensor(prompt + response), 1
            labels[i, len(prompt) : n] = torch.tensor(response)
        out = model(input_ids=ids, attention_mask=mask, output_hidden_states=True, use_cache=False)
        targets = labels[:, 1:]
        kept = targets != -100
        log_p = torch.log_softmax(out.logits[:, :-1].float(), -1).gather(2, targets.clamp_min(0)[..., None])[..., 0]
        weight = (log_p.exp() - 1) * kept / kept.sum(1, keepdim=True)
        rows.append((weight[..., None] * out.hidden_states[-1][:, :-1].float()).sum(1))
    return torch.cat(rows).numpy()


def ours(**options: Any) -> Callable[[Any, list], np.ndarray]:
    return lambda model, samples: gradient_proxies(model, samples, normalise=False, **options)


VERSIONS: dict[str, tuple[str, Callable[[Any, list], np.ndarray]]] = {
    "released_float32": ("float32", released),
    "released_batch1_float32": ("float32", lambda m, s: released(m, s, 1)),
    "sorted_padded_float32": ("float32", ours(layout="right", token_budget=4096)),
    "packed_float32": ("float32", ours(token_budget=4096)),
    "released_bfloat16": ("bfloat16", released),
    "packed_bf16_autocast": ("float32", ours(token_budget=4096, precision="bf16_autocast")),
    "packed_bfloat16": ("bfloat16", ours(token_budget=4096)),
}
QUICK = ("released_float32", "packed_float32", "packed_bfloat16")


def child(version: str, arguments: argparse.Namespace) -> None:
    """One version in this process: {cpu_seconds, wall_seconds, peak_gib, matrix_gflops, floor_seconds} and its rows, written beside."""
    torch.set_num_threads(arguments.threads)
    dtype, compute = VERSIONS[version]
    model, _ = load(arguments.model, dtype)
    samples = json.loads(Path(arguments.samples).read_text())
    compute(model, [min(samples, key=lambda s: len(s[0]) + len(s[1]))])
    cpu, wall = [], []
    for _ in range(arguments.repeats):
        starts = time.process_time(), time.perf_counter()
        rows = compute(model, samples)
        cpu.append(time.process_time() - starts[0])
        wall.append(time.perf_counter() - starts[1])
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    rate = matrix_rate(torch.bfloat16 if "bf" in version else torch.float32)
    np.save(Path(arguments.samples).with_name(f"{version}.npy"), rows)
    facts = {
        "cpu_seconds": statistics.median(cpu),
        "wall_seconds": statistics.median(wall),
        "peak_gib": peak / 2**20,
        "matrix_gflops": rate / 1e9,
        "floor_seconds": floor_flops(model, samples) / rate,
    }
    print("RESULT " + json.dumps(facts))


def floor_flops(model: Any, samples: list) -> float:
    from clusterft.batching import row_of_pair

    return ProxyPass(model).flops([row_of_pair(p, r) for p, r in samples])


def measure(arguments: argparse.Namespace, names: list[str], folder: Path) -> dict[str, dict[str, float]]:
    results = {}
    for name in names:
        command = [sys.executable, __file__, "--child", name, "--samples", str(folder / "samples.json")]
        command += ["--threads", str(arguments.threads), "--repeats", str(arguments.repeats)]
        command += ["--model", arguments.model] if arguments.model else []
        done = subprocess.run(command, capture_output=True, text=True)
        lines = [x for x in done.stdout.splitlines() if x.startswith("RESULT ")]
        if done.returncode or not lines:
            raise RuntimeError(f"version {name} failed:\n{done.stderr[-2000:]}")
        results[name] = json.loads(lines[0].removeprefix("RESULT "))
        print(name, results[name], file=sys.stderr, flush=True)
    return results


def compared(results: dict, tokens: int, folder: Path) -> None:
    """Adds speed, ratio to the released procedure, agreement with its float32 rows, ratio to the floor."""
    truth = np.load(folder / "released_float32.npy").astype(np.float64)
    for name, facts in results.items():
        rows = np.load(folder / f"{name}.npy").astype(np.float64)
        cosine = (rows * truth).sum(1) / np.linalg.norm(rows, axis=1) / np.linalg.norm(truth, axis=1)
        facts["min_cosine"] = float(cosine.min())
        facts["tokens_per_cpu_second"] = tokens / facts["cpu_seconds"]
        facts["speedup"] = results["released_float32"]["cpu_seconds"] / facts["cpu_seconds"]
        facts["times_floor"] = facts["cpu_seconds"] / facts["floor_seconds"]


def markdown(report: dict) -> str:
    lines = [
        f"{report['rows']} rows, {report['tokens']:,} tokens, {report['response_tokens']:,} of them response, "
        f"padding factor {report['padding_factor']:.2f} in batches of {BATCH}; {report['machine']['cpu']}, "
        f"{report['machine']['threads']} thread(s).",
        "",
        "| version | tokens / CPU s | × released | × released at the floor | × floor | min cosine | peak memory with the model, GiB |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, x in report["versions"].items():
        lines.append(
            f"| {name} | {x['tokens_per_cpu_second']:.0f} | {x['speedup']:.2f} | {x['speedup'] * x['times_floor']:.2f} | "
            f"{x['times_floor']:.2f} | "
            f"{x['min_cosine']:.6f} | {x['peak_gib']:.2f} |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="folder of a model; default: the configured small real model")
    parser.add_argument("--rows", type=int, default=48)
    parser.add_argument("--max-length", type=int, default=1216)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--versions", help=f"comma-separated, of {', '.join(VERSIONS)}; released_float32 always runs")
    parser.add_argument("--quick", action="store_true", help="4 short rows, one repeat, three versions")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    parser.add_argument("--samples", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        return child(arguments.child, arguments)
    if arguments.quick:
        arguments.rows, arguments.repeats, arguments.max_length = 4, 1, 200
    torch.set_num_threads(arguments.threads)
    names = list(QUICK if arguments.quick else VERSIONS) if not arguments.versions else arguments.versions.split(",")
    names = list(dict.fromkeys(["released_float32", *names]))
    samples = pairs(pool_rows(load_own_tokenizer(arguments.model), arguments.rows, arguments.max_length))
    lengths = [len(p) + len(r) for p, r in samples]
    padded = sum(max(lengths[i : i + BATCH]) * len(lengths[i : i + BATCH]) for i in range(0, len(lengths), BATCH))
    report = {
        "benchmark": "proxy",
        "machine": machine(),
        "rows": len(samples),
        "tokens": sum(lengths),
        "response_tokens": sum(len(r) for _, r in samples),
        "padding_factor": padded / sum(lengths),
        "repeats": arguments.repeats,
    }
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "samples.json").write_text(json.dumps(samples))
        results = measure(arguments, names, Path(folder))
        compared(results, sum(lengths), Path(folder))
    report["versions"] = results
    RESULTS.mkdir(parents=True, exist_ok=True)
    (RESULTS / ("proxy_quick.json" if arguments.quick else "proxy.json")).write_text(json.dumps(report, indent=1) + "\n")
    print(markdown(report))


if __name__ == "__main__":
    main()
