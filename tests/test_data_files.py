"""Loading of files: layouts, encodings, line ends, compression, damaged files, odd values."""

from __future__ import annotations

import csv
import gzip
import io
import json
import random
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard
from data_configs import files_config, write_jsonl

from clusterft.conversation import conversation_turns
from clusterft.data import load_pool
from clusterft.json_array import BLOCK_BYTES
from clusterft.sources import DataError
from clusterft.text_rules import is_empty, normalise_input

ROWS = [{"instruction": f"Question {i}?", "input": "", "output": f"Answer {i} ä 漢 🙂"} for i in range(5)]
JSONL = "".join(json.dumps(r, ensure_ascii=False) + "\n" for r in ROWS)


def load(path: Any, **changes: Any):
    return load_pool(files_config(path if isinstance(path, list) else str(path), **changes))


def write(path: Path, content: bytes) -> Path:
    path.write_bytes(content)
    return path


def reasons(pools) -> dict[int, str]:
    return {r.line: r.reason for r in pools.train.rejected}


@pytest.mark.parametrize(
    ("text", "empty"),
    [("", True), (" \t\n\u00a0\u2003", True), ("\u200b\ufeff\x00", True), ("0", False), ("\u200ba", False), (".", False)],
)
def test_empty_rule(text: str, empty: bool) -> None:
    assert is_empty(text) is empty


@pytest.mark.parametrize(
    ("text", "expected"),
    [("", ""), ("<noinput>", ""), (" <NoInput>\n", ""), ("NA", ""), ("DNA", "DNA"), ("na", "na"), ("NA ", "NA "), ("\u200b", "")],
)
def test_no_input_rule(text: str, expected: str) -> None:
    assert normalise_input(text) == expected


@pytest.mark.parametrize(
    "content",
    [
        JSONL.encode(),
        b"\xef\xbb\xbf" + JSONL.encode(),
        JSONL.replace("\n", "\r\n").encode(),
        JSONL.replace("\n", "\r").encode(),
        JSONL.rstrip("\n").encode(),
        JSONL.encode("utf-16"),
        JSONL.encode("utf-32"),
        gzip.compress(JSONL.encode()),
        gzip.compress(JSONL[:70].encode()) + gzip.compress(JSONL[70:].encode()),
        zstandard.compress(JSONL.encode()),
        zstandard.compress(JSONL[:70].encode()) + zstandard.compress(JSONL[70:].encode()),
        json.dumps(ROWS).encode(),
        json.dumps(ROWS, indent=2, ensure_ascii=False).encode(),
        b"\xef\xbb\xbf" + json.dumps(ROWS).encode(),
        json.dumps(ROWS).encode("utf-16"),
        gzip.compress(json.dumps(ROWS).encode()),
    ],
    ids=[
        "plain",
        "bom",
        "crlf",
        "cr",
        "no-end",
        "utf16",
        "utf32",
        "gz",
        "gz2",
        "zst",
        "zst2",
        "array",
        "array-indented",
        "array-bom",
        "array-utf16",
        "array-gz",
    ],
)
def test_same_rows_whatever_the_container(tmp_path: Path, content: bytes) -> None:
    pools = load(write(tmp_path / "data.bin", content))
    assert [(e.prompt, e.response) for e in pools.train.examples] == [(r["instruction"], r["output"]) for r in ROWS]
    assert pools.train.fingerprint == load(write(tmp_path / "plain.jsonl", JSONL.encode())).train.fingerprint


def test_csv_and_parquet_give_the_same_rows(tmp_path: Path) -> None:
    with (tmp_path / "data.csv").open("w", newline="", encoding="utf-8-sig") as stream:
        writer = csv.DictWriter(stream, ["instruction", "input", "output"])
        writer.writeheader()
        writer.writerows(ROWS)
    pq.write_table(pa.Table.from_pylist(ROWS), tmp_path / "data.parquet")
    plain = load(write(tmp_path / "plain.jsonl", JSONL.encode())).train
    assert load(tmp_path / "data.csv").train.ids == plain.ids
    assert load(tmp_path / "data.parquet").train.ids == plain.ids
    with pytest.raises(DataError, match=r"no source bytes"):
        pools = load(tmp_path / "data.csv")
        pools.report.source_line_bytes(pools.train.examples[0])


