"""The sheet for table 17: which rows a person inspects, the page to label them on, and the labels read back.

    python -m experiments.labels draw ROWS.jsonl SHEET.csv     400 rows, as many of each cluster (seed 0)
    python -m experiments.labels page SHEET.csv PAGE.html      a page to label on; it saves a filled sheet
    python -m experiments.labels score SHEET.csv [OTHER.csv]   agreement with its interval, kappa; two people against each other

ROWS.jsonl has one row a line: id, cluster, prompt, response. A sheet has the columns id, cluster, prompt, response, category; commas
separate them or, as some spreadsheets save it, semicolons or tabs. The cluster is not shown on the page, so that it cannot lead the
person who labels.
"""

from __future__ import annotations

import csv
import html
import io
import json
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

from clusterft.atomic import write_atomic
from clusterft.seeding import generator
from clusterft.tabular import FIELD_CHARS
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
    rows: list[dict[str, object]] = []
    lines: dict[str, int] = {}
    for number, line in enumerate(_text(path).split("\n"), start=1):  # splitlines would cut at U+2028 inside a string
        if not line.strip():
            continue
        where = f"{path}, line {number}"
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as problem:
            raise ValueError(f"{where}: not JSON ({problem}); write one row a line") from problem
        _check_row(row, where)
        _check_new(str(row["id"]), number, lines, where)
        rows.append(row)
    if not rows:
        raise ValueError(f"{path} is empty; write one row a line: id, cluster, prompt, response")
    return rows


def _check_row(row: object, where: str) -> None:
    if not isinstance(row, dict):
        raise ValueError(f"{where}: {_shown(row)} is no row; write an object with id, cluster, prompt and response")
    missing = [key for key in COLUMNS[:-1] if key not in row]
    if missing:
        raise ValueError(f"{where}: {', '.join(missing)} is missing; a row has id, cluster, prompt and response")
    for key, kinds in (("id", (str, int)), ("prompt", (str,)), ("response", (str,))):
        if not isinstance(row[key], kinds) or isinstance(row[key], bool):
            raise ValueError(f"{where}: {key} is {_shown(row[key])}; write it as text")
        try:
            str(row[key]).encode()
        except UnicodeEncodeError as problem:
            half = f"\\u{ord(str(row[key])[problem.start]):04x}"
            raise ValueError(f"{where}: {key} holds {half}, half a character that no file can hold; replace it") from problem
    _check_cluster(row["cluster"], where)


def _check_cluster(cluster: object, where: str) -> None:
    try:
        int(str(cluster))
    except ValueError as problem:
        raise ValueError(f"{where}: cluster is {_shown(cluster)}; write the cluster's number, such as 0") from problem


def _check_new(name: str, number: int, lines: dict[str, int], where: str) -> None:
    first = lines.setdefault(name, number)
    if first != number:
        raise ValueError(f"{where}: id {name} stands in line {first} already; keep one of the two or rename it")


def _shown(value: object) -> str:
    text = json.dumps(value)
    return text if len(text) <= 40 else f"{text[:40]}..."


def _text(path: Path) -> str:
    """A file's text, without the mark that spreadsheets put first. Raises ValueError, also for a folder or other encodings."""
    if path.is_dir():
        raise ValueError(f"{path} is a folder; name a file")
    try:
        return path.read_bytes().decode("utf-8-sig")
    except OSError as problem:
        raise ValueError(f"{path} cannot be read ({problem.strerror}); check its name and permissions") from problem
    except UnicodeDecodeError as problem:
        line = problem.object[: problem.start].count(b"\n") + 1
        raise ValueError(f"{path}, line {line}: not UTF-8; save the file as UTF-8, in Excel as CSV UTF-8") from problem


def _write(path: Path, text: str) -> None:
    try:
        write_atomic(path, text)
    except OSError as problem:
        raise ValueError(f"{path} cannot be written ({problem.strerror}); name a file in a folder that exists") from problem


def write_sheet(sheet: Sheet, path: Path) -> None:
    """Writes a sheet that reads back as it is. Raises ValueError for a place that cannot be written."""
    stream = io.StringIO()
    # without QUOTE_ALL a lone \r stays bare and ends the row for whoever reads it
    writer = csv.DictWriter(stream, COLUMNS, lineterminator="\n", quoting=csv.QUOTE_ALL)
    writer.writeheader()
    writer.writerows(sheet)
    _write(path, stream.getvalue())


