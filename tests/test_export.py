"""The output folder: source bytes, tables, the `datasets` folder, entries for other trainers, hostile texts."""

from __future__ import annotations

import gzip
import hashlib
import json
import os
import runpy
import shutil
import sys
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
import yaml

from clusterft import api
from clusterft.api import check_share, open_folder, reachable_share, select
from clusterft.composing import Request, compose_request, default_holdout, model_choice, plain_name
from clusterft.exact import floor_product
from clusterft.export_recipes import markdown
from clusterft.overrides import UserError
from clusterft.store import StoreError

HOSTILE = [
    "../../escape",
    "</template><script>alert(1)</script>",
    "`|\n# not a heading",
    "${oc.env:HOME}",
    "\x1b[31mred",
    "{rows}",
]
QUICK = {"model": "tiny", "clusters": 2, "settings": ["trainer.precision=float32", "clustering.n_init=2"]}


def lines_of_data() -> list[bytes]:
    """Forty rows in every hand-writing that JSON allows: spacing, escapes, key order, hostile texts."""
    rows = []
    for i in range(40):
        text = HOSTILE[i % len(HOSTILE)]
        row = {"instruction": f"say {i} {text}", "output": f"{text} " + "word " * (1 + i % 7), "id": text}
        separators = (", ", ": ") if i % 3 else (" ,", " :  ")
        rows.append(json.dumps(row, ensure_ascii=bool(i % 2), separators=separators, sort_keys=bool(i % 5)).encode())
    return rows


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """A cache of this module's own."""
    with pytest.MonkeyPatch.context() as patch:
        cache = tmp_path_factory.mktemp("cache")
        patch.setenv("CLUSTERFT_CACHE", str(cache))
        yield cache


