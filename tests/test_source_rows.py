"""Rows written back from their sources with all columns, one-line lists, other separators, folders with more than data in them."""

from __future__ import annotations

import csv
import datetime
import decimal
import gzip
import json
import math
import os
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from data_configs import files_config

from clusterft.api import select
from clusterft.composing import data_paths
from clusterft.data import expand_paths, load_pool
from clusterft.overrides import UserError
from clusterft.source_rows import json_line, source_lines
from clusterft.sources import DataError

ROWS = [{"id": f"u{i}", "instruction": f"q {i}", "response": f'a "{i}"\nä 蜂', "topic": "bees"} for i in range(9)]


def load(path: Any, **changes: Any):
    return load_pool(files_config(path if isinstance(path, list) else str(path), **changes))


def write(path: Path, content: bytes | str) -> Path:
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


def write_csv(path: Path, separator: str = ",", encoding: str = "utf-8") -> Path:
    with path.open("w", newline="", encoding=encoding) as stream:
        writer = csv.DictWriter(stream, list(ROWS[0]), delimiter=separator)
        writer.writeheader()
        writer.writerows(ROWS)
    return path


def written(pools, which=slice(None)) -> list[Any]:
    lines = [line for line, _ in source_lines(pools.train.examples[which], pools.report)]
    assert not any(b"\n" in line or b"\r" in line for line in lines)
    return [json.loads(line) for line in lines]


def _parquet(path: Path) -> Path:
    pq.write_table(pa.Table.from_pylist(ROWS), path)
    return path


SOURCES = {
    "csv": lambda p: write_csv(p / "x.csv"),
    "csv-utf16": lambda p: write_csv(p / "x.csv", encoding="utf-16"),
    "csv-gz": lambda p: write(p / "x.csv.gz", gzip.compress(write_csv(p / "y.csv").read_bytes())),
    "semicolons": lambda p: write_csv(p / "x.csv", ";"),
    "parquet": lambda p: _parquet(p / "x.parquet"),
    "jsonl-utf16": lambda p: write(p / "x.jsonl", "\n".join(map(json.dumps, ROWS)).encode("utf-16")),
    "list": lambda p: write(p / "x.json", json.dumps(ROWS)),
    "list-pretty": lambda p: write(p / "x.json", json.dumps(ROWS, indent=2).replace("\n", "\r\n")),
    "list-utf16": lambda p: write(p / "x.json", json.dumps(ROWS).encode("utf-16")),
    "list-gz": lambda p: write(p / "x.json.gz", gzip.compress(json.dumps(ROWS).encode())),
}


@pytest.mark.parametrize("name", SOURCES)
def test_rows_come_back_with_all_columns_under_their_own_names(tmp_path: Path, name: str) -> None:
    pools = load(SOURCES[name](tmp_path))
    assert written(pools) == ROWS
    assert list(written(pools)[0]) == list(ROWS[0])
    assert written(pools, slice(1, None, 3)) == ROWS[1::3]
    assert written(pools, slice(None, None, -2)) == ROWS[::-2]  # any order, at the price of more passes


