"""What data, models, caches and settings of strangers cannot do: run code, leave the output folder, become markup or shell text."""

from __future__ import annotations

import ast
import json
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from data_configs import conf

from clusterft import select
from clusterft.api import open_folder
from clusterft.composing import Request, compose_request
from clusterft.features import FeatureStore, compute
from clusterft.models import ModelError, load_model, load_tokenizer, model_identity
from clusterft.overrides import UserError
from clusterft.reporting import report_folder

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = ("src", "baselines", "eval", "experiments")
CODE = [*sorted(p for folder in FOLDERS for p in (ROOT / folder).rglob("*.py")), ROOT / "run.py"]

# -- no pickle, no shell, no code of a model: read from the sources themselves ------------------------------------------------


def calls(tree: ast.AST) -> Iterator[tuple[str, ast.Call]]:
    """Every call with its dotted name."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            yield ast.unparse(node.func), node


def keyword(call: ast.Call, name: str) -> str | None:
    return next((ast.unparse(k.value) for k in call.keywords if k.arg == name), None)


def faults(source: str) -> list[str]:
    """What a module must not do, one line each."""
    tree, found = ast.parse(source), []
    for node in ast.walk(tree):
        names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom) and [a.name for a in node.names] != ["UnpicklingError"]:
            names.append(node.module or "")
        found += [
            f"import {n}" for n in names if n.split(".")[0] in ("pickle", "shelve", "dill", "joblib", "cloudpickle", "marshal")
        ]
    for name, call in calls(tree):
        tail = name.rsplit(".", 1)[-1]
        if (
            name in ("os.system", "os.popen", "subprocess.getoutput", "subprocess.getstatusoutput")
            or keyword(call, "shell") == "True"
        ):
            found.append(f"a shell: {name}")
        if name.startswith("subprocess.") and call.args and isinstance(call.args[0], ast.JoinedStr | ast.Constant):
            found.append(f"a command as text: {name}")
        if name == "torch.load" and keyword(call, "weights_only") != "True":
            found.append("torch.load without weights_only=True")
        if tail == "load" and keyword(call, "allow_pickle") == "True":
            found.append("numpy with pickle")
        if name in ("yaml.load", "yaml.unsafe_load", "yaml.full_load"):
            found.append(name)
        if keyword(call, "trust_remote_code") == "True":
            found.append(f"{name} trusts code")
    return found


@pytest.mark.parametrize("path", CODE, ids=lambda p: str(p.relative_to(ROOT)))
def test_no_module_unpickles_or_calls_a_shell(path):
    assert faults(path.read_text(encoding="utf-8")) == []


def test_the_check_would_see_each_fault():
    for line in (
        "import pickle",
        "from joblib import load",
        "os.system('ls')",
        "subprocess.run(f'ls {x}')",
        "subprocess.run(['ls'], shell=True)",
        "torch.load(p)",
        "torch.load(p, weights_only=False)",
        "np.load(p, allow_pickle=True)",
        "yaml.load(t)",
        "AutoModel.from_pretrained(p, trust_remote_code=True)",
    ):
        assert len(faults(line)) == 1, line
    assert faults("torch.load(p, weights_only=True)\nnp.load(p)\nsubprocess.run(['ls', x])") == []


# -- models -------------------------------------------------------------------------------------------------------------------


class Bomb:
    """Writes a file when it is unpickled."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self):
        return Path.touch, (self.mark,)


@pytest.fixture
def folder(tmp_path) -> Path:
    place = tmp_path / "model"
    load_model(conf("model", "tiny")).save_pretrained(place)
    load_tokenizer(conf("model", "tiny")).save_pretrained(place)
    return place


def local(folder: Path, **changes):
    return conf("model", "local", **{"path": str(folder), "architecture": "LlamaForCausalLM"} | changes)


