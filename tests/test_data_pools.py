"""Pools: held-out split and limits by hash, the embedded pools, the hub path, the configurations of conf/data."""

from __future__ import annotations

import ast
import json
import os
import shutil
import subprocess
import sys
import textwrap
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
from data_configs import ROOT, conf, files_config, write_jsonl

from clusterft.data import MEDICAL_POOL, group_of, load_pool
from clusterft.harvest import stdlib_rows
from clusterft.prompting import encode_pool, row_lengths
from clusterft.sources import DataError
from clusterft.tiny import build_tiny_tokenizer


@pytest.fixture
def forty(tmp_path: Path) -> Path:
    rows = [{"instruction": f"q{i // 2}", "output": f"a{i}"} for i in range(40)]  # two answers to each question
    return write_jsonl(tmp_path / "forty.jsonl", rows)


def test_held_out_rows_share_no_prompt_with_the_pool(forty: Path) -> None:
    pools = load_pool(files_config(str(forty), holdout_rows=10))
    assert (len(pools.train), len(pools.heldout)) == (30, 10)
    assert not {e.prompt for e in pools.train.examples} & {e.prompt for e in pools.heldout.examples}
    assert pools.report.train_rows == 30 and pools.report.heldout_rows == 10


def test_held_out_rows_do_not_depend_on_order_or_max_rows(forty: Path, tmp_path: Path) -> None:
    reference = load_pool(files_config(str(forty), holdout_rows=10))
    backwards = tmp_path / "backwards.jsonl"
    backwards.write_text("\n".join(reversed(forty.read_text().splitlines())))
    for path, limit in ((forty, 5), (backwards, None), (backwards, 5)):
        pools = load_pool(files_config(str(path), holdout_rows=10, max_rows=limit))
        assert set(pools.heldout.ids) == set(reference.heldout.ids)
        assert len(pools.train) == (limit or 30)
    nested = [set(load_pool(files_config(str(forty), max_rows=m)).train.ids) for m in (5, 12, 40)]
    assert nested[0] < nested[1] < nested[2]


def test_limits_are_checked(forty: Path) -> None:
    with pytest.raises(DataError, match=r"holdout_rows is 40, but 'test' has only 40 usable rows"):
        load_pool(files_config(str(forty), holdout_rows=40))
    with pytest.raises(DataError, match=r"data.max_rows is 0; expected at least 1"):
        load_pool(files_config(str(forty), max_rows=0))
    with pytest.raises(DataError, match=r"data.holdout_rows is -1"):
        load_pool(files_config(str(forty), holdout_rows=-1))
    with pytest.raises(DataError, match=r"data.kind='disk' is unknown; known: hub, files, stdlib, medical_smoke"):
        load_pool(files_config(str(forty), kind="disk"))


def test_row_limit_comes_before_the_splits_when_tokens_can_be_counted(forty: Path) -> None:
    tokenizer = build_tiny_tokenizer()
    count = partial(row_lengths, tokenizer=tokenizer, template="alpaca")
    cfg = files_config(
        str(forty), holdout_rows=4, max_rows=9, max_row_tokens=min(count(load_pool(files_config(str(forty))).train.examples))
    )
    pools = load_pool(cfg, count_tokens=count)
    assert (len(pools.heldout), len(pools.train)) == (4, 6)  # rows 0 to 9 have one digit in both texts
    assert pools.report.rejected_by_reason == {"over_row_limit": 30}
    assert pools.report.rows_read == pools.report.rows_kept + 30 == 40
    later, _ = encode_pool(load_pool(cfg).train, tokenizer, "alpaca", 999, max_row_tokens=cfg.max_row_tokens)
    assert len(later) < 6


def test_unexpected_row_count_and_missing_group_are_reported(forty: Path) -> None:
    report = load_pool(files_config(str(forty), expected_rows=41, group_field="topic")).report
    assert report.notes == (
        "40 rows were read, expected are 41: the data set may have changed",
        "40 rows have no short field 'topic' (data.group_field)",
    )


def test_loading_does_not_import_torch() -> None:
    code = "import sys, clusterft.data, clusterft.load_report; sys.exit('torch' in sys.modules or 'datasets' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_configuration_file_equals_the_schema(forty: Path) -> None:
    pools = load_pool(conf("data", "jsonl", path=str(forty), holdout_rows=4))
    assert len(pools.train) + len(pools.heldout) == 40


def test_hub_data_offline_is_one_sentence_with_the_way_out(tmp_path: Path) -> None:
    names = ["magicoder_oss_instruct_75k", "evol_instruct_code_80k", "medinstruct_52k"]
    code = (
        "import sys; sys.path.insert(0, 'tests'); from data_configs import conf; from clusterft.data import load_pool\n"
        f"for name in {names}:\n"
        "    try: load_pool(conf('data', name))\n"
        "    except ValueError as error: print(error)\n"
    )
    env = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, cwd=ROOT, check=True)
    lines = done.stdout.splitlines()
    assert len(lines) == 3
    for name, line in zip(names, lines, strict=True):
        assert line.startswith(f"data set {conf('data', name).path} (revision main)") and "+scale=laptop" in line


def test_hub_rows_go_through_the_same_checks(tmp_path: Path) -> None:
    """`datasets` reads a local folder as it reads a repository of the hub."""
    folder = tmp_path / "set"
    folder.mkdir()
    rows = [{"problem": "p1", "solution": "s1", "lang": "python"}, {"problem": "p2", "solution": "", "lang": "java"}]
    write_jsonl(folder / "train.jsonl", rows)
    cfg = conf("data", "magicoder_oss_instruct_75k", path=str(folder), revision=None, holdout_rows=0)
    pools = load_pool(cfg)
    (example,) = pools.train.examples
    assert example.prompt == "Write a solution to the following coding problem:\np1" and example.response == "s1"
    assert (example.line, group_of(example, cfg.group_field)) == (1, "python")
    assert [(r.line, r.reason) for r in pools.train.rejected] == [(2, "empty_response")]
    assert "2 rows were read, expected are 75,197" in pools.report.notes[0]


