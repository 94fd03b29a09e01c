"""A `Table` as Markdown, CSV, LaTeX (booktabs), JSON and on the terminal. The same table gives the same bytes.

`outputs` makes all texts, `write_outputs` writes them to results/<scale>/, `check_outputs` says which file would change.
"""

from __future__ import annotations

import csv
import io
import json
import re
import unicodedata
from pathlib import Path
from typing import Any

from clusterft.atomic import write_atomic
from experiments.cells import difference_text, heading, reported_keys, text_rows, value_text
from experiments.table import Column, Line, Table, Value

DEVIATION, INTERVAL = "Mean ± sample deviation over seeds", "; [..] is the 95 % Student interval"
MARKS = (
    "**Bold**: best of its group; ≈: the paired difference to the best has 0 in its 95 % interval, or is the same for every seed."
)
EXTENSIONS = ("md", "csv", "tex", "json")


def outputs(table: Table) -> dict[str, str]:
    """File name -> text."""
    made = {"md": markdown(table), "csv": csv_text(table), "tex": latex(table), "json": json_text(table)}
    return {f"{table.id}.{extension}": made[extension] for extension in EXTENSIONS}


def write_outputs(table: Table, folder: Path) -> list[Path]:
    """Writes all texts below `folder` and returns the paths."""
    return write_texts(outputs(table), folder)


def check_outputs(table: Table, folder: Path) -> list[str]:
    """What would change: one sentence a file, [] when the committed results are what the records give."""
    return check_texts(outputs(table), folder)


def write_texts(texts: dict[str, str], folder: Path) -> list[Path]:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in texts.items():
        write_atomic(folder / name, text)
    return [folder / name for name in texts]


def check_texts(texts: dict[str, str], folder: Path) -> list[str]:
    """One sentence for each file that is absent or differs, naming the first line that does."""
    changed = []
    for name, text in texts.items():
        path = folder / name
        if not path.exists():
            changed.append(f"{path} does not exist")
            continue
        old, new = path.read_text(encoding="utf-8").splitlines(), text.splitlines()
        if old != new:
            at = next((i for i, (a, b) in enumerate(zip(old, new, strict=False)) if a != b), min(len(old), len(new)))
            changed.append(f"{path} would change from line {at + 1}")
    return changed


def markdown(table: Table) -> str:
    headings, rows = text_rows(table)
    note = f"{table.scale_note}." if table.scale_note and not table.scale_note.endswith(".") else table.scale_note
    parts = [f"# {table.id}: {_plain(table.title)}", f"Scale: **{table.scale}**. {note}".rstrip()]
    if not table.final:
        parts.append("**Not final**: what is missing is named below.")
    parts.append(_grid(headings, [[_mark_markdown(t, m) for t, m in row] for row in rows]))
    if legend := _legend(table):
        parts.append(legend)
    if differences := _differences_markdown(table):
        parts += [f"## Difference to {_plain(table.reference or '')}, paired by seed", differences]
    if table.reported is not None:
        parts += ["## The paper", _reported_markdown(table)]
    if table.expected:
        parts.append(f"Expected at paper scale: {table.expected}")
    for title, lines in (("Not in the table", table.problems), ("Notes", table.notes)):
        if lines:
            parts += [f"## {title}", "\n".join(f"- {_plain(line)}" for line in lines)]
    return "\n\n".join(parts) + "\n"


def _deviates(table: Table) -> bool:  # whether a cell shows a mean with its deviation
    return any(v.text is None and v.has_mean and v.sd is not None for _, _, v in table.cells())


def _legend(table: Table) -> str:
    """What the signs mean that the table has, "" if it has none."""
    parts = []
    if _deviates(table):
        inside = any(c.better and v.has_mean and v.interval for _, c, v in table.cells())
        parts.append(f"{DEVIATION}{INTERVAL if inside else ''}.")
    if any(v.best or v.within_noise for _, _, v in table.cells()):
        parts.append(MARKS)
    return " ".join(parts)


def _one_line(text: str) -> str:
    return " ".join(text.split())


def _plain(text: str) -> str:
    """Text as Markdown that shows it letter by letter, on one line; "_" means something only at the edge of a word."""
    return re.sub(r"[\\|*`<~$]|(?<![^\W_])_|_(?![^\W_])|&(?=#?\w)|\](?=\()", r"\\\g<0>", _one_line(text))


def _mark_markdown(text: str, mark: str) -> str:
    text = _plain(text)
    return {"best": f"**{text}**", "noise": f"{text} ≈"}.get(mark, text)


def _grid(headings: list[str], rows: list[list[str]]) -> str:
    lines = ["| " + " | ".join(_plain(h) for h in headings) + " |", "|" + "---|" * len(headings)]
    return "\n".join(lines + ["| " + " | ".join(row) + " |" for row in rows])


