"""`report.md`: the facts of the page for a terminal, a pull request or a diff.

In: `ReportFacts`. Out: Markdown (GitHub's tables). Texts of rows stand in fenced blocks that they cannot close, names in code or with
every mark escaped.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from clusterft.report.charts import medians
from clusterft.report.facts import ClusterFacts, ReportFacts, Sample
from clusterft.report.html import count, number, percent, words
from clusterft.report.text import md_block, md_code, md_inline, visible


def markdown_report(facts: ReportFacts) -> str:
    """The whole document. The same facts give the same bytes."""
    dropped = facts.pool_rows - facts.kept_rows
    parts = [
        f"# What was selected from {md_inline(facts.pool_name)}",
        f"Method **{md_inline(facts.method)}** kept **{count(facts.kept_rows)}** of {count(facts.pool_rows)} rows ({percent(facts.share)}) and "
        f"{percent(facts.kept_tokens / facts.pool_tokens)} of the tokens; {count(dropped)} were dropped, {count(facts.set_aside)} set aside "
        f"while reading, {count(facts.truncated_rows)} cut at the maximum length."
        + (f" {count(facts.heldout_rows)} further rows are held out for the loss" if facts.heldout_rows else "")
        + (f", {count(facts.validation_rows)} for selectors that match rows" if facts.validation_rows else "")
        + ("." if facts.heldout_rows else ""),
        "## What to look out for",
        *(_findings(facts)),
        "## Kept and rejected",
        _reasons(facts),
        "## Clusters" if facts.clustered else "## Sizes",
        _clusters(facts),
        "## Lengths and losses",
        "\n".join(
            [f"- {medians(h)} ({h.unit})" for h in facts.histograms]
            + [f"- {facts.not_measured[k]}" for k in ("loss",) if k in facts.not_measured]
        ),
        "## Examples",
        *(text for one in facts.clusters[: facts.clusters_with_samples] for text in _examples(one, facts.value_name)),
        "## Near-duplicates removed",
        *_near(facts),
        "## Overlap with other selections",
        _table(
            ("selection", "rows", "shared", "Jaccard", "by chance"),
            ([md_inline(o.name), count(o.rows), count(o.shared), number(o.jaccard), number(o.expected)] for o in facts.overlaps),
        ),
        "## Time and memory",
        _table(("what", "measured"), facts.costs),
        "## Repeat it",
        md_block(facts.command),
        _table(("setting", "value"), ([md_inline(a), md_code(b)] for a, b in facts.settings)),
    ]
    return "\n\n".join(parts) + "\n"


def _findings(facts: ReportFacts) -> Iterator[str]:
    for one in facts.findings:
        yield f"- **{one.level.capitalize()}.** {one.fact} (Rule: {one.rule}.) {one.advice}"
    if not facts.findings:
        yield "No rule found anything."


def _reasons(facts: ReportFacts) -> str:
    if not facts.reasons:
        return "No row was set aside."
    rows = []
    for one in facts.reasons:
        places = ", ".join(md_code(str(p)) + (f" ({md_inline(p.detail)})" if p.detail else "") for p in one.places)
        rows.append([md_inline(words(one.reason)), one.stage, count(one.count), places])
    return _table(("reason", "when", "rows", "for example"), rows)


def _clusters(facts: ReportFacts) -> str:
    rows = [
        [
            c.name,
            count(c.before),
            count(c.kept),
            percent(c.share),
            "1" if c.weight is None else number(c.weight),
            ", ".join(md_inline(t) for t in c.terms) or "none stand out",
        ]
        for c in facts.clusters
    ]
    return _table(("cluster", "before", "kept", "share", "weight", "distinctive terms"), rows)


def _examples(one: ClusterFacts, value_name: str) -> Iterator[str]:
    yield f"### {one.name.capitalize()}"
    for kind, samples in (("Kept", one.kept_samples), ("Dropped", one.dropped_samples)):
        for row in samples:
            yield from _sample(kind, row, value_name)


def _sample(kind: str, row: Sample, value_name: str) -> Iterator[str]:
    value = "" if row.value is None else f", {value_name} {number(row.value)}"
    loss = "" if row.loss is None else f", loss {number(row.loss)}"
    yield f"**{kind}** {md_code(str(row.place))}: {count(row.tokens)} tokens, {count(row.answer_tokens)} in the answer{value}{loss}, id {row.id}"
    for part in row.parts:
        text = md_block(part.text + (f" … ({count(part.more)} more characters)" if part.more else ""))
        yield f"{md_inline(part.label)}\n\n{text}" if part.label else text


def _near(facts: ReportFacts) -> Iterator[str]:
    if facts.near is None:
        yield facts.not_measured["map"]
        return
    near = facts.near
    yield (
        f"{count(near.dropped_rows)} dropped rows are near-duplicates of a kept row: {count(near.pairs)} pairs of gradient proxies with a cosine of "
        f"at least {near.threshold}, counted among {count(near.compared)} of {count(near.of)} rows."
    )
    for pair in near.shown:
        yield f"- cosine {pair.cosine:.4f}: kept {md_code(str(pair.kept.place))}, dropped {md_code(str(pair.dropped.place))}"


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(visible(cell).replace("\n", " ") for cell in line) + " |" for line in lines)