@pytest.fixture(scope="module")
def harvested(tmp_path_factory):
    cache = tmp_path_factory.mktemp("harvest")
    return cache, stdlib_rows(cache)


def test_stdlib_rows_obey_the_rule(harvested) -> None:
    _, rows = harvested
    assert 2000 < len(rows) < 5000
    assert len({r.response for r in rows}) == len({r.prompt for r in rows}) == len(rows)
    for row in rows[::37]:
        code = row.response.removeprefix("```python\n").removesuffix("\n```")
        (function,) = ast.parse(code).body
        docstring, _, rest = row.prompt.rpartition("\n\n# ")
        assert 40 <= len(docstring) <= 600 and docstring not in code and ast.get_docstring(function) is None
        assert 3 <= function.end_lineno - function.body[0].lineno + 1 <= 60
        assert code.startswith(rest.partition("\n")[2])
        assert not {"test", "tests", "idle_test"} & set(Path(row.source).parts)


def test_stdlib_is_long_tailed_over_module_families(harvested) -> None:
    _, rows = harvested
    sizes = sorted((sum(r.group == g for r in rows) for g in {r.group for r in rows}), reverse=True)
    assert len(sizes) > 100 and sum(sizes[:10]) > len(rows) / 4 and sizes[len(sizes) // 2] < 20


def test_kept_harvest_is_the_harvest_and_damage_is_noticed(tmp_path: Path) -> None:
    root, cache = tmp_path / "lib", tmp_path / "cache"
    root.mkdir()
    (root / "textwrap.py").write_bytes(Path(textwrap.__file__).read_bytes())
    rows = stdlib_rows(cache, root=root)
    assert len(rows) > 5 and rows == stdlib_rows(root=root)
    (path,) = cache.iterdir()
    content = path.read_text()
    path.write_text(content.replace("return", "retunr", 1))
    assert stdlib_rows(cache, root=root) == rows and path.read_text() == content
    (root / "textwrap.py").write_text("")
    assert stdlib_rows(cache, root=root) == () and len(list(cache.iterdir())) == 2


def test_harvest_by_hand(tmp_path: Path) -> None:
    doc = "Adds one to a number, and says so at some length."
    source = f'''
\x0c
class Box:
    @property
    def plus(self,
             n=1):
        """{doc}"""
        # the reason
        a = n + 1
        b = a

        return b

    def short(self):
        """{doc}"""
        return 1
'''
    (tmp_path / "pkg").mkdir()
    (tmp_path / "pkg" / "__init__.py").write_text(source)
    (tmp_path / "pkg" / "broken.py").write_text("def (:\n")
    (row,) = stdlib_rows(root=tmp_path)
    assert (row.source, row.line, row.group, row.qualname) == ("pkg/__init__.py", 4, "pkg", "pkg.Box.plus")
    head = "@property\ndef plus(self,\n         n=1):"
    assert row.prompt == f"{doc}\n\n# pkg.Box\n{head}"
    assert row.response == f"```python\n{head}\n    # the reason\n    a = n + 1\n    b = a\n\n    return b\n```"


def test_stdlib_pool_is_reproducible(harvested) -> None:
    cache, rows = harvested
    cfg = conf("data", "stdlib_instruct")
    (cache / "stdlib_instruct").mkdir()
    for kept in cache.glob("*.jsonl"):  # spares the second harvest
        shutil.copy(kept, cache / "stdlib_instruct")
    pools = load_pool(cfg, assets_dir=cache)
    again = load_pool(cfg, assets_dir=cache)
    assert pools.train.fingerprint == again.train.fingerprint and len(pools.heldout) == 80
    assert len(pools.train) == len(rows) - 80
    assert pools.train.examples[0].prompt.startswith(cfg.instruction_prefix)
    assert group_of(pools.train.examples[0], "group") == Path(pools.train.examples[0].source).parts[0].removesuffix(".py")


def test_medical_pool_ships_with_the_package() -> None:
    cfg = conf("data", "medical_smoke_instruct")
    pools = load_pool(cfg)
    total = len(pools.train) + len(pools.heldout)
    assert total >= 200 and not pools.report.rejected and pools.report.duplicates == 0
    raw = [json.loads(line) for line in MEDICAL_POOL.read_text(encoding="utf-8").splitlines()]
    assert sum(r["input"] == "<noinput>" for r in raw) > 100 and any(r["input"] == "NA" for r in raw)
    assert all("<noinput>" not in e.input for e in pools.train.examples)
    assert [e.input for e in (*pools.train.examples, *pools.heldout.examples) if e.prompt.startswith("Expand the abb")] == ["DNA"]
    topics = {group_of(e, cfg.group_field) for e in pools.train.examples}
    assert len(topics) >= 20 and "(none)" not in topics


def test_medical_rows_are_truly_different() -> None:
    raw = [json.loads(line) for line in MEDICAL_POOL.read_text(encoding="utf-8").splitlines()]
    words = [set((r["instruction"] + " " + r["input"] + " " + r["output"]).lower().split()) for r in raw]
    nearest = max(len(a & b) / len(a | b) for i, a in enumerate(words) for b in words[:i])
    assert nearest < 0.5


def test_group_of_names_what_is_missing() -> None:
    example = SimpleNamespace(meta={"lang": "c"})
    assert [group_of(example, f) for f in (None, "lang", "topic")] == ["all", "c", "(none)"]