def _differences_markdown(table: Table) -> str:
    columns = [c for c in table.columns if c.better is not None]
    lines = [x for x in table.lines if any(x.values[c.key].difference is not None for c in columns)]
    if table.reference is None or not lines:
        return ""
    names = [table.row_title, *([table.column_title] if table.has_columns else [])]
    rows = []
    for line in lines:
        cells = [difference_text(line.values[c.key].difference, c.unit) for c in columns]
        rows.append([line.row, *([line.column or "–"] if table.has_columns else []), *cells])
    return _grid(names + [heading(c) for c in columns], [[_plain(text) for text in row] for row in rows])


def _reported_markdown(table: Table) -> str:
    assert table.reported is not None
    lines = [f"- Source: {table.reported.source}." + (f" Set-up: {table.reported.setup}." if table.reported.setup else "")]
    shown = reported_keys(table)
    for v in table.reported.apart:
        if v.key not in shown:
            lines.append(f"- Reported: {v.row}, {v.at}: {v.key} {v.value:g}.")
    lines += [f"- Claim: {claim}" for claim in table.reported.claims]
    if not table.reported.values and not table.reported.claims:
        lines.append("- Its values are not available.")
    return "\n".join(lines)


CSV_HEADER = [
    *("table", "scale", "row", "column", "key", "unit", "state", "mean", "sd", "n", "planned", "low", "high", "best"),
    *("within_noise", "difference", "difference_low", "difference_high", "verdict", "reported", "run_ids", "text"),
]


def csv_text(table: Table) -> str:
    """Long form: one line a value, full precision (12 significant digits), run ids by seed; `text` for values in words."""
    stream = io.StringIO()
    writer = csv.DictWriter(stream, CSV_HEADER, lineterminator="\n")
    writer.writeheader()
    for line, column, value in table.cells():
        entry = value_json(table, line, column, value)
        low, high = entry["interval"] or (None, None)
        difference = entry["difference"] or {}
        d_low, d_high = difference.get("interval") or (None, None)
        writer.writerow(
            {
                **{k: entry[k] for k in ("key", "unit", "state", "mean", "sd", "n", "planned", "reported")},
                **{k: _one_line(entry[k] or "") for k in ("row", "column", "text")},  # csv would leave a lone \r unquoted
                **{"table": table.id, "scale": table.scale, "low": low, "high": high},
                **{"best": int(value.best), "within_noise": int(value.within_noise)},
                **{"difference": difference.get("mean"), "difference_low": d_low, "difference_high": d_high},
                "verdict": difference.get("verdict"),
                "run_ids": " ".join(f"{seed}:{run}" for seed, run in sorted(value.run_ids.items())),
            }
        )
    return stream.getvalue()


def _round(value: float | None) -> float | None:
    return None if value is None else float(f"{value:.12g}")


def value_json(table: Table, line: Line, column: Column, value: Value) -> dict[str, Any]:
    """Everything about one value, JSON-able; floats to 12 significant digits."""
    interval = value.interval if value.has_mean else None
    d = value.difference
    return {
        "row": line.row,
        "column": line.column,
        "key": column.key,
        "unit": column.unit,
        **{name: getattr(value, name) for name in ("state", "n", "planned", "best", "within_noise", "text")},
        "mean": _round(value.mean) if value.has_mean else None,
        "sd": _round(value.sd) if value.has_mean else None,
        "interval": [_round(x) for x in interval] if interval else None,
        "by_seed": {str(s): _round(v) for s, v in sorted(value.by_seed.items())},
        "run_ids": {str(s): r for s, r in sorted(value.run_ids.items())},
        "problems": {str(s): p for s, p in sorted(value.problems.items())},
        "difference": d
        and {
            "mean": _round(d.mean),
            "interval": [_round(x) for x in d.interval] if d.interval else None,
            "n": d.n,
            "verdict": d.verdict,
        },
        "reported": table.reported.find(line.row, line.column, column.key) if table.reported else None,
    }


def json_text(table: Table) -> str:
    reported = table.reported
    data = {
        **{name: getattr(table, name) for name in ("id", "title", "scale", "scale_note", "row_title", "column_title")},
        **{name: getattr(table, name) for name in ("final", "reference", "expected")},
        "columns": [vars(c) for c in table.columns],
        "values": [value_json(table, *cell) for cell in table.cells()],
        "reported": reported
        and {
            "source": reported.source,
            "setup": reported.setup,
            "values": [vars(v) for v in reported.values],
            "claims": list(reported.claims),
        },
        "problems": list(table.problems),
        "notes": list(table.notes),
    }
    return json.dumps(data, indent=1, sort_keys=True, ensure_ascii=False, allow_nan=False) + "\n"