def test_csv_keeps_physical_lines_text_and_huge_cells(tmp_path: Path) -> None:
    big = "b" * 2_000_000
    content = f'instruction,output\n"two\nlines",007\nq2,2024-02-29T00:00:00\nq3\nq4,{big}\n"q5,cut'
    pools = load(write(tmp_path / "data.csv", content.encode()))
    assert [(e.line, e.response[:20]) for e in pools.train.examples] == [(2, "007"), (4, "2024-02-29T00:00:00"), (6, "b" * 20)]
    assert reasons(pools) == {5: "wrong_column_count", 7: "cut_last_line"}


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ({"instruction": "q", "output": "a"}, "alpaca"),
        ({"instruction": "q", "response": "a"}, "instruction_response"),
        ({"problem": "q", "solution": "a", "seed": "x = 1", "lang": "python"}, "problem_solution"),
        ({"conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]}, "sharegpt"),
        ({"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]}, "messages"),
    ],
)
def test_layouts_are_recognised_and_can_be_asked_for(tmp_path: Path, row: dict, expected: str) -> None:
    path = write_jsonl(tmp_path / "x.jsonl", [row])
    pools = load(path)
    assert pools.report.formats == {expected: 1} and pools.report.detected
    asked = load(path, file_format=expected)
    assert asked.train.ids == pools.train.ids and not asked.report.detected
    assert (asked.train.examples[0].prompt, asked.train.examples[0].response) == ("q", "a")


def test_fields_override_columns(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "x.jsonl", [{"question": "q", "answer": "a", "context": "c", "output": "wrong"}])
    pools = load(path, fields={"prompt": "question", "response": "answer", "input": "context"})
    example = pools.train.examples[0]
    assert (example.prompt, example.input, example.response) == ("q", "c", "a")
    with pytest.raises(DataError, match=r"missing_instruction.*no column 'instruction'.*question.*data.fields.prompt"):
        load(path)
    with pytest.raises(DataError, match=r"data.fields lacks response"):
        load(path, fields={"prompt": "question"})
    with pytest.raises(DataError, match=r"data.fields names answer"):
        load(path, fields={"answer": "answer"})
    with pytest.raises(DataError, match=r"file_format='alpacca' is unknown; known: auto, alpaca"):
        load(path, file_format="alpacca")


def test_instruction_prefix_goes_before_every_instruction(tmp_path: Path) -> None:
    rows = [{"problem": "p", "solution": "s"}, {"messages": [{"role": "system", "content": "S"}, *_chat("u", "a", "v", "b")]}]
    first, second = load(write_jsonl(tmp_path / "x.jsonl", rows), instruction_prefix="Solve:\n").train.examples
    assert first.prompt == "Solve:\np"
    assert [t.text for t in second.turns] == ["S", "Solve:\nu", "a", "v", "b"]


def _chat(*texts: str) -> list[dict[str, str]]:
    return [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(texts)]


def test_odd_values_are_refused_by_name_or_kept(tmp_path: Path) -> None:
    lines = [
        '{"instruction": "a", "instruction": "b", "output": "x"}',
        '{"instruction": "a", "instruction": "a", "output": "x", "k": 1, "k": 2}',
        '{"instruction": "half \\ud83d", "output": "x"}',
        '{"instruction": "whole \\ud83d\\ude00", "output": "x"}',
        '{"instruction": "a", "output": NaN}',
        '{"instruction": "a", "input": NaN, "output": "y", "score": Infinity}',
        '{"instruction": "a", "input": 12, "output": "y"}',
        '{"instruction": "a", "input": "DNA", "output": "y", "meta": {"deep": [null, {"x": null}]}}',
        '{"instruction": "a", "output": "line \u2028 separator \u0085 kept"}',
        '{"instruction": "broken", "output": ',
        '"just text"',
        "null",
        '{"instruction": "q", "output": "' + "z" * 2_000_000 + '"}',
        "[" * 100_000,
    ]
    path = write(tmp_path / "x.jsonl", "\n".join(lines).encode() + b'\n{"instruction": "bytes \xff", "output": "x"}\n')
    pools = load(path)
    assert reasons(pools) == {
        1: "duplicate_key",
        3: "lone_surrogate",
        5: "null_response",
        7: "non_string_input",
        10: "invalid_json",
        11: "not_an_object",
        12: "not_an_object",
        14: "invalid_json",
        15: "not_utf8",
    }
    kept = {e.line: e for e in pools.train.examples}
    assert kept[8].input == "DNA" and kept[6].input == ""
    assert kept[9].response == "line \u2028 separator \u0085 kept"
    assert len(kept[13].response) == 2_000_000
    assert pools.report.source_line_bytes(kept[9]) == lines[8].encode()


def test_last_line_that_is_cut(tmp_path: Path) -> None:
    pools = load(write(tmp_path / "x.jsonl", JSONL.encode()[:-20]))
    assert reasons(pools) == {5: "cut_last_line"} and len(pools.train) == 4
    array = load(write(tmp_path / "x.json", json.dumps(ROWS).encode()[:-20]))
    assert reasons(array) == {1: "cut_last_line"} and len(array.train) == 4


@pytest.mark.parametrize("compress", [gzip.compress, zstandard.compress])
@pytest.mark.parametrize("content", [JSONL, json.dumps(ROWS)])
def test_cut_archive_is_an_error_and_not_a_shorter_file(tmp_path: Path, compress, content: str) -> None:
    noise = "".join(random.Random(0).choices("abcdefgh", k=200_000))
    whole = compress((json.dumps({"instruction": "a", "output": noise}) + "\n" + content).encode())
    with pytest.raises(DataError, match=r"compressed file is cut off or damaged.*fetch it again"):
        load(write(tmp_path / "x.jsonl.gz", whole[:-200]))


def test_array_elements_keep_line_and_bytes_across_blocks(tmp_path: Path) -> None:
    rows = [
        {"instruction": f"q{i} ä", "output": "x" * n}
        for i, n in enumerate((10, BLOCK_BYTES, 3 * BLOCK_BYTES, 5, BLOCK_BYTES - 7))
    ]
    texts = [json.dumps(r, ensure_ascii=False) for r in rows]
    pools = load(write(tmp_path / "x.json", ("[\n" + ",\n\n".join(texts) + "\n]\n").encode()))
    assert [e.line for e in pools.train.examples] == [2, 4, 6, 8, 10]
    assert pools.report.source_lines(pools.train.examples) == [t.encode() for t in texts]


def test_array_broken_in_the_middle_names_the_line(tmp_path: Path) -> None:
    content = json.dumps(ROWS[:2])[:-1] + ',\n{"instruction": oops},\n' + json.dumps(ROWS[2:])[1:]
    with pytest.raises(DataError, match=r"x\.json: line 2: not valid JSON"):
        load(write(tmp_path / "x.json", content.encode()))


@pytest.mark.parametrize("compress", [lambda b: b, gzip.compress, zstandard.compress])
def test_source_lines_out_of_any_container(tmp_path: Path, compress) -> None:
    pools = load(write(tmp_path / "x", compress(b"\xef\xbb\xbf" + JSONL.replace("\n", " \r\n").encode())))
    found = pools.report.source_lines(pools.train.examples[::-2])
    assert found == [line.encode() + b" " for line in JSONL.splitlines()[::-2]]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("x.jsonl", b"", "the file is empty"),
        ("x.csv", b"", "the file is empty"),
        ("x.jsonl", b"\n \n", "no rows at all"),
        ("x.json", b"[]", "no rows at all"),
        ("x.jsonl", "ab\n".encode("utf-16-le"), "without a byte order mark.*iconv"),
        ("x.json", b'{\n "data": [1]\n}', "one JSON object over several lines"),
        ("x.csv", b"a,a\n1,2\n", "column name occurs twice"),
        ("x.csv", b"instruction,output\nq,\xff\n", "line 2: byte 3 of the line is not UTF-8.*iconv"),
        ("x.parquet", b"PAR1 nonsense", "Parquet file is damaged"),
    ],
)
def test_unusable_files_get_one_sentence(tmp_path: Path, name: str, content: bytes, message: str) -> None:
    with pytest.raises(DataError, match=message) as caught:
        load(write(tmp_path / name, content))
    assert "\n" not in str(caught.value) and name in str(caught.value)


