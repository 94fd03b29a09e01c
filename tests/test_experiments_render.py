"""Names, headings and texts of any kind in every output of a table; what captions and legends say of it."""

from __future__ import annotations

import csv
import io
import json
import re
from dataclasses import replace
from pathlib import Path

import pytest

from experiments.pages import ROOT
from experiments.reading import read_table
from experiments.render import check_outputs, csv_text, json_text, latex, markdown, outputs, tex_escape, write_outputs
from experiments.table import Column, Difference, Line, Table, Value

HOSTILE = "a|b \\ & % $ # _ { } ~ ^ < > \" ` -- '' ± ≈ − α Σ² é 🙂 `x` *y* __init__ &amp; [z](u)"
SEEDS = {0: 1.0, 1: 2.0, 2: 4.0}


def table(row: str = "Full data", label: str = "score", **given: object) -> Table:
    """Two methods of three seeds, the second of them against the first."""
    values = [Value(3, SEEDS, best=True), Value(3, SEEDS, difference=Difference(0.5, (-1.0, 2.0), 3, "cannot tell"))]
    lines = tuple(Line(name, "", {"score": value}) for name, value in zip((row, f"{row} again"), values, strict=True))
    columns = (Column("score", label, "number", "higher"),)
    return replace(Table("t", "Title", "tiny", "", "Method", "", columns, lines, reference=row), **given)  # type: ignore[arg-type]


def words(text: str, **given: object) -> Table:
    columns = (Column("meaning", "meaning", "text"),)
    return replace(table(), columns=columns, lines=(Line("N", "", {"meaning": Value(0, text=text)}),), reference=None, **given)


def cells(line: str) -> list[str]:
    """Cells of a Markdown row as a reader sees them: what a backslash stands before is itself."""
    return [re.sub(r"\\(.)", r"\1", cell.strip()) for cell in re.split(r"(?<!\\)\|", line.strip("|"))]


def test_csv_keeps_values_in_words() -> None:
    (row,) = csv.DictReader(io.StringIO(csv_text(words("rows, of the pool"))))
    assert (row["key"], row["mean"], row["text"]) == ("meaning", "", "rows, of the pool")
    assert csv_text(words("x")).splitlines()[0].endswith(",run_ids,text")
    assert [row["text"] for row in csv.DictReader(io.StringIO(csv_text(table())))] == ["", ""]


@pytest.mark.parametrize("name", ["table1", "table9", "table17"])
def test_csv_has_every_word_of_the_json(name: str) -> None:
    made = read_table(ROOT / f"results/laptop/{name}.json")
    rows = list(csv.DictReader(io.StringIO(csv_text(made))))
    assert any(row["text"] for row in rows)
    assert [row["text"] for row in rows] == [entry["text"] or "" for entry in json.loads(json_text(made))["values"]]


def test_a_table_without_deviations_does_not_speak_of_them() -> None:
    one_seed = Line("Full data", "", {"score": Value(1, {0: 1.0})})
    for made in (words("rows of the pool"), table(lines=(one_seed,)), table(lines=())):
        assert "Mean" not in latex(made) and "Mean" not in markdown(made)
    assert r"Mean $\pm$ sample deviation over seeds." in latex(table())
    assert "Mean ± sample deviation over seeds; [..] is the 95 % Student interval. **Bold**: best" in markdown(table())


def test_the_legend_names_only_signs_that_the_table_has() -> None:
    plain = table(columns=(Column("score", "score", "number"),), lines=(Line("a", "", {"score": Value(3, SEEDS)}),))
    assert "\n\nMean ± sample deviation over seeds.\n" in markdown(plain)
    absent = table(lines=(Line("a", "", {"score": Value(3, state="missing")}),))
    assert "Student" not in markdown(absent) and "Bold" not in markdown(absent)


def test_not_final_counts_nothing() -> None:
    """An entry may stand for three runs or for a whole method."""
    made = table(problems=("LESS seeds 0, 1, 2: missing: never run", "IFD: selector ifd is not built yet"))
    assert "**Not final**: what is missing is named below." in markdown(made) and "- IFD: selector ifd" in markdown(made)
    assert "Not final: what is missing is named in t.md." in latex(made)
    assert "things" not in markdown(made) + latex(made)
    assert "Not final" not in markdown(table()) + latex(table())


def test_markdown_shows_names_and_headings_letter_by_letter() -> None:
    text = markdown(table(HOSTILE, f"{HOSTILE} score", row_title="a|b", title=HOSTILE))
    grids = [line for line in text.splitlines() if line.startswith("|") and not line.startswith("|---")]
    headings, first, _, other_headings, second = grids
    assert cells(headings)[0] == cells(other_headings)[0] == "a|b"
    assert cells(headings)[2] == cells(other_headings)[1] == f"{HOSTILE} score"
    assert cells(first)[0] == HOSTILE and cells(second)[0] == f"{HOSTILE} again"
    assert [len(cells(line)) for line in grids] == [3, 3, 3, 2, 2]
    for sign in (r"\<", r"\`x\`", r"\*y\*", r"\_\_init\_\_", r"\&amp;", r"[z\](u)", r"\$"):
        assert sign in first
    assert f"# t: {first.split(' | ')[0].removeprefix('| ')}" in text


def test_markdown_lists_stay_lists() -> None:
    made = table(problems=("seed=0: ValueError: <class 'str'>\nis *no* row",), notes=("a_b counts once",))
    assert r"- seed=0: ValueError: \<class 'str'> is \*no\* row" in markdown(made) and "- a_b counts once" in markdown(made)


def test_latex_of_a_name_with_every_special_letter() -> None:
    assert tex_escape(r'| \ & % $ # _ { } ~ ^ < > "') == (
        r"\textbar{} \textbackslash{} \& \% \$ \# \_ \{ \} \textasciitilde{} \textasciicircum{} $<$ $>$ \texttt{\char34}"
    )
    assert tex_escape("± ≈ − α Σ² κ µ ≤ × →") == (
        r"$\pm$ $\approx$ $-$ $\alpha$ $\Sigma$$^2$ $\kappa$ $\mu$ $\le$ $\times$ $\rightarrow$"
    )
    assert tex_escape("é ü ç ß e\u0301 – ’ …") == r"\'{e} \"{u} \c{c} \ss{} \'{e} -- ' \dots{}"
    assert tex_escape("--x ''y'' ,, `") == r"-{}-x '{}'y'{}' ,{}, \`{}"
    assert tex_escape("中 🙂 \x00\u200b") == "[U+4E2D] [U+1F642] [U+0000][U+200B]"
    assert tex_escape("two\n\nlines\r\u2028end") == "two lines end"
    text = latex(table(HOSTILE, HOSTILE, title=HOSTILE, row_title=HOSTILE, scale="tiny"))
    assert text.isascii() and not re.search(r'[|<"]', text.replace("$<$", ""))


def test_a_latex_row_is_no_option_of_the_line_before_it() -> None:
    text = latex(table("[11.7, 28.7]", row_title="*", reference=None))
    assert "\n{}[11.7, 28.7] & " in text and "\n{}* & " in text


def test_every_output_keeps_a_value_on_its_line(tmp_path: Path) -> None:
    made = table("a\rb\nc\u2028d")
    for kind in ("md", "csv", "tex"):
        assert len(outputs(made)[f"t.{kind}"].splitlines()) == len(outputs(table())[f"t.{kind}"].splitlines())
    assert [row["row"] for row in csv.DictReader(io.StringIO(csv_text(made), newline=""))] == ["a b c d", "a b c d again"]
    write_outputs(made, tmp_path)
    assert check_outputs(made, tmp_path) == []