def read_sheet(path: Path, labelled: bool = True) -> Sheet:
    """A sheet. Raises ValueError with file and line for other columns, repeated ids, a cluster that is no number, a damaged row.

    When `labelled`, also for rows without a category.
    """
    sheet: Sheet = []
    lines: dict[str, int] = {}
    empty = []
    for number, cells in _csv_rows(path, _text(path)):
        where = f"{path}, line {number}"
        if len(cells) != len(COLUMNS):
            raise ValueError(f"{where}: {len(cells)} cells, expected {', '.join(COLUMNS)}; mend the row's separators and quotes")
        row = dict(zip(COLUMNS, cells, strict=True))
        row["category"] = row["category"].strip()
        _check_cluster(row["cluster"], where)
        _check_new(row["id"], number, lines, where)
        if not row["category"]:
            empty.append(number)
        sheet.append(row)
    if not sheet:
        raise ValueError(f"{path} has no rows; make it with draw")
    if labelled and empty:
        raise ValueError(
            f"{path}: {len(empty)} of {len(sheet)} rows have no category yet, the first is in line {empty[0]}; fill them in"
        )
    return sheet


def _csv_rows(path: Path, text: str) -> Iterator[tuple[int, list[str]]]:
    """(line, cells) of every row below the header but blank ones."""
    csv.field_size_limit(FIELD_CHARS)
    header = text.partition("\n")[0].replace('"', "").rstrip("\r")
    separator = next((one for one in ";\t" if one.join(COLUMNS) == header), ",")
    reader = csv.reader(io.StringIO(text, newline=""), delimiter=separator, strict=True)
    number = 1
    try:
        columns = next(reader, [])
        if tuple(columns) != COLUMNS:
            raise ValueError(
                f"{path}: columns are {', '.join(columns) or 'absent'}; expected {', '.join(COLUMNS)}, as draw makes them"
            )
        number = reader.line_num + 1
        for cells in reader:
            if any(cells):
                yield number, cells
            number = reader.line_num + 1
    except csv.Error as problem:
        raise ValueError(f"{path}, line {number}: the row cannot be read ({problem}); mend its quotes") from problem


def score(sheet: Sheet) -> Agreement:
    """Agreement of clusters with a person's categories."""
    return agreement([int(row["cluster"]) for row in sheet], [row["category"] for row in sheet])


def cohen_kappa(first: Sheet, second: Sheet) -> tuple[float | None, float]:
    """(kappa, share of equal labels) of two people on the same rows; kappa None if chance alone agrees. Raises ValueError."""
    a, b = ({row["id"]: row["category"] for row in sheet} for sheet in (first, second))
    if a.keys() != b.keys():
        apart = a.keys() ^ b.keys()
        raise ValueError(
            f"the sheets hold different rows: {len(apart)} ids are in only one of them, {min(apart)} first; label one draw"
        )
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
    data = json.dumps(sheet, ensure_ascii=True).replace("<", "\\u003c")  # "<!-- <script>" would hide the end of the script
    return _PAGE.format(n=len(sheet), articles=articles, data=data, header=",".join(COLUMNS))


def main(arguments: Sequence[str]) -> str:
    """Runs one of the commands and returns what to print. Raises ValueError for another command or files that do not serve."""
    if len(arguments) == 3 and arguments[0] == "draw":
        source, target = Path(arguments[1]), Path(arguments[2])
        sheet = draw(read_rows(source))
        if target.is_file():
            raise ValueError(f"{target} exists already and may hold labels; name another file or delete it")
        write_sheet(sheet, target)
        return f"{len(sheet)} rows to label in {target}"
    if len(arguments) == 3 and arguments[0] == "page":
        source, target = Path(arguments[1]), Path(arguments[2])
        text = page(read_sheet(source, labelled=False))
        if target.exists() and target.samefile(source):
            raise ValueError(f"{target} is the sheet itself; name another file for the page")
        _write(target, text)
        return f"open {target} in a browser"
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
    except (ValueError, OSError) as problem:
        sys.exit(f"error: {problem}")