def test_a_selection_of_several_sources_has_the_rows_of_each(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("CLUSTERFT_CACHE", str(tmp_path / "cache"))
    write_csv(tmp_path / "a.csv")
    others = [{"n": i, "instruction": f"p {i}", "output": "b"} for i in range(8)]
    write(tmp_path / "b.json", json.dumps(others))
    got = select([tmp_path / "a.csv", tmp_path / "b.json"], "tiny", selector="random", rows=12, holdout=3, out=tmp_path / "o")
    table = pq.read_table(got.folder / "selection.parquet").to_pylist()
    subset = [json.loads(x) for x in (got.folder / "subset.jsonl").read_bytes().splitlines()]
    kept = [r for r in table if r["kept"]]
    assert len(subset) == len(kept) == 12 and all(r in ROWS or r in others for r in subset)
    assert [r["id"].startswith("u") if "id" in r else False for r in subset] == [r["file"].endswith("a.csv") for r in kept]
    held = [json.loads(x) for x in (got.folder / "heldout.jsonl").read_bytes().splitlines()]
    seen = {json.dumps(r) for r in (*subset, *held)}
    assert held and len(seen) == 12 + len(held)  # no row stands for another
    own = sum("n" in r for r in subset)
    assert got.header["subset"] == {"rows": 12, "source_bytes": own, "re_encoded": 12 - own}


def test_rows_of_one_line_are_told_apart_around_bad_rows_and_copies(tmp_path: Path) -> None:
    rows = [{"n": 0, "instruction": "q"}, *({"n": n, "instruction": "q", "output": f"a{n // 3}"} for n in range(1, 7)), 5]
    for encoding in ("utf-8", "utf-16"):
        pools = load(write(tmp_path / "x.json", (json.dumps(rows[:4])[:-1] + ",\n" + json.dumps(rows[4:])[1:]).encode(encoding)))
        assert {e.line for e in pools.train.examples} == {1, 2}
        assert written(pools) == rows[1:7]
        assert written(pools, slice(4, 1, -1)) == rows[5:2:-1]


def test_values_that_json_lacks_are_text_lists_or_null(tmp_path: Path) -> None:
    row = {
        "instruction": "q",
        "output": "a",
        "vec": [1.0, math.nan, math.inf],
        "at": datetime.datetime(2024, 2, 29, 1, 2, 3),
        "day": datetime.date(2024, 2, 29),
        "span": datetime.timedelta(days=1, seconds=2),
        "price": decimal.Decimal("1.50"),
        "raw": b"\xff\x00",
        "deep": [{"when": datetime.date(2024, 1, 1), "n": None}],
        "big": 2**62,
    }
    pq.write_table(pa.Table.from_pylist([row]), tmp_path / "x.parquet")
    (got,) = written(load(tmp_path / "x.parquet"))
    assert got.pop("at").startswith("2024-02-29 01:02:03")
    assert got == {
        "instruction": "q",
        "output": "a",
        "vec": [1.0, None, None],
        "day": "2024-02-29",
        "span": "1 day, 0:00:02",
        "price": "1.50",
        "raw": "/wA=",
        "deep": [{"when": "2024-01-01", "n": None}],
        "big": 2**62,
    }
    assert json_line({"half": "\ud800"}) == b'{"half": "\\ud800"}'


def test_a_list_over_several_lines_keeps_its_numbers_and_escapes(tmp_path: Path) -> None:
    text = '[\n {"instruction": "q\\n\\u00e9",\n\t"x": 1.10,  "output": "a  b"\r\n },\n{"instruction": "r", "output": "b"}]'
    pools = load(write(tmp_path / "x.json", text))
    lines = list(source_lines(pools.train.examples, pools.report))
    assert lines[0] == (b'{"instruction": "q\\n\\u00e9", "x": 1.10,  "output": "a  b" }', False)
    assert lines[1] == (b'{"instruction": "r", "output": "b"}', True)


def test_a_source_that_changed_while_it_was_used_is_one_sentence(tmp_path: Path) -> None:
    lines = "\n".join(map(json.dumps, ROWS))
    for path, shorter in (
        (write_csv(tmp_path / "x.csv"), "instruction,output\n"),
        (write(tmp_path / "x.jsonl", lines), "\n"),
        (write(tmp_path / "y.jsonl", lines.encode("utf-16")), lines[:200].encode("utf-16")),
    ):
        pools = load(path)
        write(path, shorter)
        with pytest.raises(DataError, match=r"while it was used; run the command again"):
            list(source_lines(pools.train.examples, pools.report))


@pytest.mark.parametrize(("separator", "word"), [(";", "semicolon"), ("\t", "tab"), ("|", "vertical bar")])
def test_another_separator_is_recognised_and_said(tmp_path: Path, separator: str, word: str) -> None:
    usual = load(write_csv(tmp_path / "y.csv"))
    pools = load(write_csv(tmp_path / "x.csv", separator))
    assert pools.train.ids == usual.train.ids and not usual.report.notes
    (note,) = pools.report.notes
    assert f"columns are separated by a {word}" in note and note in "\n".join(pools.report.lines())
    bare = write(tmp_path / "z.csv", f'"my; question"{separator}the answer\nq,1{separator}a\n')
    got = load(bare, fields={"prompt": "my; question", "response": "the answer"}).train.examples
    assert [(e.prompt, e.response) for e in got] == [("q,1", "a")]


def test_commas_stay_where_they_make_sense(tmp_path: Path) -> None:
    for name, header in (("a.csv", "instruction,output,x;y|z"), ("b.csv", "what,answer;b"), ("c.tsv", "instruction,output")):
        path = write(tmp_path / name, f"{header}\nq,a{',k' if name == 'a.csv' else ''}\n")
        fields = {"prompt": "what", "response": "answer;b"} if name == "b.csv" else {}
        pools = load(path, fields=fields)
        assert [(e.prompt, e.response) for e in pools.train.examples] == [("q", "a")], name
        assert bool(pools.report.notes) == (name == "c.tsv")  # its name says tabs
    with pytest.raises(DataError, match=r"x\.csv: line 1: the header line cannot be read"):
        load(write(tmp_path / "x.csv", '"instruction"x,output\nq,a\n'))


def test_bytes_that_are_not_utf8_are_named_by_line_and_byte(tmp_path: Path) -> None:
    good = "instruction,output\n" + "q,a\n" * 5000
    with pytest.raises(DataError, match=r"x\.csv: line 5003: byte 4 of the line is not UTF-8; convert the file with iconv"):
        load(write(tmp_path / "x.csv", good.encode() + b'"q\nr",\xe9\n'))
    with pytest.raises(DataError, match=r"x\.csv: line 1: byte 2 of"):
        load(write(tmp_path / "x.csv", b"i\xe9,output\n"))
    with pytest.raises(DataError, match=r"x\.json: line 2: byte 18 of the line is not UTF-8"):
        load(write(tmp_path / "x.json", b'[{"instruction": "q", "output": "a"},\n{"instruction": "\xe9", "output": "a"}]'))


def mixed(folder: Path) -> Path:
    """A folder with data, a second link to it, metadata, packed files, a subfolder."""
    folder.mkdir()
    write(folder / "a.jsonl", '{"instruction": "q", "output": "a"}\n')
    write(folder / "b.CSV", "instruction,output\nr,b\n")
    (folder / "c.jsonl").symlink_to("a.jsonl")
    for name in ("dataset_info.json", "dataset_infos.json", "state.json"):
        write(folder / name, '{\n "a": 1\n}')
    for name in ("README.md", "d.arrow", "e.jsonl.xz", ".f.swp"):
        write(folder / name, "x")
    (folder / ".hidden").mkdir()
    (folder / "sub.json").mkdir()
    return folder


def test_what_a_folder_holds_beside_its_data_is_one_line_of_the_report(tmp_path: Path) -> None:
    folder = mixed(tmp_path / "m")
    pools = load(folder)
    assert [(e.prompt, Path(e.source).name) for e in pools.train.examples] == [("q", "a.jsonl"), ("r", "b.CSV")]
    (note,) = pools.report.notes
    assert note == f"{folder}: not read: 8 files and 2 folders (.f.swp, .hidden/, README.md, c.jsonl, d.arrow, ...)"
    assert f"  note: {note}" in pools.report.lines()
    paths = [str(p) for p in data_paths([folder])]  # a request names the files; the note reaches the report all the same
    assert [Path(p).name for p in paths] == ["a.jsonl", "b.CSV"] and load(paths).report.notes == (note,)
    expand_paths(paths)  # the same files named one by one: nothing was left out
    assert load(paths).report.notes == ()
    assert expand_paths(folder / "dataset_info.json") == [folder / "dataset_info.json"]


def test_a_folder_without_data_says_what_it_holds(tmp_path: Path) -> None:
    for name in ("dataset_info.json", "state.json", "data-00000-of-00001.arrow"):
        write(tmp_path / name, "{}")
    with pytest.raises(DataError, match=r"holds no data files .*; not read: 3 files \(data-00000-of-00001\.arrow, "):
        expand_paths(tmp_path)


def test_links_are_refused_where_a_person_named_them_twice_or_they_lead_nowhere(tmp_path: Path) -> None:
    folder = mixed(tmp_path / "m")
    with pytest.raises(UserError, match="is given twice"):
        data_paths([folder / "a.jsonl", folder / "c.jsonl"])
    with pytest.raises(UserError, match="is given twice"):
        data_paths([folder, folder / "a.jsonl"])
    os.symlink("self.jsonl", folder / "self.jsonl")
    for given in (folder, folder / "self.jsonl"):
        with pytest.raises(DataError, match=r"self\.jsonl: a symbolic link that leads back to itself"):
            data_paths([given])
