"""The sheet for table 17: which rows a person inspects, the page to label them on, and the labels read back.

    python -m experiments.labels draw ROWS.jsonl SHEET.csv     400 rows, as many of each cluster (seed 0)
    python -m experiments.labels page SHEET.csv PAGE.html      a page to label on; it saves a filled sheet
    python -m experiments.labels score SHEET.csv [OTHER.csv]   agreement with its interval, kappa; two people against each other

ROWS.jsonl has one row a line: id, cluster, prompt, response. A sheet has the columns id, cluster, prompt, response, category; the
cluster is not shown on the page, so that it cannot lead the person who labels.
"""

from __future__ import annotations

import csv
import html
import io
import json
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from clusterft.atomic import write_atomic
from clusterft.seeding import generator
from experiments.agreement import SAMPLES, Agreement, agreement, stratified_sample

COLUMNS = ("id", "cluster", "prompt", "response", "category")
Sheet = list[dict[str, str]]


def draw(rows: Sequence[dict[str, object]], n: int = SAMPLES, seed: int = 0) -> Sheet:
    """`n` rows to label, stratified over clusters and then shuffled; all rows where there are fewer."""
    rng = generator(seed, "labels")
    chosen = stratified_sample([int(str(r["cluster"])) for r in rows], min(n, len(rows)), rng)
    order = [chosen[i] for i in rng.permutation(len(chosen))]
    return [{key: str(rows[i][key]) if key != "category" else "" for key in COLUMNS} for i in order]


def read_rows(path: Path) -> list[dict[str, object]]:
    """Rows of a JSON-lines file. Raises ValueError with file and line for one that is not a row."""
    rows = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        try:
            row = json.loads(line)
        except ValueError as problem:
            raise ValueError(f"{path}, line {number}: not JSON ({problem})") from problem
        missing = [key for key in COLUMNS[:-1] if key not in row]
        if missing:
            raise ValueError(f"{path}, line {number}: {', '.join(missing)} is missing")
        rows.append(row)
    if not rows:
        raise ValueError(f"{path} is empty; write one row a line: id, cluster, prompt, response")
    return rows


def write_sheet(sheet: Sheet, path: Path) -> None:
    stream = io.StringIO()
    writer = csv.DictWriter(stream, COLUMNS, lineterminator="\n")
    writer.writeheader()
    writer.writerows(sheet)
    write_atomic(path, stream.getvalue())


def read_sheet(path: Path, labelled: bool = True) -> Sheet:
    """A sheet. Raises ValueError for other columns, repeated ids or, when `labelled`, rows without a category."""
    with path.open(encoding="utf-8", newline="") as stream:
        reader = csv.DictReader(stream)
        if tuple(reader.fieldnames or ()) != COLUMNS:
            raise ValueError(f"{path}: columns are {reader.fieldnames}, expected {', '.join(COLUMNS)}")
        sheet = list(reader)
    twice = [one for one, count in Counter(row["id"] for row in sheet).items() if count > 1]
    if twice:
        raise ValueError(f"{path}: id {twice[0]} occurs more than once")
    empty = [row["id"] for row in sheet if not (row["category"] or "").strip()]
    if labelled and empty:
        raise ValueError(f"{path}: {len(empty)} of {len(sheet)} rows have no category yet, the first is {empty[0]}")
    return [{**row, "category": (row["category"] or "").strip()} for row in sheet]


def score(sheet: Sheet) -> Agreement:
    """Agreement of clusters with a person's categories."""
    return agreement([int(row["cluster"]) for row in sheet], [row["category"] for row in sheet])


def cohen_kappa(first: Sheet, second: Sheet) -> tuple[float | None, float]:
    """(kappa, share of equal labels) of two people on the same rows; kappa None if chance alone agrees. Raises ValueError."""
    a, b = ({row["id"]: row["category"] for row in sheet} for sheet in (first, second))
    if a.keys() != b.keys():
        raise ValueError(f"the sheets hold different rows: {len(a.keys() ^ b.keys())} ids are in only one of them")
    n = len(a)
    same = sum(a[i] == b[i] for i in a) / n
    counts_a, counts_b = Counter(a.values()), Counter(b.values())
    chance = sum(counts_a[c] * counts_b[c] for c in counts_a) / n**2
    return (None if chance == 1 else (same - chance) / (1 - chance)), same


