"""Pages about results: read back from the committed tables, complete, and never behind them."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from experiments.claims import CLAIMS
from experiments.pages import FINDINGS, ROOT, main, pages, write_pages
from experiments.reading import place_of, read_table, read_tables, scales
from experiments.render import markdown, outputs

TABLES = sorted(path for path in (ROOT / "results").glob("*/*.json") if path.parent.name != "smoke")


@pytest.mark.parametrize("path", TABLES, ids=lambda p: f"{p.parent.name}-{p.stem}")
def test_a_committed_table_read_back_renders_to_the_committed_texts(path: Path) -> None:
    made = outputs(read_table(path))
    for kind in ("md", "tex"):  # CSV and JSON hold twelve digits, deviations of numbers so rounded differ in the last
        assert made[f"{path.stem}.{kind}"] == path.with_suffix(f".{kind}").read_text(encoding="utf-8")


def test_committed_latex_needs_no_unicode_engine() -> None:
    assert [path.name for path in (ROOT / "results").glob("*/*.tex") if not path.read_text(encoding="utf-8").isascii()] == []


def test_committed_pages_are_what_the_committed_results_give(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--check"]) == 0, capsys.readouterr().out


def test_findings_name_every_claim_and_say_which_were_not_measured(tmp_path: Path) -> None:
    text = pages(ROOT)[FINDINGS]
    assert all(f"| {claim} |" in text for claim in CLAIMS)
    (tmp_path / "results/laptop").mkdir(parents=True)
    assert read_tables(tmp_path / "results/laptop") == {}
    assert scales(tmp_path / "results") == []
    assert "No results are committed." in pages(tmp_path)[FINDINGS]
    shutil.copy(ROOT / "results/laptop/table2.json", tmp_path / "results/laptop")
    text = pages(tmp_path)[FINDINGS]
    assert "| weights help | not measured |" in text and "Not measured at this scale." in text
    assert "| CluSTER uses less of the data than the ratio says | holds |" in text


def test_pages_of_a_scale_are_written_and_checked(tmp_path: Path) -> None:
    (tmp_path / "docs").mkdir()
    for scale in ("smoke", "laptop"):
        (tmp_path / "results" / scale).mkdir(parents=True)
        shutil.copy(ROOT / "results/laptop/table2.json", tmp_path / "results" / scale)
    assert [p.relative_to(tmp_path).as_posix() for p in write_pages(tmp_path, "smoke")] == ["results/smoke/README.md"]
    assert [p.relative_to(tmp_path).as_posix() for p in write_pages(tmp_path, "laptop")] == ["results/laptop/README.md", FINDINGS]
    assert "[table2](table2.md)" in (tmp_path / "results/laptop/README.md").read_text()
    assert "## Scale smoke" not in (tmp_path / FINDINGS).read_text()  # its numbers mean nothing


def test_a_file_that_is_no_table_is_named(tmp_path: Path) -> None:
    (tmp_path / "x.json").write_text("{}")
    with pytest.raises(ValueError, match=r"x\.json is no table"):
        read_table(tmp_path / "x.json")


def test_tables_stand_in_the_order_of_the_paper() -> None:
    assert sorted(["table10", "beyond", "figure4", "table2", "variance"], key=place_of) == [
        "table2",
        "table10",
        "figure4",
        "beyond",
        "variance",
    ]


def test_the_heading_says_what_the_numbers_are() -> None:
    text = markdown(read_table(ROOT / "results/laptop/table2.json"))
    assert "135 million parameters" in text.split("\n\n")[1] and "cannot show" in text.split("\n\n")[1]
