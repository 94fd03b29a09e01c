"""Files that try to lose rows, break a terminal or stop the reader: each row is kept or counted, each refusal is one sentence."""

from __future__ import annotations

import bz2
import datetime
import gzip
import io
import json
import lzma
import os
import random
import zipfile
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard
from data_configs import files_config, write_jsonl

from clusterft.composing import data_paths
from clusterft.conversation import conversation_turns
from clusterft.data import load_pool
from clusterft.overrides import UserError
from clusterft.sources import DataError
from clusterft.text_rules import printable

GOOD = {"instruction": "q", "output": "a"}


def load(path: Path, *, strict: bool = False, **changes: Any):
    return load_pool(files_config(str(path), **changes), strict=strict)


def write(path: Path, content: bytes) -> Path:
    path.write_bytes(content)
    return path


def reasons(pools) -> dict[int, str]:
    return {r.line: r.reason for r in pools.train.rejected}


BAD_LINES = {
    b'{"instruction": "a", "instruction": "b", "output": "x"}': "duplicate_key",
    b'{"instruction": "half \\ud83d", "output": "x"}': "lone_surrogate",
    b'{"instruction": "a", "output": NaN}': "null_response",
    b'{"instruction": null, "output": "x"}': "null_instruction",
    b'{"instruction": "a", "output": ["x"]}': "non_string_response",
    b'{"instruction": "a", "output": "\\u200b\\u00a0"}': "empty_response",
    b'{"instruction": "a"}': "missing_response",
    b'{"instruction": "a", "output": "x"} {"instruction": "b", "output": "y"}': "invalid_json",
    b'{"instruction": "a", "output": "x"},': "invalid_json",
    b"{'instruction': 'a', 'output': 'x'}": "invalid_json",
    b'{"instruction": "caf\xe9", "output": "x"}': "not_utf8",
    b'{"instruction": "a", "output": "tab\tin a string"}': "invalid_json",
    b"\x00" * 64: "invalid_json",
    b"[" * 5000: "invalid_json",
    b'{"instruction": "a", "output": "x", "n": ' + b"9" * 5000 + b"}": "invalid_json",
    b'[{"instruction": "a", "output": "x"}]': "not_an_object",
    b'"text"': "not_an_object",
    b'{"messages": [{"role": "user", "content": "q"}]}': "no_response",
    b'{"messages": []}': "no_turns",
    b'{"messages": null}': "no_turns",
    b'{"conversations": [{"from": "gpt", "value": "a"}]}': "starts_with_assistant",
}


@pytest.mark.parametrize("line", BAD_LINES, ids=lambda b: b[:40].decode("latin-1").encode("unicode_escape").decode())
def test_a_bad_row_is_counted_by_name_and_stops_strict_mode_with_its_line(tmp_path, line):
    good = json.dumps(GOOD).encode()
    path = write(tmp_path / "x.jsonl", b"\n".join([good, b"", line, good]) + b"\n")
    pools = load(path)
    assert reasons(pools) == {3: BAD_LINES[line]} and len(pools.train) == 2 and pools.report.rows_read == 3
    with pytest.raises(DataError, match=rf"x\.jsonl line 3: {BAD_LINES[line]}.*leave strict mode") as caught:
        load(path, strict=True)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("ending", ["\n", "\r\n", "\r"])
@pytest.mark.parametrize("separator", ["\u2028", "\u2029", "\u0085", "\x0b", "\x0c", "\x1c", "\x1e"])
def test_separators_inside_a_string_cut_no_row(tmp_path, separator, ending):
    text = f"one{separator}two"
    inside = json.dumps(text, ensure_ascii=ord(separator) < 32)
    lines = [f'{{"instruction": {inside}, "output": "{i}"}}' for i in range(3)]
    for encoding in ("utf-8", "utf-8-sig", "utf-16", "utf-32"):
        pools = load(write(tmp_path / "x.jsonl", ending.join(lines).encode(encoding)))
        assert [(e.prompt, e.response, e.line) for e in pools.train.examples] == [(text, str(i), i + 1) for i in range(3)]


def test_joined_files_with_a_mark_in_the_middle(tmp_path):
    part = b"\xef\xbb\xbf" + json.dumps(GOOD).encode() + b"\n"
    assert len(load(write(tmp_path / "x.jsonl", part * 3)).train) == 3


