"""`clusterft select`: arguments to a `Request`, then `api.run_request` or the dry run, then one screen of summary."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from typing import Any

from clusterft.api import SelectResult, run_request
from clusterft.cli.console import console, duration, facts_table
from clusterft.composing import Request


def run(args: argparse.Namespace) -> int:
    request = request_of(args)
    if args.dry_run:
        from clusterft.cli.dry_run import dry_run

        dry_run(request, args.out, strict=args.strict, report=not args.no_report)
        return 0
    result = run_request(request, args.out, strict=args.strict, report=not args.no_report)
    out = console()
    out.print(facts_table(f"{result.header['budget']:,} of {result.header['pool_rows']:,} rows kept", summary(result)))
    out.print("next: clusterft train, or the files in that folder with a trainer of your own", style="dim")
    return 0


def request_of(args: argparse.Namespace) -> Request:
    """The request that a command line means."""
    return Request(
        data=tuple(args.data),
        model=args.model,
        selector=args.selector,
        keep=args.keep,
        rows=args.rows,
        ratio=args.ratio,
        clusters=args.clusters,
        seed=args.seed,
        template=args.template,
        max_length=args.max_length,
        holdout=args.holdout,
        device=args.device,
        progress=True,
        file_format=args.file_format,
        fields=tuple(args.field),
        settings=tuple(args.settings),
    )


def summary(result: SelectResult) -> Iterator[tuple[str, str]]:
    """One screen: what was read, what was kept, what it cost, where it lies."""
    header: Any = result.header
    load, info, seconds = header["data"]["load"], header["info"], header["seconds"]
    yield "read", f"{load['rows_read']:,} rows, {header['rejected']:,} set aside{reasons(load['rejected'])}"
    yield from (("note", note) for note in load["notes"])
    matched = f", {header['validation_rows']:,} more that only LESS looks at" if header["validation_rows"] else ""
    yield "held out", f"{header['heldout_rows']:,} rows for the loss after training{matched}"
    if not header["heldout_rows"]:
        yield "note", "without held-out rows `clusterft eval` has nothing to measure; --holdout N sets some apart"
    yield "kept", f"{header['budget']:,} rows, {header['share']:.1%} of the pool, by {header['method']}"
    if "cluster_sizes" in info:
        yield "clusters", ", ".join(f"{k} of {n}" for n, k in zip(info["cluster_sizes"], info["cluster_kept"], strict=True))
        used_up = sum(n == k for n, k in zip(info["cluster_sizes"], info["cluster_kept"], strict=True))
        if used_up:
            yield "note", f"{used_up} of {len(info['cluster_sizes'])} clusters are kept whole: equal shares were not possible"
    if header["subset"]["re_encoded"]:
        yield "note", f"{header['subset']['re_encoded']:,} rows come from formats without lines and were written as JSON"
    if header["unsupervised_answers"]:
        yield (
            "note",
            f"{header['unsupervised_answers']:,} answers carry no loss here, which messages.jsonl cannot say to other trainers",
        )
    yield "time", f"features {duration(seconds['feature_seconds'])}, choice {duration(seconds['choose_seconds'])}"
    yield "folder", str(result.folder)
    if (result.folder / "report.html").is_file():
        yield "report", str(result.folder / "report.html")


def reasons(rejected: dict[str, int]) -> str:
    """ " (3 empty_response, ...)", or nothing."""
    return f" ({', '.join(f'{count:,} {reason}' for reason, count in rejected.items())}; see rejected.jsonl)" if rejected else ""