@pytest.fixture(scope="module")
def source(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("data") / "a `strange` |name|.jsonl"
    path.write_bytes(b"\r\n".join(lines_of_data()) + b'\r\n{"instruction": "no answer", "output": ""}\r\n')
    return path


@pytest.fixture(scope="module")
def chosen(home, source, tmp_path_factory):
    return select(source, out=tmp_path_factory.mktemp("out") / "sel", rows=15, **QUICK)


def test_the_subset_is_the_sources_own_bytes_in_source_order(chosen, source):
    table = pq.read_table(chosen.folder / "selection.parquet").to_pylist()
    kept = [r["line"] for r in table if r["kept"]]
    data = source.read_bytes().split(b"\r\n")
    assert kept == sorted(kept) and len(kept) == 15
    assert (chosen.folder / "subset.jsonl").read_bytes() == b"".join(data[n - 1] + b"\n" for n in kept)
    assert chosen.header["subset"] == {"rows": 15, "source_bytes": 15, "re_encoded": 0}


def test_the_pool_table_covers_the_pool_and_agrees_with_the_selection(chosen):
    table = pq.read_table(chosen.folder / "selection.parquet").to_pylist()
    lines = [json.loads(x) for x in (chosen.folder / "selection.jsonl").read_text("utf-8").splitlines()]
    assert table == lines
    assert len(table) == chosen.header["pool_rows"] == 36  # 40 rows, a tenth of the 41 lines held out
    sizes = np.bincount([r["cluster"] for r in table])
    assert sizes.tolist() == chosen.selection.info["cluster_sizes"]
    by_id = dict(zip(chosen.selection.ids, chosen.selection.weights.tolist(), strict=True))
    assert {r["id"]: r["weight"] for r in table if r["kept"]} == by_id
    assert all(r["weight"] is None and r["distance"] > 0 for r in table if not r["kept"])


def test_rows_that_were_set_aside_are_listed_with_their_line(chosen, source):
    (one,) = [json.loads(x) for x in (chosen.folder / "rejected.jsonl").read_text().splitlines()]
    assert (one["file"], one["line"], chosen.header["rejected"]) == (str(source), 41, 1)


def test_the_datasets_folder_loads_with_clusters_and_weights(chosen):
    data = chosen.dataset()
    assert data.num_rows == 15 and {"cluster", "weight", "messages", "prompt", "response"} <= set(data.column_names)
    assert np.mean(data["weight"]) == pytest.approx(1.0, abs=1e-12)
    assert data["messages"][0][0] == {"role": "user", "content": data["prompt"][0]}
    assert dict(zip(data["id"], data["cluster"], strict=True)) == dict(
        zip(chosen.selection.ids, chosen.selection.clusters.tolist(), strict=True)
    )


def test_entries_of_other_trainers_name_files_that_load(chosen):
    import datasets

    (entry,) = json.loads((chosen.folder / "llama_factory" / "dataset_info.json").read_text()).values()
    file = chosen.folder / "llama_factory" / entry["file_name"]
    rows = datasets.load_dataset("json", data_files=str(file), split="train", cache_dir=str(chosen.folder.parent / "hf"))
    assert rows.num_rows == 15 and rows.column_names == [entry["columns"]["messages"]]
    assert {m["role"] for r in rows for m in r["messages"]} == {entry["tags"]["user_tag"], entry["tags"]["assistant_tag"]}
    ours = yaml.safe_load((chosen.folder / "axolotl.yaml").read_text())["datasets"][0]
    assert ours["ds_type"] == "json" and (chosen.folder / ours["path"]).resolve() == file.resolve()
    assert ours["field_messages"] == "messages" and ours["roles_to_train"] == ["assistant"]


def test_texts_of_the_data_never_become_names_or_markup(chosen):
    found = {str(p.relative_to(chosen.folder.parent)) for p in chosen.folder.parent.rglob("*") if "/hf/" not in str(p)}
    assert not [name for name in found if "escape" in name or "script" in name or "`" in name or "strange" in name]
    card = (chosen.folder / "dataset" / "README.md").read_text("utf-8")
    assert "a 'strange' /name/.jsonl`" in card and "<script>" not in card
    assert markdown("a`b|c\nd\x1b") == "`a'b/c?d?`"


def test_the_header_names_contents_and_comes_last(chosen, source, monkeypatch, tmp_path):
    header = chosen.header
    (file,) = header["data"]["files"]
    assert file["sha256"] == hashlib.sha256(source.read_bytes()).hexdigest()
    assert header["template"]["name"] == "alpaca" and header["versions"]["torch"] and header["run_id"] == chosen.run_dir.name
    read = open_folder(chosen.folder)
    assert read.header == json.loads(json.dumps(header)) and read.selection.ids == chosen.selection.ids

    def power_cut(*_):
        raise OSError("power cut")

    monkeypatch.setattr("clusterft.export.write_recipes", power_cut)
    with pytest.raises(OSError, match="power cut"):
        select(source, out=tmp_path / "cut", rows=15, **QUICK)
    assert not (tmp_path / "cut" / "header.json").exists()
    with pytest.raises(StoreError, match=r"header\.json is missing"):
        open_folder(tmp_path / "cut")
    monkeypatch.undo()
    again = select(source, out=tmp_path / "cut", rows=15, **QUICK)
    for name in ("selection.jsonl", "subset.jsonl", "messages.jsonl", "heldout.jsonl"):
        assert (again.folder / name).read_bytes() == (chosen.folder / name).read_bytes()


def test_nothing_is_overwritten(chosen, source, tmp_path, monkeypatch):
    before = {p: p.stat().st_mtime_ns for p in chosen.folder.rglob("*")}
    assert select(source, out=chosen.folder, rows=15, **QUICK).selection.ids == chosen.selection.ids
    with pytest.raises(UserError, match="holds no selection of this request"):
        select(source, out=chosen.folder, rows=14, **QUICK)
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(UserError, match="is not empty"):
        select(source, out=tmp_path, rows=15, **QUICK)
    with pytest.raises(UserError, match="is a file"):
        select(source, out=tmp_path / "notes.txt", rows=15, **QUICK)
    monkeypatch.setattr(api, "file_facts", lambda path: {"path": str(path), "bytes": 1, "sha256": "0"})
    with pytest.raises(UserError, match="made from other contents"):
        select(source, out=chosen.folder, rows=15, **QUICK)
    assert {p: p.stat().st_mtime_ns for p in chosen.folder.rglob("*")} == before


def test_formats_without_lines_are_written_as_json_and_counted(home, tmp_path):
    csv = tmp_path / "t.csv"
    csv.write_text("instruction,output\n" + "".join(f'"ask, {i}","say ""{i}"""\n' for i in range(12)))
    packed = tmp_path / "u.jsonl.gz"
    packed.write_bytes(gzip.compress(b"".join(b'{"instruction" : "zip %d","output":"x"}\n' % i for i in range(12))))
    got = select([csv, packed], "tiny", selector="random", rows=20, holdout=0, out=tmp_path / "o")
    lines = (got.folder / "subset.jsonl").read_bytes().splitlines()
    own = [x for x in lines if x.startswith(b'{"instruction" : "zip')]
    assert got.header["subset"] == {"rows": 20, "source_bytes": len(own), "re_encoded": 20 - len(own)} and 8 <= len(own) <= 12
    assert all(json.loads(x)["output"].startswith('say "') for x in lines if x not in own)
    data = got.dataset()
    assert set(data["cluster"]) == {None} and set(data["weight"]) == {1.0}


def test_keep_is_the_share_in_the_end_and_an_unreachable_one_names_the_largest():
    sizes = np.array([30, 50, 20])
    check_share("0.6", 100, sizes)
    with pytest.raises(
        UserError, match=r"asks for 61 of 100 rows, but 3 equal clusters .* 3 x 20 = 60, a share of 0\.6000; .*--rows 61"
    ):
        check_share("0.61", 100, sizes)
    with pytest.raises(UserError, match="fewer than the 3 clusters"):
        check_share("0.02", 100, sizes)
    for n, most in ((97, 61), (1003, 333), (7, 7), (100, 29), (260, 60), (54, 32), (4_999_999, 3_333_331)):
        share = reachable_share(most, n)
        assert floor_product(share, n) == most


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"keep": None}, "exactly one of keep, rows and ratio; given: none"),
        ({"rows": 3}, "given: keep, rows"),
        ({"keep": "1.2"}, r"outside \(0, 1\]"),
        ({"selector": "best"}, "known are cluster, random"),
        ({"selector": "full"}, "keeps every row; leave keep out"),
        ({"model": "no/such.gguf"}, "neither a folder, a GGUF file"),
        ({"model": "nonsense"}, "check it"),
        ({"settings": ("trainer.epoch=3",)}, "epoch"),
        ({"device": "tpu"}, "use cpu or cuda"),
        ({"data": (Path(__file__), Path(__file__))}, "given twice"),
        ({"data": (Path("a${b}.jsonl"),)}, "rename the file"),
    ],
)
def test_a_wrong_request_is_one_sentence(source, changes, message):
    request = {"data": (source,), "model": "tiny", "keep": "0.5"} | changes
    with pytest.raises((UserError, ValueError), match=message) as caught:
        compose_request(Request(**request))
    assert "\n" not in str(caught.value)


