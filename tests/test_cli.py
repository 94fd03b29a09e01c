"""The console script: quick help, the doctor's verdicts, select, dry run, train, evaluate, compare, report; refusals in one sentence."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import clusterft
from clusterft.cli import arguments, main, parser
from clusterft.cli.doctor import histogram, sample
from clusterft.cli.dry_run import Measured, time_estimate
from clusterft.cli.selecting import request_of
from clusterft.composing import SELECTORS, Request, command_of, conf_dir
from clusterft.records import Example

ROOT = Path(__file__).resolve().parents[1]
CASES = ROOT / "tests" / "golden" / "cases"
QUICK = ["--set", "trainer.precision=float32", "--set", "trainer.global_batch=8", "--set", "clustering.n_init=2"]


@pytest.fixture(scope="module", autouse=True)
def _cache(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CLUSTERFT_CACHE", str(tmp_path_factory.mktemp("cache")))
        patch.setenv("COLUMNS", "200")
        yield


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("data") / "mine.jsonl"
    words = ["alpha", "beta", "gamma", "delta", "river", "stone", "cloud"]
    rows = [{"instruction": f"Say {words[i % 7]} {i}", "output": " ".join(words[: 1 + i % 7]) * (1 + i % 3)} for i in range(44)]
    path.write_text("".join(json.dumps(r) + "\n" for r in rows))
    return path


def refused(capsys, *arguments: str) -> str:
    """The sentence on stderr of a command that must leave with status 2."""
    with pytest.raises(SystemExit) as caught:
        main(list(arguments))
    assert caught.value.code == 2
    message = capsys.readouterr().err.strip()
    assert message.startswith("error: ") and "\n" not in message
    return message


def select(data: Path, out: Path, *more: str) -> int:
    return main(["select", str(data), "--model", "tiny", "--clusters", "2", "--out", str(out), *QUICK, *more])


@pytest.fixture(scope="module")
def folder(data, tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("out") / "sel"
    assert select(data, out, "--keep", "0.4") == 0
    return out


def test_help_is_quick_and_imports_no_torch():
    code = (
        "import sys, time, clusterft\nfrom clusterft.cli import main\n"
        "try: main(['--help'])\nexcept SystemExit as e: assert e.code == 0\n"
        "heavy = {'torch', 'transformers', 'numpy', 'hydra'} & set(sys.modules)\n"
        "assert not heavy, heavy\nassert time.process_time() < 1, time.process_time()"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert all(name in done.stdout for name in ("doctor", "select", "train", "eval", "compare", "report"))


def test_the_package_offers_its_names_when_they_are_asked_for():
    from clusterft import ClusterBatchSampler, weighted_loss

    assert ClusterBatchSampler.__module__ == "clusterft.allocation" and weighted_loss.__module__ == "clusterft.loss"
    assert {"select", "SelectResult"} <= set(dir(clusterft)) and (Path(clusterft.__file__).parent / "py.typed").is_file()
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        _ = clusterft.nonsense


def test_the_command_line_knows_the_selectors_and_templates_of_the_package():
    from clusterft.formats import FORMATS
    from clusterft.prompting import TEMPLATES

    assert set(arguments.SELECTORS) == set(SELECTORS) and set(arguments.TEMPLATES) == set(TEMPLATES)
    assert set(arguments.FORMATS) == {"auto", *FORMATS}
    assert (conf_dir() / "config.yaml").is_file()


# -- doctor ---------------------------------------------------------------------------------------------------------------


def test_the_doctor_finds_nothing_in_clean_data(data, capsys):
    assert main(["doctor", str(data), "--model", "tiny"]) == 0
    text = capsys.readouterr().out
    for fact in ("44 rows read", "all 44", "prompt share", "BOS per sample = 1", "pad==eos = no", "nothing to look at"):
        assert fact in text


def test_the_doctor_counts_what_is_wrong_with_file_and_line(tmp_path, capsys):
    path = tmp_path / "b.jsonl"
    rows = [
        '{"instruction": "a", "output": "fine"}',
        '{"instruction": "b", "output": ""}',
        '{"instruction": "a", "output": "fine"}',
        "{",
    ]
    path.write_text("\n".join(rows) + "\n" + json.dumps({"instruction": "long", "output": "x" * 900}) + "\n")
    assert main(["doctor", str(path), "--model", "tiny", "--max-length", "400", "--json"]) == 1
    facts = json.loads(capsys.readouterr().out)
    load = facts["load"]
    assert (load["rows_read"], load["rows_kept"], load["duplicates"]) == (5, 3, 1)
    assert sorted((line, reason) for reason, rows in load["rejected_examples"].items() for _, line, _ in rows) == [
        (2, "empty_response"),
        (4, "invalid_json"),
    ]
    assert (facts["tokens"]["over_max_length"], facts["tokens"]["answers_cut"]) == (1, 1)
    assert len(facts["findings"]) == 3 and not facts["errors"]
    assert main(["doctor", str(path), "--model", "tiny", "--max-length", "20", "--json"]) == 2
    assert "no row has an answer token within 20 tokens" in json.loads(capsys.readouterr().out)["errors"][0]
    assert "line 2: empty_response" in refused(capsys, "doctor", str(path), "--model", "tiny", "--strict")
    assert "cannot be opened" in refused(capsys, "doctor", str(tmp_path / "none.jsonl"), "--model", "tiny")
    assert "neither a folder" in refused(capsys, "doctor", str(path), "--model", "no_such_model")


def test_columns_of_other_names_are_named_on_the_command_line(tmp_path, capsys):
    path = tmp_path / "q.jsonl"
    path.write_text('{"the question": "a", "a=b": "c"}\n')
    command = ["doctor", str(path), "--model", "tiny", "--json"]
    said = refused(capsys, *command)
    assert "set --field prompt=COLUMN and --field response=COLUMN" in said and "data.fields" not in said
    assert main([*command, "--field", "prompt=the question", "--field", "response=a=b"]) == 0
    assert json.loads(capsys.readouterr().out)["load"]["rows_kept"] == 1


def test_settings_are_told_as_the_flags_that_set_them():
    """Every flag is one of the command line, every setting one of conf/; what has no flag keeps its name, for --set."""
    from composed import composed
    from omegaconf import OmegaConf

    from clusterft.cli import parser
    from clusterft.cli.arguments import FLAGS, in_flags

    commands = parser()._subparsers._group_actions[0].choices.values()
    flags = {option for command in commands for option in command._option_string_actions}
    plain = composed()
    for key, flag in FLAGS.items():
        assert flag.split()[0] in flags
        name = key.replace("\\", "").split(".(")[0]
        assert OmegaConf.select(plain, name, throw_on_missing=False, default="absent") != "absent", name
    assert in_flags("data.file_format='x' is unknown; known: auto") == "--file-format 'x' is unknown; known: auto"
    assert in_flags("data.fields lacks response") == "--field lacks response"
    assert in_flags("trainer.max_length=3, model.max_length=3, trainer.max_lengths") == (
        "--max-length 3, model.max_length=3, trainer.max_lengths"
    )
    assert in_flags("set data.group_field or runtime.device.") == "set data.group_field or --device."


def test_the_doctors_numbers_by_hand():
    assert histogram(np.array([1, 2, 3, 4, 5, 8, 9])) == [[1, 1], [2, 1], [4, 2], [8, 2], [16, 1]]
    examples = [Example(f"{i * 7919 % 10007:05d}", "p", "r") for i in range(6000)]
    chosen = [e.id for e in sample(examples)]
    lowest = set(sorted(e.id for e in examples)[:5000])
    assert chosen == [e.id for e in examples if e.id in lowest]
    assert time_estimate(Measured(20, 400, 2.0, 1.0, 4), 40_000, 2).startswith("about 2 min of model work and 1.0 s")


@pytest.mark.parametrize("case", ["01-empty-null-responses", "02-schema-drift-shards", "04-sharegpt-turns"])
def test_the_doctor_reads_the_handed_cases(case, capsys):
    files = [str(p) for p in sorted((CASES / case).rglob("*")) if p.suffix in (".jsonl", ".parquet") and "expected" not in p.name]
    assert files
    assert main(["doctor", *files, "--model", "tiny", "--json"]) in (0, 1)
    load = json.loads(capsys.readouterr().out)["load"]
    assert load["rows_read"] == load["rows_kept"] + sum(load["rejected"].values()) > 0


# -- select ---------------------------------------------------------------------------------------------------------------


def test_select_keeps_the_share_that_was_asked_for(folder, data):
    header = json.loads((folder / "header.json").read_text())
    assert (header["pool_rows"], header["heldout_rows"], header["budget"]) == (
        40,
        3,
        16,
    )  # four held out, one of them for matching
    kept = header["info"]["cluster_kept"]
    assert sum(kept) == 16 and max(kept) - min(kept) <= 1
    assert header["command"].startswith(
        f"clusterft select {data} --model tiny --selector cluster --keep 0.4 --clusters 2 --seed 0"
    )


def test_every_row_that_was_read_lies_in_one_file_and_in_one_count(folder):
    header = json.loads((folder / "header.json").read_text())
    parts = (header["rejected"], header["heldout_rows"], header["validation_rows"], header["pool_rows"])
    assert parts == (0, 3, 1, 40) and sum(parts) == header["data"]["load"]["rows_read"]
    files = ("rejected", "heldout", "validation", "selection")
    assert tuple(len((folder / f"{name}.jsonl").read_text().splitlines()) for name in files) == parts
    assert "3 further rows are held out for the loss, 1 for selectors that match rows." in (folder / "report.md").read_text()


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (["--set", "seed=9"], "this command sets seed itself"),
        (["--set", "data.holdout_rows=7"], "--set data.holdout_rows: this command sets --holdout itself"),
        (["--set", "+zzz=1"], "a setting that nothing reads"),
        (["--selector", "less", "--holdout", "2"], "use --holdout 3 or more"),
        (["--set", "trainer.lerning_rate=1"], "no such key"),
        (["--set", "trainer.epochs=0"], "at least one pass"),
        (["--set", "trainer.learning_rate=-1"], "no rate above 0"),
        (["--set", "trainer.learning_rate=nan"], "no rate above 0"),
        (["--out", "/dev/null/x"], "/dev/null is no folder, so nothing can be written below it; set --out"),
        (["--out", "x" * 300], "File name too long"),
    ],
)
def test_wrong_settings_and_places_are_refused_before_any_work(data, tmp_path, monkeypatch, capsys, more, words):
    monkeypatch.chdir(tmp_path)
    assert words in refused(capsys, "select", str(data), "--model", "tiny", "--selector", "random", "--rows", "5", *more)
    assert not list(tmp_path.iterdir())


def test_a_dry_run_writes_nothing_and_says_what_would_be_written(data, tmp_path, capsys):
    assert select(data, tmp_path / "no", "--rows", "10", "--dry-run") == 0
    text = capsys.readouterr().out
    assert not (tmp_path / "no").exists()
    for fact in (
        str(tmp_path / "no"),
        "10 rows",
        "measured: 20 rows",
        "about",
        "trl_example.py",
        "selection.parquet",
        "report.html",
        "44 rows read, 0 set aside, 4 held out, 40 to choose from",
    ):
        assert fact in text


def test_an_unreachable_share_names_the_largest_and_writes_nothing(data, tmp_path, capsys):
    message = refused(
        capsys, "select", str(data), "--model", "tiny", "--clusters", "2", "--keep", "1", "--out", str(tmp_path / "x"), *QUICK
    )
    assert "K n_min = 2 x" in message and "--rows 40" in message and not (tmp_path / "x").exists()
    assert "use 1 ... 40" in refused(capsys, "select", str(data), "--model", "tiny", "--rows", "41", "--out", str(tmp_path / "x"))
    assert "exactly one of keep" in refused(capsys, "select", str(data), "--model", "tiny")


@pytest.mark.parametrize("selector", ["cluster", "random"])
def test_a_ratio_that_keeps_no_row_leaves_nothing_so_the_next_command_may_take_the_name(data, tmp_path, capsys, selector):
    out, there = tmp_path / "x", tmp_path / "there"
    arguments = ("select", str(data), "--model", "tiny", "--clusters", "2", "--selector", selector, "--ratio", "0.01", *QUICK)
    assert "0 rows of each cluster" in refused(capsys, *arguments, "--out", str(out))
    assert not out.exists()
    there.mkdir()
    refused(capsys, *arguments, "--out", str(there))
    assert there.is_dir()


def test_a_ratio_is_the_papers_and_gives_a_rival_as_many_rows(data, tmp_path):
    for selector in ("cluster", "random"):
        assert select(data, tmp_path / selector, "--ratio", "0.5", "--selector", selector, "--no-report") == 0
    ours, rival = (json.loads((tmp_path / s / "header.json").read_text()) for s in ("cluster", "random"))
    smallest = min(ours["info"]["cluster_sizes"])
    assert ours["info"]["cluster_kept"] == [smallest // 2] * 2 and rival["budget"] == ours["budget"] == 2 * (smallest // 2)
    assert not (tmp_path / "random" / "report.html").exists()


def test_the_command_in_the_header_says_the_same_request_again():
    request = Request(
        (Path("my data.jsonl"),),
        "tiny",
        keep="0.3",
        clusters=3,
        max_length=77,
        fields=(("prompt", "a b"),),
        settings=("trainer.epochs=1",),
    )
    assert "select ./-dash.jsonl --model" in command_of(Request((Path("-dash.jsonl"),), "tiny", rows=1), Path("o"))
    words = shlex.split(command_of(request, Path("o")))
    args = parser().parse_args(words[1:])
    assert request_of(args).__dict__ | {"progress": False} == request.__dict__


@pytest.mark.slow
@pytest.mark.parametrize("selector", ["random", "ifd", "less", "s2l"])
def test_every_selector_writes_a_folder(selector, data, tmp_path):
    more = ["--set", "selector.clusters=4"] if selector == "s2l" else []
    assert (
        main(
            [
                "select",
                str(data),
                "--model",
                "tiny",
                "--selector",
                selector,
                "--keep",
                "0.25",
                "--out",
                str(tmp_path / "o"),
                *QUICK,
                *more,
            ]
        )
        == 0
    )
    header = json.loads((tmp_path / "o" / "header.json").read_text())
    assert header["budget"] == 10 and header["method"] == selector
    assert sum(1 for _ in (tmp_path / "o" / "subset.jsonl").open("rb")) == 10


# -- train, eval, compare, report -----------------------------------------------------------------------------------------


def test_folders_that_are_not_ready_are_refused_with_the_next_command(folder, tmp_path, capsys):
    assert "run `clusterft select` first" in refused(capsys, "train", str(tmp_path))
    assert f"run `clusterft train {folder}` first" in refused(capsys, "eval", str(folder), "--run", "0")
    assert "select again to change it" in refused(capsys, "train", str(folder), "--set", "data.template=chat")
    assert "trainer.epoch" in refused(capsys, "train", str(folder), "--set", "trainer.epoch=2")
    assert "write KEY=VALUE" in refused(capsys, "train", str(folder), "--set", "trainer.epochs")
    assert "'abc' is no number" in refused(capsys, "train", str(folder), "--set", "trainer.learning_rate=abc")
    assert "'nan' is no number" in refused(capsys, "train", str(folder), "--learning-rate", "nan")
    assert "no rate above 0" in refused(capsys, "train", str(folder), "--learning-rate", "-1")


def test_data_that_changed_since_are_refused_before_any_work(data, tmp_path, capsys):
    copy, out = tmp_path / "copy.jsonl", tmp_path / "o"
    copy.write_bytes(data.read_bytes())
    assert (
        main(["select", str(copy), "--model", "tiny", "--selector", "random", "--rows", "5", "--no-report", "--out", str(out)])
        == 0
    )
    copy.write_bytes(data.read_bytes() + b"\n")
    for command in ("train", "report"):
        assert "has changed since the selection was made" in refused(capsys, command, str(out))
    copy.unlink()
    assert "is gone" in refused(capsys, "train", str(out))


@pytest.mark.slow
def test_train_evaluate_and_compare(folder, data, tmp_path, capsys):
    full = tmp_path / "full"
    assert main(["select", str(data), "--model", "tiny", "--selector", "full", "--no-report", "--out", str(full), *QUICK]) == 0
    for one in (folder, full):
        assert main(["train", str(one), "--epochs", "1", "--workers", "2"]) == 0
    assert "the learning rate rises over the first 5 steps, and this run has" in " ".join(capsys.readouterr().out.split())
    assert "holds no trained run 0; there are" in refused(capsys, "eval", str(folder), "--run", "0")
    assert main(["eval", str(folder), "--json"]) == 0
    (record,) = json.loads(capsys.readouterr().out)
    assert record["status"] == "complete" and record["selection"]["budget"] == 16 and record["metrics"][0]["n"] == 3
    assert record["cost"]["training_seconds"] > 0 and (folder / "run" / record["run_id"] / "train" / "model").is_dir()
    assert main(["eval", str(full)]) == 0
    assert "heldout/nll_micro" in capsys.readouterr().out
    assert main(["compare", str(folder), str(full)]) == 0
    assert "heldout" in capsys.readouterr().out
    assert main(["compare", str(folder), str(tmp_path)]) == 2


def test_the_report_lies_in_the_folder_and_can_be_written_again(folder, capsys):
    for name in ("report.html", "report.md"):
        (folder / name).unlink()
    assert main(["report", str(folder)]) == 0
    assert capsys.readouterr().out.split() == [str(folder / "report.html"), str(folder / "report.md")]
    text = (folder / "report.md").read_text("utf-8")
    assert "clusterft select" in text and "16" in text
