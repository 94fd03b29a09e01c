"""LESS's gradients and projection against the released way, in one run, on the same rows, at equal features.

    python benchmarks/bench_less.py --model FOLDER [--rows 32] [--ranks 8 128] [--dim 8192] [--precision bfloat16]

released gradients    one sample a forward and backward pass through the library's model, loss and autograd
released projection   dense signs made anew for every 16 samples and multiplied in float32, with signs
                      - drawn by torch's generator, as the released projector does on a CPU (other signs, same distribution)
                      - or our signs, written in plain torch operations: equal features
                      - or our signs from our compiled loop: what is left when only the generator is replaced
ours                  packed batches, gradients cut at the samples' borders; signs made once a block for all rows of a group;
                      exact sums

Where the signs are ours in both, the features must agree: the smallest cosine is part of the result. The floor is what cannot be
avoided: twice the forward pass's operations at the matrix rate of the precision, and three 8-bit products at the integer rate, both
measured in the same run; signs cost nothing in it. CPU seconds of one thread. Writes benchmarks/results/less.json and prints a
Markdown table.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from proxy_inputs import RESULTS, load, machine, matrix_rate, pool_rows

from clusterft.batching import TokenRow, plan_batches, row_of_encoded
from clusterft.lora_gradients import GROUP_BYTES
from clusterft.lora_model import LoraParams, adapter_parameters, lora_on
from clusterft.per_sample_gradients import GradientPass, adam_feature
from clusterft.projection import SignProjection, unit_rows
from clusterft.proxy_pass import with_precision
from clusterft.records import IGNORE_INDEX

BUFFER = 16
COLUMNS = 32
TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj")
WAYS = ("released", "released, our signs in torch", "released, our compiled signs", "ours")


def timed(work: Callable[[], Any]) -> tuple[Any, float]:
    started = time.process_time()
    result = work()
    return result, time.process_time() - started


def ours(
    ready: GradientPass, rows: Sequence[TokenRow], moments: tuple, projection: SignProjection, tokens: int
) -> dict[str, Any]:
    """Groups of as many rows as the extractor holds at a time."""
    group = max(1, GROUP_BYTES // (4 * projection.n_features))
    gradient_seconds = projection_seconds = 0.0
    features = []
    for start in range(0, len(rows), group):
        some = rows[start : start + group]
        plan = plan_batches([len(r) for r in some], range(len(some)), tokens)
        found = torch.empty(len(some), projection.n_features)
        started = time.process_time()
        for batch in plan:
            found[batch] = ready.gradients([some[i] for i in batch])
        gradient_seconds += time.process_time() - started
        to_adam(found, moments)
        projected, seconds = timed(lambda found=found: projection.project(found))
        projection_seconds += seconds
        features.append(projected)
    return {"gradients": gradient_seconds, "projection": projection_seconds, "features": unit_rows(torch.cat(features))}


def to_adam(gradients: torch.Tensor, moments: tuple) -> None:
    for row in gradients.split(1):
        row.copy_(adam_feature(row, *moments, variant="official", step=1))


def released_gradients(model: Any, rows: Sequence[TokenRow]) -> torch.Tensor:
    """(b, p): batch 1, the library's own forward pass and loss, autograd on the adapters."""
    named = adapter_parameters(model)
    out = torch.empty(len(rows), sum(p.numel() for p in named.values()))
    for place, row in zip(out, rows, strict=True):
        ids = torch.as_tensor(np.append(row.input_ids, row.targets[-1]))
        labels = torch.full_like(ids, IGNORE_INDEX)
        labels[torch.as_tensor(row.places + 1)] = torch.as_tensor(row.targets)
        loss = model(input_ids=ids[None], labels=labels[None], use_cache=False).loss
        place.copy_(torch.cat([g.flatten().float() for g in torch.autograd.grad(loss, list(named.values()))]))
    return out


def released(model: Any, rows: Sequence[TokenRow], moments: tuple, projection: SignProjection) -> dict[str, Any]:
    """Batch 1; for every BUFFER samples the whole sign matrix is made, a block at a time, and multiplied in float32."""
    gradient_seconds, parts, features = 0.0, {"signs": 0.0, "torch_signs": 0.0, "products": 0.0}, []
    for start in range(0, len(rows), BUFFER):
        gradients, seconds = timed(lambda start=start: released_gradients(model, rows[start : start + BUFFER]))
        gradient_seconds += seconds
        to_adam(gradients, moments)
        features.append(dense_projection(gradients, projection, parts))
    return {"gradients": gradient_seconds, **parts, "features": unit_rows(torch.cat(features))}


def dense_projection(gradients: torch.Tensor, projection: SignProjection, seconds: dict[str, float]) -> torch.Tensor:
    """In blocks small enough that their memory is used again: fresh pages would cost more than the signs."""
    out = torch.zeros(len(gradients), projection.dim)
    plain = replace(projection, backend="torch")
    for start in range(0, projection.n_features, 512):
        stop = min(start + 512, projection.n_features)
        signs, took = timed(lambda a=start, b=stop: projection.signs(a, b))
        seconds["signs"] += took
        same, took = timed(lambda a=start, b=stop: plain.signs(a, b))
        seconds["torch_signs"] += took
        if start % (512 * 64) == 0 and not torch.equal(signs, same):
            raise RuntimeError(f"the two forms of the signs differ in rows {start} ... {stop - 1}")
        product, took = timed(lambda a=start, b=stop, s=signs: gradients[:, a:b] @ s)
        seconds["products"] += took
        out += product
    return out / projection.dim**0.5


