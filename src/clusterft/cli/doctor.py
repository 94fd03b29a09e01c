"""`clusterft doctor DATA --model M`: what is in the data and what would happen to it, in seconds.

    load (every row) ► tokenise (a sample by content hash where there are many) ► findings ► table or JSON ► exit status

Exit status 0: nothing to do; 1: something to look at; 2: the data or the model cannot be used.
"""

from __future__ import annotations

import argparse
import heapq
import json
import shutil
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from omegaconf import DictConfig

from clusterft.cli.arguments import in_flags
from clusterft.cli.console import console, duration, facts_table, size
from clusterft.composing import Request, compose_request
from clusterft.data import Pools, load_pool
from clusterft.records import IGNORE_INDEX, Example, Pool

SAMPLE_ROWS = 5000
"""Rows that are tokenised at most: their ids are hashes, so the lowest ones are a sample that no order of rows can bias."""

LOW_DISK = 2 << 30
UNCUT = 1 << 30
"""A maximum length that cuts nothing."""


def run(args: argparse.Namespace) -> int:
    started = time.perf_counter()
    request = Request(
        data=tuple(args.data),
        model=args.model,
        selector="full",
        template=args.template,
        max_length=args.max_length,
        holdout=0,
        device=args.device,
        file_format=args.file_format,
        fields=tuple(args.field),
        settings=tuple(args.settings),
    )
    cfg = compose_request(request)
    facts = examine(cfg, strict=args.strict)
    facts["seconds"] = round(time.perf_counter() - started, 2)
    if args.json:
        print(json.dumps(facts, indent=1))
    else:
        _print(facts)
    return 2 if facts["errors"] else int(bool(facts["findings"]))


def examine(cfg: DictConfig, *, strict: bool = False) -> dict[str, Any]:
    """Everything that the doctor knows, JSON-able. Raises DataError where no row can be read."""
    pools = load_pool(cfg.data, strict=strict)
    facts: dict[str, Any] = {"load": pools.report.to_json(), "summary": pools.report.lines()}
    facts["duplicate_lines"] = [[list(a), list(b)] for a, b in pools.report.duplicate_lines]
    facts["tokens"] = tokens(cfg, sample(pools.train.examples), len(pools.train))
    facts["machine"] = machine(cfg)
    facts["errors"] = list(errors(facts))
    facts["findings"] = list(findings(cfg, pools, facts))
    return facts


def sample(examples: Sequence[Example]) -> list[Example]:
    """At most SAMPLE_ROWS rows, those with the lowest ids, in source order."""
    if len(examples) <= SAMPLE_ROWS:
        return list(examples)
    lowest = set(heapq.nsmallest(SAMPLE_ROWS, (e.id for e in examples)))
    return [e for e in examples if e.id in lowest]


def tokens(cfg: DictConfig, examples: Sequence[Example], total: int) -> dict[str, Any]:
    """Lengths, truncation, prompt share and the tokenizer's ways over the sample, which is tokenised once and uncut.

    `error` says so where no row has an answer token within max_length.
    """
    from clusterft.models import load_tokenizer
    from clusterft.prompting import encode_pool_with_report

    tokenizer = load_tokenizer(cfg.model, assets_dir=cfg.runtime.assets_dir, cache_dir=cache_dir(cfg))
    limit, pool = cfg.trainer.max_length, Pool(cfg.data.name, tuple(examples))
    kept, encoded, report = encode_pool_with_report(pool, tokenizer, cfg.data.template, UNCUT)
    lengths = np.array([len(e) for e in encoded])
    cut = sum(bool((e.labels[limit:] != IGNORE_INDEX).any()) for e in encoded)
    targets = np.array([int((e.labels[1:limit] != IGNORE_INDEX).sum()) for e in encoded])
    answerless = [kept.examples[i] for i in np.flatnonzero(targets == 0)]
    found = {
        "rows": len(examples),
        "of": total,
        "max_length": limit,
        "template": cfg.data.template,
        "median": int(np.median(lengths)),
        "p95": int(np.quantile(lengths, 0.95)),
        "longest": int(lengths.max()),
        "longest_row": list(report.longest),
        "over_max_length": int((lengths > limit).sum()),
        "histogram": histogram(lengths),
        "answers_cut": cut - len(answerless),
        "no_target_count": len(answerless),
        "no_target_rows": [[e.source, e.line] for e in answerless[:3]],
        "prompt_share": round(1 - float(targets.sum()) / float(np.minimum(lengths, limit).sum()), 4),
        "target_tokens": int(targets.sum()),
        "tokenizer": report.tokenizer_line,
    }
    return found | (
        {"error": f"no row has an answer token within {limit} tokens; raise --max-length"} if not targets.any() else {}
    )


def histogram(lengths: np.ndarray) -> list[list[int]]:
    """[upper bound, rows] for powers of two: rows of more than half the bound and at most the bound."""
    bounds = np.ceil(np.log2(np.maximum(lengths, 1))).astype(int)
    counts = np.bincount(bounds)
    return [[2**i, int(count)] for i, count in enumerate(counts) if count]


def machine(cfg: DictConfig) -> dict[str, Any]:
    """Disk, GPUs, assets, positions that the model knows."""
    import torch

    cache = cache_dir(cfg)
    gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())] if torch.cuda.is_available() else []
    assets = Path(cfg.runtime.assets_dir)
    return {
        "free_here": shutil.disk_usage(Path.cwd()).free,
        "free_cache": shutil.disk_usage(_existing(cache)).free,
        "cache": str(cache),
        "gpus": gpus,
        "device": cfg.runtime.device,
        "assets": str(assets) if (assets / ".complete").is_file() else None,
        "positions": positions(cfg),
    }