@pytest.mark.parametrize("compress", [lambda b: b, gzip.compress, zstandard.compress], ids=["plain", "gz", "zst"])
@pytest.mark.parametrize("kind", ["jsonl", "array"])
def test_a_cut_at_every_place_is_a_sentence_or_a_count(tmp_path, kind, compress):
    rows = [{"instruction": f"question {i} ä", "output": "".join(random.Random(i).choices("abcdef ", k=30))} for i in range(6)]
    text = (
        json.dumps(rows, ensure_ascii=False)
        if kind == "array"
        else "".join(json.dumps(r, ensure_ascii=False) + "\n" for r in rows)
    )
    whole = compress(text.encode())
    for cut in range(1, len(whole), 7):
        try:
            pools = load(write(tmp_path / "x.json", whole[:cut]))
        except DataError as error:
            assert "\n" not in str(error)
            continue
        assert compress(b"") == b"", "a cut archive must not look like a shorter file"
        kept = [e.response for e in pools.train.examples]
        assert kept == [r["output"] for r in rows[: len(kept)]]
        assert len(pools.train.rejected) == int(pools.report.rows_read > len(kept)) <= 1
        ends_whole = kind == "jsonl" and whole[:cut].rstrip().endswith(b"}")
        assert pools.train.rejected or ends_whole


def test_an_array_that_nests_too_deeply_is_one_sentence(tmp_path):
    text = '[{"instruction": "a", "output": "b"},\n{"instruction": "a", "output": ' + "[" * 100_000 + "]" * 100_000 + "}]"
    with pytest.raises(DataError, match=r"line 2: a row is nested too deeply"):
        load(write(tmp_path / "x.json", text.encode()))


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (bz2.compress(b"x" * 99), "packed with bzip2"),
        (lzma.compress(b"x" * 99), "packed with xz"),
        (b"PK\x03\x04" + b"\0" * 40, "zip archive or a spreadsheet"),
    ],
)
def test_other_archives_are_named(tmp_path, content, words):
    with pytest.raises(DataError, match=words):
        load(write(tmp_path / "x.jsonl", content))
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w") as archive:
        archive.writestr("a.jsonl", json.dumps(GOOD))
    with pytest.raises(DataError, match="unpack it"):
        load(write(tmp_path / "x.csv", packed.getvalue()))


def test_pipes_are_refused_before_they_are_read(tmp_path):
    os.mkfifo(tmp_path / "pipe.jsonl")
    with pytest.raises(DataError, match="can be read only once; write the rows to a file"):
        load(tmp_path / "pipe.jsonl")


def test_file_names_that_are_not_utf8_are_refused(tmp_path):
    name = os.path.join(os.fsencode(tmp_path), b"caf\xe9.jsonl")
    with open(name, "w") as stream:
        stream.write(json.dumps(GOOD))
    with pytest.raises(UserError, match="not UTF-8"):
        data_paths([Path(os.fsdecode(name))])


def test_layouts_joined_in_one_table_are_told_apart_by_what_is_not_null(tmp_path):
    rows = [
        {"conversations": None, "messages": [{"role": "user", "content": "q1"}, {"role": "assistant", "content": "a1"}]},
        {"conversations": [{"from": "human", "value": "q2"}, {"from": "gpt", "value": "a2"}], "messages": None},
        {"conversations": None, "messages": None, "instruction": "q3", "output": "a3"},
        {"conversations": None, "instruction": "q4", "output": None, "response": "a4"},
        {"conversations": None, "problem": "q5", "solution": "a5"},
    ]
    for path in (tmp_path / "x.parquet", tmp_path / "x.jsonl"):
        pq.write_table(pa.Table.from_pylist(rows, schema=_schema()), path) if path.suffix == ".parquet" else write_jsonl(
            path, rows
        )
        pools = load(path)
        assert [(e.prompt, e.response) for e in pools.train.examples] == [(f"q{i}", f"a{i}") for i in range(1, 6)], path
        assert pools.report.formats == {
            "messages": 1,
            "sharegpt": 1,
            "alpaca": 1,
            "instruction_response": 1,
            "problem_solution": 1,
        }
    both = [
        {"from": None, "value": None, "role": "user", "content": "q"},
        {"from": "gpt", "value": "a", "role": None, "content": None},
    ]
    assert [t.text for t in conversation_turns(both)] == ["q", "a"]