def generator_seconds(n_features: int, dim: int, n_rows: int) -> float:
    """Seconds that torch's generator needs for the signs of n_rows samples, from COLUMNS columns scaled up."""
    generator = torch.Generator().manual_seed(0)
    block = torch.zeros(n_features, COLUMNS)
    _, seconds = timed(lambda: block.bernoulli_(0.5, generator=generator).mul_(2).sub_(1))
    return seconds * dim / COLUMNS * -(-n_rows // BUFFER)


def integer_rate(rows: int, dim: int) -> float:
    """8-bit operations a CPU second of the product of 3 x rows with a block of signs."""
    a, b = torch.ones(3 * rows, 1024, dtype=torch.int8), torch.ones(1024, dim, dtype=torch.int8)
    torch._int_mm(a, b)
    _, seconds = timed(lambda: [torch._int_mm(a, b) for _ in range(8)])
    return 8 * 2 * 3 * rows * 1024 * dim / seconds


def floor_seconds(ready: GradientPass, rows: Sequence[TokenRow], projection: SignProjection, precision: str) -> dict[str, float]:
    gradients = 2 * ready.flops(rows) / matrix_rate(torch.bfloat16 if precision.startswith("b") else torch.float32)
    group = min(len(rows), max(1, GROUP_BYTES // (4 * projection.n_features)))
    operations = 2.0 * 3 * len(rows) * projection.n_features * projection.dim
    return {"gradients": gradients, "projection": operations / integer_rate(group, projection.dim)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="folder of a model in safetensors")
    parser.add_argument("--rows", type=int, default=32)
    parser.add_argument("--ranks", type=int, nargs="+", default=[8, 128], help="of LoRA; the released default is 128")
    parser.add_argument("--dim", type=int, default=8192)
    parser.add_argument("--precision", default="bfloat16")
    parser.add_argument("--tokens", type=int, default=2048, help="tokens a batch")
    parser.add_argument("--max-row-tokens", type=int, default=128)
    parser.add_argument("--quick", action="store_true", help="rank 8, 4 rows of at most 100 tokens, 512 columns")
    options = parser.parse_args()
    if options.quick:
        options.ranks, options.rows, options.max_row_tokens, options.dim = [8], 4, 100, 512
    torch.set_num_threads(1)
    base, tokenizer = load(options.model)
    rows = [row_of_encoded(e) for e in pool_rows(tokenizer, options.rows, options.max_row_tokens)]
    model = with_precision(base, options.precision)
    settings = {key: getattr(options, key) for key in ("dim", "precision", "tokens")}
    facts = {"model": Path(options.model).name, "rows": len(rows), "row_tokens": sum(map(len, rows)), **settings}
    runs = [compare(model, rows, rank, options) for rank in options.ranks]
    result = {"benchmark": "less", "settings": facts, "machine": machine(), "runs": runs}
    RESULTS.mkdir(parents=True, exist_ok=True)
    (RESULTS / ("less_quick.json" if options.quick else "less.json")).write_text(json.dumps(result, indent=1) + "\n")
    print(markdown(result))


def markdown(result: dict[str, Any]) -> str:
    """The table of a result, as it is committed."""
    facts = result["settings"]
    lines = [
        f"{facts['rows']} rows, {facts['row_tokens']:,} tokens, {facts['dim']:,} columns, {facts['precision']}; "
        f"{result['machine']['cpu']}, {result['machine']['threads']} thread(s). × is the time against ours.",
        "",
        "| LoRA rank, values a row | way | gradients, CPU s | projection, CPU s | total | × |",
        "|---|---|---|---|---|---|",
    ]
    for run in result["runs"]:
        for way in (*WAYS, "floor"):
            r = run[way]
            cells = f"{way} | {r['gradients']:.1f} | {r['projection']:.1f} | {r['total']:.1f} | {r['ratio']:.2f}"
            lines.append(f"| {run['rank']}, {run['gradient_values']:,} | {cells} |")
    cosine = min(run["smallest_cosine"] for run in result["runs"])
    return "\n".join([*lines, "", f"smallest cosine of equal features: {cosine:.6f}"])


def compare(base: Any, rows: Sequence[TokenRow], rank: int, options: argparse.Namespace) -> dict[str, Any]:
    params = LoraParams(rank=rank, alpha=4 * rank, dropout=0.0, targets=TARGETS, last_layers=None, seed=0)
    with lora_on(base, params) as model:
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
        slow = released(model, rows, moments, projection)
        floor = floor_seconds(ready, rows, projection, options.precision)
    cosine = float((fast.pop("features") * slow.pop("features")).sum(1).min())
    drawn = generator_seconds(ready.n_features, options.dim, len(rows))
    ways = {
        "released": {"gradients": slow["gradients"], "projection": drawn + slow["products"], "signs": drawn},
        "released, our signs in torch": {"gradients": slow["gradients"], "projection": slow["torch_signs"] + slow["products"]},
        "released, our compiled signs": {**slow, "projection": slow["signs"] + slow["products"]},
        "ours": fast,
        "floor": floor,
    }
    for way in ways.values():
        way["total"] = way["gradients"] + way["projection"]
    for way in ways.values():
        way["ratio"] = way["total"] / fast["total"]
    return {"rank": rank, "gradient_values": ready.n_features, "smallest_cosine": cosine, **ways}


if __name__ == "__main__":
    main()