def test_small_data_hold_a_tenth_out(tmp_path):
    for rows, expected in ((9, 0), (41, 4), (639, 63), (640, 64), (5000, 64)):
        path = tmp_path / f"{rows}.jsonl"
        path.write_text('{"instruction": "a", "output": "b"}\n' * rows)
        assert default_holdout([path]) == expected


def test_models_are_found_by_name_folder_and_file(tmp_path):
    assert model_choice("smollm2_135m") == ("smollm2_135m", {})
    with pytest.raises(UserError, match="holds no tokenizer"):
        model_choice(str(Path(__file__).parent / "golden" / "tiny_llama"))
    folder = tmp_path / "model"
    shutil.copytree(Path(__file__).parent / "golden" / "tiny_llama", folder)
    (folder / "tokenizer.json").write_text("{}")
    name, values = model_choice(str(folder))
    assert (name, values["architecture"], values["path"]) == ("local", "LlamaForCausalLM", str(folder))
    (folder / "config.json").write_text("{}")
    with pytest.raises(UserError, match="no model architecture"):
        model_choice(str(folder))
    assert plain_name(Path("/x/../é<b> data.v2.jsonl.gz")) == "é-b-data"
    assert plain_name(Path("e\u0301/指示 データ.jsonl")) == "指示-データ" and plain_name(Path("..jsonl")) == "data"
    assert plain_name(Path("e\u0301.jsonl")) == "\u00e9" and plain_name(Path(os.fsdecode(b"\xff.jsonl"))) == "data"


@pytest.mark.slow
def test_the_trl_example_trains_on_the_subset(chosen, tmp_path, monkeypatch):
    pytest.importorskip("trl")
    from clusterft.models import load_model, load_tokenizer

    cfg = compose_request(Request((Path(chosen.header["data"]["files"][0]["path"]),), "tiny", rows=1))
    load_model(cfg.model).save_pretrained(tmp_path / "model")
    load_tokenizer(cfg.model).save_pretrained(tmp_path / "model")
    monkeypatch.setattr(sys, "argv", ["trl_example.py", str(tmp_path / "model"), str(tmp_path / "tuned")])
    runpy.run_path(str(chosen.folder / "trl_example.py"), run_name="__main__")
    before = (tmp_path / "model" / "model.safetensors").read_bytes()
    assert (tmp_path / "tuned" / "model.safetensors").read_bytes() != before