_WORDS = r"\ textbackslash | textbar ~ textasciitilde ^ textasciicircum … dots ß ss æ ae ø o ł l § S"
_MATH = (
    "± pm ≈ approx ≤ le ≥ ge ≠ ne × times · cdot ∈ in → rightarrow ← leftarrow ∞ infty √ surd ∑ sum α alpha β beta γ gamma "
    "δ delta ε varepsilon ζ zeta η eta θ theta ι iota κ kappa λ lambda µ mu μ mu ν nu ξ xi π pi ρ rho σ sigma τ tau υ upsilon "
    "φ varphi χ chi ψ psi ω omega Γ Gamma Δ Delta Θ Theta Λ Lambda Ξ Xi Π Pi Σ Sigma Φ Phi Ψ Psi Ω Omega"
)
_TEX = {letter: f"\\{letter}" for letter in "&%_#${}"}
_TEX |= {"<": "$<$", ">": "$>$", "−": "$-$", "²": "$^2$", "³": "$^3$", "°": r"$^\circ$", '"': r"\texttt{\char34}", "`": r"\`{}"}
_TEX |= {"–": "--", "—": "---", "‑": "-", "’": "'", "‘": "`", "“": "``", "”": "''"}
_TEX |= {sign: rf"\{name}{{}}" for sign, name in re.findall(r"(\S) (\w+)", _WORDS)}
_TEX |= {sign: rf"$\{name}$" for sign, name in re.findall(r"(\S) (\w+)", _MATH)}
_ACCENTS = dict(zip("\u0300\u0301\u0302\u0303\u0308\u030a\u030c\u0327", "`'^~\"rvc", strict=True))


def tex_escape(text: str) -> str:
    """Plain text as ASCII that pdflatex sets alike in every font encoding; a letter that it cannot set stands as code point."""
    text = unicodedata.normalize("NFC", _one_line(text))
    # two hyphens, apostrophes or commas would become one other sign
    return re.sub(r"([-',])(?=\1)|.", lambda match: f"{match[1]}{{}}" if match[1] else _tex_letter(match[0]), text)


def _tex_letter(letter: str) -> str:
    if letter in _TEX or " " <= letter <= "~":
        return _TEX.get(letter, letter)
    base, *marks = unicodedata.normalize("NFD", letter)
    if base.isascii() and len(marks) == 1 and marks[0] in _ACCENTS:
        return rf"\{_ACCENTS[marks[0]]}{{{base}}}"
    return f"[U+{ord(letter):04X}]"


def _tex_row(cells: list[str]) -> str:
    line = " & ".join(cells) + r" \\"
    return f"{{}}{line}" if line.startswith(("[", "*")) else line  # else an option of the \\ or the rule before it


def latex(table: Table) -> str:
    """A booktabs table of the same cells, without intervals."""
    headings, rows = text_rows(table, interval=False)
    marks = {"best": r"\textbf{%s}", "noise": r"%s $\approx$", "": "%s"}
    body = [_tex_row([marks[mark] % tex_escape(text) for text, mark in row]) for row in rows]
    caption = f"{table.title} (scale: {table.scale})." + (f" {DEVIATION}." if _deviates(table) else "")
    caption += "" if table.final else f" Not final: what is missing is named in {table.id}.md."
    lines = [
        "% Needs \\usepackage{booktabs}. Made from records; change the experiment, not this file.",
        r"\begin{table}",
        r"\centering",
        rf"\caption{{{tex_escape(caption)}}}",
        rf"\label{{tab:{table.id}-{table.scale}}}",
        rf"\begin{{tabular}}{{{'l' * (2 if table.has_columns else 1)}{'r' * (len(headings) - (2 if table.has_columns else 1))}}}",
        r"\toprule",
        _tex_row([tex_escape(h) for h in headings]),
        r"\midrule",
        *body,
        r"\bottomrule",
        r"\end{tabular}",
        r"\end{table}",
    ]
    return "\n".join(lines) + "\n"


def explain(table: Table, line_name: str, key: str) -> str:
    """Which runs are behind a value: seed, run id, value or why there is none. `key` may be a column's key or its label.

    Raises KeyError naming the known lines or columns.
    """
    line = table.line(line_name)
    matching = [c for c in table.columns if key in (c.key, c.label) or (key == "avg" and c.key == "average")]
    column = matching[0] if matching else table.column(key)
    value = line.values[column.key]
    lines = [f"{table.id}, {line.name}, {heading(column)}: {value_text(value, column)}"]
    for seed in sorted({*value.run_ids, *value.by_seed, *value.problems}):
        got = f"{value.by_seed[seed]:.6g}" if seed in value.by_seed else value.problems.get(seed, value.state)
        lines.append(f"  seed {seed}: run {value.run_ids.get(seed, 'none')}: {got}")
    return "\n".join(lines)
