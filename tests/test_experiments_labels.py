"""The labelling sheet of table 17: drawn, written, read back, scored."""

from __future__ import annotations

import json
import re
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


GOOD = {"id": "a", "cluster": 0, "prompt": "p", "response": "r"}
HEADER = "id,cluster,prompt,response,category\n"


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("5", "line 2: 5 is no row; write an object with id"),
        ("null", "line 2: null is no row"),
        ("[1, 2]", r"line 2: \[1, 2\] is no row"),
        ("[" * 100_000, "line 2: not JSON"),
        (json.dumps({**GOOD, "id": "b", "cluster": "x"}), 'line 2: cluster is "x"; write the cluster\'s number'),
        (json.dumps({**GOOD, "id": "b", "cluster": ""}), 'line 2: cluster is ""'),
        (json.dumps({**GOOD, "id": "b", "cluster": None}), "line 2: cluster is null"),
        (json.dumps({**GOOD, "id": "b", "cluster": 1.5}), "line 2: cluster is 1.5"),
        (json.dumps({**GOOD, "id": None}), "line 2: id is null; write it as text"),
        (json.dumps({**GOOD, "id": "b", "prompt": None}), "line 2: prompt is null; write it as text"),
        (json.dumps({**GOOD, "id": "b", "response": ["r"]}), r'line 2: response is \["r"\]; write it as text'),
        (json.dumps({**GOOD, "id": "b", "prompt": "\ud800"}), r"line 2: prompt holds \\ud800, half a character"),
        (json.dumps(GOOD), "line 2: id a stands in line 1 already; keep one"),
        (json.dumps({**GOOD, "id": "b", "prompt": "\xe9"}, ensure_ascii=False), "line 2: not UTF-8; save the file as UTF-8"),
    ],
)
def test_a_row_that_is_none_is_named_with_file_line_and_remedy(line: str, words: str, tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps(GOOD) + "\n" + line + "\n", encoding="latin-1")
    with pytest.raises(ValueError, match=f"rows.jsonl, {words}"):
        main(["draw", str(path), str(tmp_path / "s.csv")])
    assert not (tmp_path / "s.csv").exists()


@pytest.mark.parametrize(
    "odd",
    ["\r", "\r\n", "a\u2028b\x85c\u2029", "\x00", '"', "=1+1;\t,", "\n\n", "\ufeff", "x" * 200_000],
    ids=lambda odd: ascii(odd)[:20],
)
def test_rows_with_odd_letters_are_drawn_and_read_back(odd: str, tmp_path: Path) -> None:
    rows, sheet = tmp_path / "rows.jsonl", tmp_path / "s.csv"
    lines = [json.dumps({**GOOD, "id": str(i), "prompt": f"{odd}{i}", "response": odd}, ensure_ascii=False) for i in range(3)]
    rows.write_bytes(("\ufeff" + "\r\n\r\n".join(lines)).encode())
    main(["draw", str(rows), str(sheet)])
    read = read_sheet(sheet, labelled=False)
    assert sorted((row["id"], row["prompt"], row["response"]) for row in read) == [(str(i), f"{odd}{i}", odd) for i in range(3)]


@pytest.mark.parametrize("change", ["bom", "crlf", "semicolons", "tabs", "blank rows", "bare cells"])
def test_a_sheet_that_a_spreadsheet_saved_is_read(change: str, tmp_path: Path) -> None:
    path = tmp_path / "s.csv"
    write_sheet([{**row, "category": f"task {row['cluster']}"} for row in draw(ROWS, 8)], path)
    before, text = read_sheet(path), path.read_text()
    separator = {"semicolons": ";", "tabs": "\t"}.get(change, ",")
    text = text.replace('","', f'"{separator}"')
    if change == "crlf":
        text = text.replace('"\n"', '"\r\n"').removesuffix("\n") + "\r\n"
    if change == "bare cells":
        text = re.sub(r'(?<=[\n,])"(\w+)"(?=[\n,])', r"\1", text)
    if change == "blank rows":
        text = text.replace('"\n"', '"\n\n,,,,\n"')
    path.write_bytes(text.encode("utf-8-sig" if change in ("bom", "semicolons") else "utf-8"))
    assert read_sheet(path) == before
    assert "8 of 8 agree" in main(["score", str(path)])


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", r": columns are absent; expected id, cluster"),
        (HEADER, " has no rows; make it with draw"),
        ("id;label\n1;2\n", ": columns are id;label; expected id, cluster, prompt, response, category"),
        (HEADER + 'a,0,"p\nq",r,t\nb,x,p,r,t\n', ', line 4: cluster is "x"; write'),
        (HEADER + "a,,p,r,t\n", ', line 2: cluster is ""; write'),
        (HEADER + "a,0,p,r,t\na,1,p,r,t\n", ", line 3: id a stands in line 2 already; keep one"),
        (HEADER + "a,0,p,r\n", ", line 2: 4 cells, expected id, .*; mend"),
        (HEADER + "a,0,p,r,t,u\n", ", line 2: 6 cells"),
        (HEADER + 'a,0,p,r,t\nb,0,"p,r,t\n', ", line 3: the row cannot be read .*; mend its quotes"),
        (HEADER + "a,0,p,r,t\nb,0,p,r, \n", ": 1 of 2 rows have no category yet, the first is in line 3; fill"),
        (HEADER + "a,0,p,r,caf\xe9\n", ", line 2: not UTF-8; save the file as UTF-8, in Excel as CSV UTF-8"),
    ],
)
def test_a_sheet_that_cannot_be_scored_is_named_with_file_line_and_remedy(text: str, words: str, tmp_path: Path) -> None:
    path = tmp_path / "s.csv"
    path.write_bytes(text.encode("latin-1"))
    with pytest.raises(ValueError, match=f"s.csv{words}"):
        main(["score", str(path)])


def test_files_that_do_not_serve_are_named(tmp_path: Path) -> None:
    rows, sheet = tmp_path / "rows.jsonl", tmp_path / "s.csv"
    rows.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    for arguments in (["draw", str(tmp_path), str(sheet)], ["page", str(tmp_path), "p"], ["score", str(tmp_path)]):
        with pytest.raises(ValueError, match="is a folder; name a file"):
            main(arguments)
    with pytest.raises(ValueError, match=r"gone.csv cannot be read \(No such file or directory\); check its name"):
        main(["score", str(tmp_path / "gone.csv")])
    for target in (tmp_path, tmp_path / "gone/s.csv"):
        with pytest.raises(ValueError, match=r"cannot be written .*; name a file in a folder that exists"):
            main(["draw", str(rows), str(target)])
    main(["draw", str(rows), str(sheet)])
    with pytest.raises(ValueError, match="may hold labels; name another file or delete it"):
        main(["draw", str(rows), str(sheet)])
    with pytest.raises(ValueError, match="is the sheet itself; name another file for the page"):
        main(["page", str(sheet), str(sheet)])
    assert len(read_sheet(sheet, labelled=False)) == 40


def test_no_prompt_ends_or_hides_the_script_of_the_page() -> None:
    prompt = "<!-- <script> </script> a < b \u2028\u2029"
    script = page([{**{k: str(v) for k, v in GOOD.items()}, "prompt": prompt, "category": ""}]).split("<script>")[1]
    data = script.split("const rows = ")[1].split(";\n")[0]
    assert "<" not in data and data.isascii() and json.loads(data)[0]["prompt"] == prompt


def test_the_page_does_not_show_clusters() -> None:
    assert "cluster" not in page(draw(ROWS, 4)).split("<script>")[0]