def test_absent_paths(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"nowhere\.jsonl: cannot be opened \(No such file"):
        load(tmp_path / "nowhere.jsonl")
    with pytest.raises(DataError, match=r"the folder holds no data files"):
        load(tmp_path)
    with pytest.raises(DataError, match=r"data.path is not set"):
        load_pool(files_config(None))


def test_bad_first_line_does_not_make_a_list_of_it(tmp_path: Path) -> None:
    pools = load(write(tmp_path / "x.jsonl", b"[]\n" + JSONL.encode()))
    assert reasons(pools) == {1: "not_an_object"} and len(pools.train) == 5


def test_openai_messages_with_parts_weights_and_tools() -> None:
    parts = [{"type": "text", "text": "look"}, {"type": "text", "text": "here"}]
    chat = [{"role": "user", "content": parts}, {"role": "assistant", "content": "a", "weight": 0}, *_chat("b", "c")]
    turns = conversation_turns(chat)
    assert [(t.text, t.supervised) for t in turns] == [("look\nhere", False), ("a", False), ("b", False), ("c", True)]
    picture = [{"role": "user", "content": [{"type": "image_url"}]}, {"role": "assistant", "content": "a"}]
    assert conversation_turns(picture).reason == "non_text_content"
    assert conversation_turns([{"role": "user", "content": "q"}, {"role": "tool", "content": "r"}]).reason == "unknown_role:tool"
    assert conversation_turns([None]).reason == "malformed_turn"
    assert conversation_turns("not json").reason == "malformed_turns"
    assert conversation_turns({"a": 1}).reason == "malformed_turns"
    muted = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a", "weight": 0}]
    assert conversation_turns(muted).reason == "no_target_turn"


