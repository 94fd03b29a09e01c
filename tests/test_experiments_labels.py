"""The labelling sheet of table 17: drawn, written, read back, scored."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from experiments.labels import cohen_kappa, draw, main, page, read_sheet, write_sheet

ROWS = [
    {"id": f"r{i}", "cluster": i % 4, "prompt": f'sort, "quickly"\n{i}', "response": "</script> x < y", "extra": 1}
    for i in range(40)
]


def test_a_sheet_is_stratified_and_the_same_on_every_call() -> None:
    sheet = draw(ROWS, 20)
    assert sorted(row["cluster"] for row in sheet) == sorted(["0", "1", "2", "3"] * 5)
    assert sheet == draw(ROWS, 20) and sheet != draw(ROWS, 20, seed=1)
    assert all(row["category"] == "" for row in sheet)


def test_from_rows_to_agreement(tmp_path: Path) -> None:
    rows, sheet_path, page_path = tmp_path / "rows.jsonl", tmp_path / "sheet.csv", tmp_path / "page.html"
    rows.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    assert main(["draw", str(rows), str(sheet_path)]) == f"40 rows to label in {sheet_path}"
    with pytest.raises(ValueError, match="40 of 40 rows have no category yet"):
        main(["score", str(sheet_path)])
    main(["page", str(sheet_path), str(page_path)])
    text = page_path.read_text()
    assert text.count("<article>") == 40 and "</script> x" not in text.replace("&lt;/script&gt; x", "")
    sheet = read_sheet(sheet_path, labelled=False)
    # every row of a cluster has one category but for two rows of cluster 0
    for row in sheet:
        row["category"] = "odd" if row["id"] in ("r0", "r4") else f"task {row['cluster']}"
    write_sheet(sheet, sheet_path)
    assert read_sheet(sheet_path) == sheet
    # chance: 10 * (8 + 10 + 10 + 10) / 1600 = .2375; kappa (.95 - .2375) / .7625 = .934
    assert main(["score", str(sheet_path)]) == "38 of 40 agree: 95.0 % [83.5, 98.6], kappa 0.934"
    assert main(["score", str(sheet_path), str(sheet_path)]).endswith("two people: 100.0 % equal, kappa 1.000")


def test_two_people_by_hand() -> None:
    """a a b b against a b b b: 3 of 4 equal, chance (2 * 1 + 2 * 3) / 16 = 1/2, kappa 1/2."""
    first = [{"id": str(i), "category": c} for i, c in enumerate("aabb")]
    second = [{"id": str(i), "category": c} for i, c in enumerate("abbb")]
    assert cohen_kappa(first, second) == (pytest.approx(0.5), 0.75)
    with pytest.raises(ValueError, match="1 ids are in only one"):
        cohen_kappa(first, second[:3])


def test_bad_input_is_named_with_its_line(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"id": "a", "cluster": 0, "prompt": "p", "response": "r"}\n{"id": "b"}\n')
    with pytest.raises(ValueError, match=r"rows.jsonl, line 2: cluster, prompt, response is missing"):
        main(["draw", str(path), str(tmp_path / "s.csv")])
    path.write_text("no json\n")
    with pytest.raises(ValueError, match="line 1: not JSON"):
        main(["draw", str(path), str(tmp_path / "s.csv")])
    path.write_text("")
    with pytest.raises(ValueError, match="is empty"):
        main(["draw", str(path), str(tmp_path / "s.csv")])
    (tmp_path / "s.csv").write_text("id,label\n")
    with pytest.raises(ValueError, match="columns are"):
        main(["score", str(tmp_path / "s.csv")])
    with pytest.raises(ValueError, match="use draw"):
        main(["nothing"])


def test_the_page_does_not_show_clusters() -> None:
    assert "cluster" not in page(draw(ROWS, 4)).split("<script>")[0]
