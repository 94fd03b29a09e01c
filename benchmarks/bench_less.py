"""LESS's gradients and projection against the released way, in one run, on the same rows, at equal features.

    python benchmarks/bench_less.py --model FOLDER [--rows 32] [--rank 8] [--dim 8192] [--precision bfloat16]

released way   one sample a forward and backward pass; dense signs made anew for every 16 samples
ours           packed batches, gradients cut at the samples' borders; signs made once a block for all rows; exact sums

Both multiply the same signs, so the features must agree: the smallest cosine is part of the result. The released way's signs
are also made by torch's own generator, which is what its projector does (other signs, same distribution): that time is given
beside. CPU seconds of one thread. Writes benchmarks/results/less.json and prints a Markdown table.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from proxy_inputs import RESULTS, load, machine, pool_rows

from clusterft.batching import TokenRow, plan_batches, row_of_encoded
from clusterft.lora_model import LoraParams, adapter_parameters, lora_on
from clusterft.per_sample_gradients import GradientPass, adam_feature
from clusterft.projection import SignProjection, unit_rows
from clusterft.proxy_pass import with_precision

BUFFER = 16
COLUMNS = 128
TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj")


def timed(work: Callable[[], Any]) -> tuple[Any, float]:
    started = time.process_time()
    result = work()
    return result, time.process_time() - started


def ours(
    ready: GradientPass, rows: Sequence[TokenRow], moments: tuple, projection: SignProjection, tokens: int
) -> dict[str, Any]:
    plan = plan_batches([len(r) for r in rows], range(len(rows)), tokens)
    order = [i for batch in plan for i in batch]
    found, gradient_seconds = timed(lambda: torch.cat([ready.gradients([rows[i] for i in batch]) for batch in plan]))
    found = adam_feature(found, *moments, variant="official", step=1)[torch.argsort(torch.tensor(order))]
    features, projection_seconds = timed(lambda: projection.project(found))
    return {"gradients": gradient_seconds, "projection": projection_seconds, "features": unit_rows(features)}


def released(ready: GradientPass, rows: Sequence[TokenRow], moments: tuple, projection: SignProjection) -> dict[str, Any]:
    """Batch 1; for every BUFFER samples the whole sign matrix is made, a block at a time, and multiplied in float32."""
    gradient_seconds = projection_seconds = 0.0
    features = []
    for start in range(0, len(rows), BUFFER):
        gradients, seconds = timed(lambda start=start: ready.slow_gradients(rows[start : start + BUFFER]))
        gradient_seconds += seconds
        gradients = adam_feature(gradients, *moments, variant="official", step=1)
        projected, seconds = timed(lambda g=gradients: dense_projection(g, projection))
        projection_seconds += seconds
        features.append(projected)
    return {"gradients": gradient_seconds, "projection": projection_seconds, "features": unit_rows(torch.cat(features))}


def dense_projection(gradients: torch.Tensor, projection: SignProjection) -> torch.Tensor:
    out = torch.zeros(len(gradients), projection.dim)
    for start in range(0, projection.n_features, 4096):
        stop = min(start + 4096, projection.n_features)
        out += gradients[:, start:stop] @ projection.signs(start, stop)
    return out / projection.dim**0.5


def generator_seconds(n_features: int, dim: int, n_rows: int) -> float:
    """Seconds that torch's generator needs for the signs of n_rows samples, from COLUMNS columns scaled up."""
    generator = torch.Generator().manual_seed(0)
    block = torch.empty(n_features, COLUMNS)
    _, seconds = timed(lambda: block.bernoulli_(0.5, generator=generator).mul_(2).sub_(1))
    return seconds * dim / COLUMNS * -(-n_rows // BUFFER)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="folder of a model in safetensors")
    parser.add_argument("--rows", type=int, default=32)
    parser.add_argument("--rank", type=int, default=8)
    parser.add_argument("--dim", type=int, default=8192)
    parser.add_argument("--precision", default="bfloat16")
    parser.add_argument("--tokens", type=int, default=2048, help="tokens a batch")
    parser.add_argument("--max-row-tokens", type=int, default=128)
    options = parser.parse_args()
    torch.set_num_threads(1)
    result = compare(options)
    RESULTS.mkdir(parents=True, exist_ok=True)
    (RESULTS / "less.json").write_text(json.dumps(result, indent=1) + "\n")
    print(markdown(result))


def markdown(result: dict[str, Any]) -> str:
    """The table of a result, as it is committed."""
    lines = ["| way | gradients, CPU s | projection, CPU s | total | x |", "|---|---|---|---|---|"]
    for way in ("released", "released_torch_signs", "ours"):
        r = result[way]
        lines.append(f"| {way} | {r['gradients']:.1f} | {r['projection']:.1f} | {r['total']:.1f} | {r['ratio']:.2f} |")
    return "\n".join([*lines, "", f"smallest cosine of equal features: {result['smallest_cosine']:.6f}"])


def compare(options: argparse.Namespace) -> dict[str, Any]:
    base, tokenizer = load(options.model)
    rows = [row_of_encoded(e) for e in pool_rows(tokenizer, options.rows, options.max_row_tokens)]
    params = LoraParams(rank=options.rank, alpha=4 * options.rank, dropout=0.0, targets=TARGETS, last_layers=None, seed=0)
    with lora_on(with_precision(base, options.precision), params) as model:
        torch.manual_seed(0)
        with torch.no_grad():
            for name, parameter in adapter_parameters(model).items():
                if "lora_B" in name:
                    parameter.normal_(std=0.01)
        ready = GradientPass(model)
        projection = SignProjection(ready.n_features, options.dim, 0)
        moments = (torch.zeros(ready.n_features), torch.zeros(ready.n_features))
        SignProjection(64, options.dim, 0).project(torch.ones(2, 64))  # compiles, and finds out which products are faster
        fast = ours(ready, rows, moments, projection, options.tokens)
        slow = released(ready, rows, moments, projection)
    cosine = float((fast.pop("features") * slow.pop("features")).sum(1).min())
    torch_signs = {"gradients": slow["gradients"], "projection": generator_seconds(ready.n_features, options.dim, len(rows))}
    ways = {"released": slow, "released_torch_signs": torch_signs, "ours": fast}
    for way in ways.values():
        way["total"] = way["gradients"] + way["projection"]
    for way in ways.values():
        way["ratio"] = way["total"] / fast["total"]
    facts = {"rows": len(rows), "row_tokens": sum(map(len, rows)), "gradient_values": ready.n_features, **vars(options)}
    facts["model"] = Path(options.model).name
    return {"settings": facts, "machine": machine(), "smallest_cosine": cosine, **ways}


if __name__ == "__main__":
    main()