def test_small_fields_travel_and_large_ones_do_not(tmp_path: Path) -> None:
    row = {"instruction": "q", "output": "a", "topic": "x", "n": 3, "long": "y" * 201, "list": [1], "none": None}
    example = load(write_jsonl(tmp_path / "x.jsonl", [row])).train.examples[0]
    assert dict(example.meta) == {"topic": "x", "n": 3}


def test_meta_and_place_do_not_change_the_id(tmp_path: Path) -> None:
    a = load(write_jsonl(tmp_path / "a.jsonl", [{"instruction": "q", "output": "a", "k": 1}])).train
    b = load(
        write_jsonl(tmp_path / "b.jsonl", [{"instruction": "other", "output": "b"}, {"output": "a", "instruction": "q"}])
    ).train
    assert a.ids[0] == b.ids[1]


def _containers() -> dict[str, bytes]:
    table = io.BytesIO()
    pq.write_table(pa.Table.from_pylist(ROWS), table)
    sheet = io.StringIO(newline="")
    writer = csv.DictWriter(sheet, list(ROWS[0]))
    writer.writeheader()
    writer.writerows(ROWS)
    plain = JSONL.encode()
    return {
        "x.jsonl": plain,
        "x.json": json.dumps(ROWS, ensure_ascii=False).encode(),
        "x.csv": sheet.getvalue().encode(),
        "x.parquet": table.getvalue(),
        "x.jsonl.gz": gzip.compress(plain),
        "x.jsonl.zst": zstandard.ZstdCompressor(write_checksum=True).compress(plain),
        "y.jsonl": JSONL.encode("utf-16"),
    }


@pytest.mark.parametrize("name", _containers())
def test_damaged_files_are_counted_or_refused_and_never_crash(tmp_path: Path, name: str) -> None:
    """Random bytes overwritten, removed or doubled: either one sentence, or every row read is kept or set aside."""
    whole = _containers()[name]
    draw = random.Random(name)
    for _ in range(60):
        data = bytearray(whole)
        for _ in range(draw.randint(1, 3)):
            at = draw.randrange(len(data))
            change = draw.choice(("overwrite", "cut", "double", "drop"))
            if change == "overwrite":
                data[at] = draw.randrange(256)
            elif change == "cut" and at > 1:
                del data[at:]
            elif change == "double":
                data[at:at] = data[at : at + 40]
            elif len(data) > 60:
                del data[at : at + 5]
        try:
            report = load(write(tmp_path / name, bytes(data))).report
        except DataError as error:
            assert "\n" not in str(error)
            continue
        assert report.rows_read == report.rows_kept + len(report.rejected)