_PAGE = """<!doctype html>
<html lang="en"><meta charset="utf-8"><title>Label {n} rows</title>
<style>body{{font:15px sans-serif;max-width:60em;margin:2em auto}}pre{{white-space:pre-wrap;background:#f4f4f4;padding:.6em}}
article{{border-top:1px solid #ccc;padding:.6em 0}}input{{width:20em}}</style>
<h1>Label {n} rows</h1>
<p>Write a task category for each row; use few, repeat them exactly. <button id="save">Save the sheet</button></p>
<datalist id="known"></datalist>
{articles}
<script>
const rows = {data};
const inputs = [...document.querySelectorAll("input")];
const known = document.getElementById("known");
inputs.forEach(input => input.addEventListener("change", () => {{
  known.replaceChildren(...[...new Set(inputs.map(i => i.value.trim()).filter(Boolean))].sort().map(v => new Option(v)));
}}));
const quote = text => '"' + text.replaceAll('"', '""') + '"';
document.getElementById("save").addEventListener("click", () => {{
  const cells = (row, i) => [row.id, row.cluster, row.prompt, row.response, inputs[i].value.trim()];
  const lines = rows.map((row, i) => cells(row, i).map(quote).join(","));
  const blob = new Blob(["{header}\\n" + lines.join("\\n") + "\\n"], {{type: "text/csv"}});
  Object.assign(document.createElement("a"), {{href: URL.createObjectURL(blob), download: "sheet.csv"}}).click();
}});
</script></html>
"""


def page(sheet: Sheet) -> str:
    """A page that works from disk, without a server: prompts, answers, a field for each, and a button that saves the sheet."""
    articles = "\n".join(
        f"<article><pre>{html.escape(row['prompt'])}</pre><pre>{html.escape(row['response'])}</pre>"
        f'<label>Category <input list="known" value="{html.escape(row["category"], quote=True)}"></label></article>'
        for row in sheet
    )
    data = json.dumps(sheet, ensure_ascii=True).replace("</", "<\\/")
    return _PAGE.format(n=len(sheet), articles=articles, data=data, header=",".join(COLUMNS))


def main(arguments: Sequence[str]) -> str:
    """Runs one of the commands and returns what to print. Raises ValueError for another command."""
    if len(arguments) == 3 and arguments[0] == "draw":
        sheet = draw(read_rows(Path(arguments[1])))
        write_sheet(sheet, Path(arguments[2]))
        return f"{len(sheet)} rows to label in {arguments[2]}"
    if len(arguments) == 3 and arguments[0] == "page":
        write_atomic(Path(arguments[2]), page(read_sheet(Path(arguments[1]), labelled=False)))
        return f"open {arguments[2]} in a browser"
    if arguments and arguments[0] == "score" and len(arguments) in (2, 3):
        sheets = [read_sheet(Path(a)) for a in arguments[1:]]
        result = score(sheets[0])
        low, high = result.interval
        kappa = "undefined" if result.kappa is None else f"{result.kappa:.3f}"
        text = (
            f"{result.agree} of {result.n} agree: {100 * result.share:.1f} % [{100 * low:.1f}, {100 * high:.1f}], kappa {kappa}"
        )
        if len(sheets) == 2:
            between, same = cohen_kappa(*sheets)
            text += f"\ntwo people: {100 * same:.1f} % equal, kappa {'undefined' if between is None else f'{between:.3f}'}"
        return text
    raise ValueError("use draw ROWS.jsonl SHEET.csv, page SHEET.csv PAGE.html or score SHEET.csv [OTHER.csv]")


if __name__ == "__main__":
    try:
        print(main(sys.argv[1:]))
    except (ValueError, FileNotFoundError) as problem:
        sys.exit(f"error: {problem}")