def _schema() -> pa.Schema:
    turns = [pa.list_(pa.struct({k: pa.string() for k in keys})) for keys in (("from", "value"), ("role", "content"))]
    texts = {name: pa.string() for name in ("instruction", "output", "response", "problem", "solution")}
    return pa.schema({"conversations": turns[0], "messages": turns[1], **texts})


def test_unused_columns_of_a_parquet_file_may_hold_anything(tmp_path):
    columns = {
        "instruction": pa.array(["q1", "q2"]),
        "output": pa.array(["a1", "a2"]),
        "nanoseconds": pa.array([1, 2**62 + 1], pa.timestamp("ns")),
        "far": pa.array([10**8, -(10**8)], pa.date32()),
        "bytes": pa.array([b"\xff", None]),
        "map": pa.array([[("k", 1)], None], pa.map_(pa.string(), pa.int64())),
        "deep": pa.array([[[None]], None], pa.list_(pa.list_(pa.struct({"x": pa.int8()})))),
        "decimal": pa.array([None, 1], pa.decimal128(38, 2)),
        "day": pa.array([datetime.date(2024, 2, 29), None]),
    }
    pq.write_table(pa.table(columns), tmp_path / "x.parquet")
    first, second = load(tmp_path / "x.parquet").train.examples
    assert (first.response, second.response) == ("a1", "a2") and first.meta["day"] == "2024-02-29"
    twice = pa.Table.from_arrays([pa.array(["q"]), pa.array(["a"]), pa.array(["b"])], names=["instruction", "output", "output"])
    pq.write_table(twice, tmp_path / "twice.parquet")
    with pytest.raises(DataError, match="a column name occurs twice"):
        load(tmp_path / "twice.parquet")


def test_a_quote_that_never_ends_says_how_many_lines_it_took(tmp_path):
    path = write(tmp_path / "x.csv", b'instruction,output\nq1,a1\nq2,"a2\nq3,a3\nq4,a4\n')
    (one,) = load(path).train.rejected
    assert (one.line, one.reason) == (3, "cut_last_line") and "3 line(s) to the end" in one.detail


def test_names_out_of_the_data_move_no_cursor_and_break_no_line(tmp_path, capsys):
    from clusterft.cli import main

    roles = ["\x1b[2Jgone", "two\nlines", "\ud800", "x" * 4000]
    rows = [{"messages": [{"role": r, "content": "q"}]} for r in roles] + [{"\x1b[31m": 1, "\ud800": 2, "output": "x"}, GOOD]
    path = write_jsonl(tmp_path / "x\x1b[0m.jsonl", rows)
    pools = load(path)
    said = "\n".join(pools.report.lines())
    assert len(pools.train.rejected) == 5 and "\x1b" not in said and max(map(len, said.splitlines())) < 400
    said.encode("utf-8")
    assert main(["doctor", str(path), "--model", "tiny"]) == 1
    assert "\x1b" not in capsys.readouterr().out
    with pytest.raises(SystemExit):
        main(["doctor", str(path), "--model", "tiny", "--strict"])
    error = capsys.readouterr().err
    assert "\x1b" not in error and error.count("\n") == 1
    assert printable("a\tb\x1b\ud800é漢") == "a?b??é漢"


def test_thousands_of_reasons_are_a_short_summary(tmp_path):
    rows = [{"messages": [{"role": f"role{i}", "content": "q"}]} for i in range(500)] + [GOOD]
    report = load(write_jsonl(tmp_path / "x.jsonl", rows)).report
    assert len(report.lines()) < 30 and any("480 more reasons" in line for line in report.lines())
    assert sum(report.rejected_by_reason.values()) == 500


def test_strict_stops_at_a_row_whose_answer_is_cut_off(tmp_path):
    from clusterft import stages
    from clusterft.composing import Request, compose_request

    rows = [
        GOOD,
        {"instruction": "long " * 400, "output": "never reached"},
        *[{"instruction": f"q{i}", "output": "a"} for i in range(4)],
    ]
    path = write_jsonl(tmp_path / "x.jsonl", rows)
    cfg = compose_request(
        Request((path,), "tiny", rows=1, holdout=0, max_length=512, settings=(f"runtime.cache_dir={tmp_path}",))
    )
    assert [r.line for r in stages.prepare(cfg).pool.rejected] == [2]
    with pytest.raises(DataError, match=r"x\.jsonl line 2: "):
        stages.prepare(cfg, strict=True)