def test_pickled_weights_are_read_when_asked_for_and_then_without_their_code(folder, tmp_path):
    want = load_model(local(folder))
    torch.save(want.state_dict(), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    for refused in (load_model, model_identity):
        with pytest.raises(ModelError, match=r"no safetensors file.*model\.use_safetensors=false.*pytorch_model\.bin"):
            refused(local(folder))
    asked = local(folder, use_safetensors=False)
    assert all(torch.equal(a, b) for a, b in zip(want.parameters(), load_model(asked).parameters(), strict=True))
    before = model_identity(asked)
    torch.save({"x": Bomb(tmp_path / "ran")}, folder / "pytorch_model.bin")
    with pytest.raises(ModelError, match="hold more than weights, and are refused"):
        load_model(asked)
    assert not (tmp_path / "ran").exists() and model_identity(asked) != before
    torch.load(folder / "pytorch_model.bin", weights_only=False)
    assert (tmp_path / "ran").exists()  # the bomb is a real one


def test_select_refuses_pickled_weights_before_any_work(folder, tmp_path):
    torch.save({}, folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    with pytest.raises(ModelError, match="no safetensors file"):
        select(
            rows_file(tmp_path), folder, rows=4, clusters=2, out=tmp_path / "out", settings=[f"runtime.cache_dir={tmp_path}/c"]
        )
    assert not list(tmp_path.glob("out/*.json*"))


def test_code_beside_a_model_runs_only_when_asked_for(folder, tmp_path, monkeypatch):
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    mark = tmp_path / "ran"
    code = f"import pathlib\npathlib.Path({str(mark)!r}).touch()\nfrom transformers import LlamaForCausalLM\nclass Mine(LlamaForCausalLM): ...\n"
    (folder / "mine.py").write_text(code)
    config = json.loads((folder / "config.json").read_text())
    config |= {"auto_map": {"AutoModelForCausalLM": "mine.Mine"}, "architectures": ["Mine"]}
    (folder / "config.json").write_text(json.dumps(config))
    assert type(load_model(local(folder, architecture="Mine"))).__name__ == "LlamaForCausalLM" and not mark.exists()
    (folder / "config.json").write_text(
        json.dumps(config | {"model_type": "mine", "auto_map": {**config["auto_map"], "AutoConfig": "mine.C"}})
    )
    with pytest.raises(ModelError, match=r"trust_remote_code"):
        load_model(local(folder, architecture="Mine"))
    assert not mark.exists()
    (folder / "config.json").write_text(json.dumps(config))
    asked = load_model(local(folder, architecture="Mine", trust_remote_code=True))
    assert type(asked).__name__ == "Mine" and mark.exists()


# -- caches -------------------------------------------------------------------------------------------------------------------


def test_a_pickle_in_the_cache_is_refused_and_not_run(tmp_path):
    from tiny_feature_context import tiny_context

    from clusterft.interfaces import FeatureSpec

    context, store = tiny_context(6), FeatureStore(tmp_path / "cache")
    spec = FeatureSpec("response_losses", "clusterft.row_losses:extract_response_losses", {"precision": "float32"})
    compute([spec], context, store)
    place = store.path(spec, context)
    bomb = np.array([Bomb(tmp_path / "ran")] * 6, dtype=object)
    np.save(place / "rows.npy", bomb, allow_pickle=True)
    for verify in (True, False):
        with pytest.raises(ValueError, match=r"rows\.npy|[Oo]bject"):
            store.load(spec, context, verify=verify)
    assert not (tmp_path / "ran").exists()


# -- data and settings --------------------------------------------------------------------------------------------------------

HOSTILE = [
    "../../up",
    "/etc/x",
    "a/b",
    "..",
    "\n",
    "\x00",
    "'; touch ran; '",
    '"$(touch ran)"',
    "`touch ran`",
    "-rf",
    "<b>",
    "%s{0}",
]


def rows_file(folder: Path, name: str = "mine.jsonl") -> Path:
    """Thirty rows whose every text and extra field is hostile."""
    rows = []
    for i in range(30):
        text = HOSTILE[i % len(HOSTILE)]
        rows.append({"instruction": f"{i} {text}", "output": f"{text} {i}", "id": text, "group": text, text: text, "file": text})
    path = folder / name
    path.write_text("".join(json.dumps(r) + "\n" for r in rows))
    return path


def tree(folder: Path) -> set[str]:
    return {str(p.relative_to(folder)) for p in folder.rglob("*")}


@pytest.mark.parametrize("name", ["a\nb 'c' \"d\".jsonl", "$(touch ran).jsonl", "-rf;touch ran.jsonl", "[b]<i>.jsonl"])
def test_hostile_rows_and_file_names_stay_inside_the_folder(name, tmp_path, monkeypatch):
    home = tmp_path / "home"
    (home / "data").mkdir(parents=True)
    path = rows_file(home / "data", name)
    monkeypatch.chdir(home)
    settings = ["trainer.precision=float32", f"runtime.cache_dir={tmp_path}/cache", "data.group_field=group"]
    result = select(path, "tiny", selector="random", rows=10, report=True, settings=settings)
    report_folder(result.folder, [])
    (out,) = [p for p in home.iterdir() if p.name != "data"]
    assert result.folder == out and tree(home / "data") == {name}
    assert sum(1 for _ in (out / "subset.jsonl").open("rb")) == 10
    inside = tree(out)
    assert not [n for n in inside if any(mark in n for mark in ("up", "etc", "touch", "rf", "'", '"', "\n", "`", "<", "$"))]
    words = ["clusterft", "select", str(path)]
    done = subprocess.run(
        ["bash", "-c", f'set -- {result.header["command"]}; printf "%s\\0" "$@"'], capture_output=True, cwd=home, check=True
    )
    assert done.stdout.decode().split("\0")[:3] == words and not list(tmp_path.rglob("ran"))


@pytest.mark.slow
def test_hostile_groups_train_and_score_inside_the_folder(tmp_path):
    from clusterft.cli import main

    path = rows_file(tmp_path)
    options = [
        "--set",
        "data.group_field=group",
        "--set",
        "trainer.precision=float32",
        "--set",
        f"runtime.cache_dir={tmp_path}/cache",
    ]
    command = [
        "select",
        str(path),
        "--model",
        "tiny",
        "--selector",
        "random",
        "--rows",
        "8",
        "--holdout",
        "6",
        "--out",
        str(tmp_path / "o"),
    ]
    assert main([*command, "--no-report", *options]) == 0
    assert (
        main(["train", str(tmp_path / "o"), "--epochs", "1", "--workers", "1"]) == 0 and main(["eval", str(tmp_path / "o")]) == 0
    )
    assert {p.name for p in tmp_path.iterdir()} <= {"mine.jsonl", "cache", "o"}
    names = {part for n in tree(tmp_path / "o") | tree(tmp_path / "cache") for part in n.split("/")}
    assert not names & {"up", "x", "a", "b", "-rf", "<b>"} and not [n for n in names if "touch" in n or "%s" in n]
    (record,) = (tmp_path / "o" / "run").glob("*/record.json")
    assert json.loads(record.read_text())["status"] == "complete"


def test_settings_never_become_names_of_files_or_shell_text(tmp_path):
    result = select(
        rows_file(tmp_path),
        "tiny",
        selector="random",
        rows=5,
        out=tmp_path / "o",
        settings=["model.name='../`touch ran`'", f"runtime.cache_dir={tmp_path}/cache"],
    )
    assert {p.name for p in tmp_path.iterdir()} <= {"mine.jsonl", "o", "cache"} and not list(tmp_path.rglob("ran"))
    assert open_folder(tmp_path / "o").selection.ids == result.selection.ids


def test_the_data_keep_the_name_that_their_file_gives_them(tmp_path):
    with pytest.raises(UserError, match=r"sets data\.name itself"):
        select(rows_file(tmp_path), "tiny", selector="random", rows=5, out=tmp_path / "o", settings=["data.name='../x'"])
    assert not (tmp_path / "o").exists()


def test_a_folder_that_is_a_link_elsewhere_is_not_written_through(tmp_path):
    """The cache and the folder are the user's own; a link inside the folder of a selection must not lead its files away."""
    path, target = rows_file(tmp_path), tmp_path / "precious"
    target.mkdir()
    (target / "keep.txt").write_text("mine")
    (tmp_path / "o").symlink_to(target)
    with pytest.raises(UserError, match="is not empty"):
        select(path, "tiny", selector="random", rows=5, out=tmp_path / "o", settings=[f"runtime.cache_dir={tmp_path}/cache"])
    assert tree(target) == {"keep.txt"}


def test_data_paths_are_values_and_never_overrides(tmp_path):
    path = tmp_path / "x,data.template=chat'.jsonl"
    shutil.copy(rows_file(tmp_path), path)
    cfg = compose_request(Request((path,), "tiny", rows=1))
    assert cfg.data.path == [str(path)] and cfg.data.template == "alpaca"