def cache_dir(cfg: DictConfig) -> Path:
    """As `stages.places`, whose module takes seconds to import."""
    return Path(cfg.runtime.cache_dir).expanduser()


def positions(cfg: DictConfig) -> int | None:
    """The longest sequence that the model was made for, where that is known without loading it."""
    if "max_position_embeddings" in cfg.model.shape:
        return int(cfg.model.shape.max_position_embeddings)
    config = Path(cfg.model.path) / "config.json"
    if cfg.model.source != "local" or not config.is_file():
        return None
    found = json.loads(config.read_text(encoding="utf-8"))
    return int(found["max_position_embeddings"]) if "max_position_embeddings" in found else None


def _existing(folder: Path) -> Path:
    while not folder.exists():
        folder = folder.parent
    return folder


def errors(facts: dict[str, Any]) -> Iterator[str]:
    """What makes a selection impossible."""
    if "error" in facts["tokens"]:
        yield facts["tokens"]["error"]
    machine = facts["machine"]
    if machine["device"] == "cuda" and not machine["gpus"]:
        yield "--device cuda was asked for and no CUDA device was found; leave it out to run on the CPU"


def findings(cfg: DictConfig, pools: Pools, facts: dict[str, Any]) -> Iterator[str]:
    """What a person should look at, one sentence each."""
    report, tokens, machine = pools.report, facts["tokens"], facts["machine"]
    if report.rejected:
        yield f"{len(report.rejected):,} of {report.rows_read:,} rows cannot be used; see the reasons above"
    if report.duplicates:
        yield f"{report.duplicates:,} rows repeat an earlier one; they are kept, and each counts"
    for reason, places in report.noted.items():
        yield f"{len(places):,} rows are kept but look odd: {reason}"
    yield from (f"note: {note}" for note in report.notes)
    scope = "" if tokens["rows"] == tokens["of"] else f" in a sample of {tokens['rows']:,}"
    if tokens["answers_cut"]:
        yield f"{tokens['answers_cut']:,} answers{scope} are cut at {tokens['max_length']} tokens; raise --max-length"
    if tokens["no_target_count"]:
        source, line = tokens["no_target_rows"][0]
        yield (
            f"{tokens['no_target_count']:,} rows{scope} have no answer token within {tokens['max_length']} and cannot be used, "
            f"first {source} line {line}; raise --max-length"
        )
    if "EOS supervised = no" in tokens["tokenizer"]:
        yield "no answer ends in a supervised EOS token: the trained model would not learn to stop"
    if (
        machine["positions"] is not None
        and machine["positions"] < tokens["max_length"]
        and tokens["longest"] > machine["positions"]
    ):
        yield f"the model knows {machine['positions']} positions and max_length is {tokens['max_length']}; lower --max-length"
    if min(machine["free_here"], machine["free_cache"]) < LOW_DISK:
        yield f"less than {size(LOW_DISK)} of disk is free here or in {machine['cache']}"
    if cfg.model.source == "gguf" and machine["assets"] is None and not Path(cfg.model.path).is_absolute():
        yield f"the embedded assets are not complete in {cfg.runtime.assets_dir}; run `make assets`"


def _print(facts: dict[str, Any]) -> None:
    out = console()
    for line in facts["summary"]:
        out.print(in_flags(line), markup=False)
    out.print(facts_table("\ntokens", token_lines(facts["tokens"])))
    out.print(facts_table("\nmachine", machine_lines(facts["machine"])))
    for kind in ("errors", "findings"):
        for line in facts[kind]:
            out.print(f"{'✗' if kind == 'errors' else '!'} {line}", markup=False)
    if not facts["errors"] and not facts["findings"]:
        out.print("✓ nothing to look at")
    out.print(f"({duration(facts['seconds'])})", markup=False)


def token_lines(tokens: dict[str, Any]) -> Iterator[tuple[str, str]]:
    whole = tokens["rows"] == tokens["of"]
    yield (
        "rows tokenised",
        f"all {tokens['of']:,}" if whole else f"{tokens['rows']:,} of {tokens['of']:,}, a sample by content hash",
    )
    yield "length", f"median {tokens['median']:,}, 95 % within {tokens['p95']:,}, longest {tokens['longest']:,} tokens"
    most = max(count for _, count in tokens["histogram"])
    for bound, count in tokens["histogram"]:
        yield f"  up to {bound:,}", f"{'█' * max(1, round(30 * count / most))} {count:,}"
    yield "truncation", f"{tokens['over_max_length']:,} rows are longer than {tokens['max_length']:,} tokens"
    if "prompt_share" in tokens:
        yield (
            "prompt share",
            f"{tokens['prompt_share']:.0%} of all tokens are prompt, {tokens['target_tokens']:,} tokens carry loss",
        )
        yield "tokenizer", tokens["tokenizer"]


def machine_lines(machine: dict[str, Any]) -> Iterator[tuple[str, str]]:
    yield "disk", f"{size(machine['free_here'])} free here, {size(machine['free_cache'])} in {machine['cache']}"
    yield "GPUs", ", ".join(machine["gpus"]) or "none found"
    yield "assets", machine["assets"] or "not installed (make assets)"
