"""Every file of examples/ runs on a real selection, and loops that should agree do."""

from __future__ import annotations

import json
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

from clusterft import select

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    home = tmp_path_factory.mktemp("examples")
    words = ["alpha", "beta", "gamma", "delta", "river", "stone", "cloud"]
    rows = [{"instruction": f"Say {words[i % 7]} {i}", "output": " ".join(words[: 1 + i % 7])} for i in range(30)]
    (home / "mine.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    settings = ["trainer.precision=float32", "clustering.n_init=2", f"runtime.cache_dir={home}/cache"]
    return select(home / "mine.jsonl", "tiny", rows=16, clusters=2, out=home / "out", settings=settings).folder


def printed_loss(name: str, folder: Path, out: Path, capsys, monkeypatch) -> float:
    """The loss that an example prints."""
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    monkeypatch.setattr(sys, "argv", [name, str(folder), str(out)])
    runpy.run_path(str(EXAMPLES / name), run_name="__main__")
    return float(re.search(r"(?:last|mean) loss ([0-9.]+)", capsys.readouterr().out)[1])


@pytest.mark.parametrize("pair", [("plain_torch.py", "with_accelerate.py"), ("hf_trainer.py", "trl_sft.py")])
def test_the_examples_train_and_agree_in_pairs(pair, folder, tmp_path, capsys, monkeypatch):
    for library in ("accelerate", "trl"):
        pytest.importorskip(library)
    first, second = (printed_loss(name, folder, tmp_path / name, capsys, monkeypatch) for name in pair)
    assert first == second and 5.0 < first < 5.56  # below log(259), the loss of knowing nothing


def test_no_example_is_forgotten():
    assert {p.name for p in EXAMPLES.glob("*.py")} == {"plain_torch.py", "with_accelerate.py", "hf_trainer.py", "trl_sft.py"}


def test_the_library_works_without_hydra():
    """What a loop of one's own imports needs neither Hydra nor its configurations."""
    code = (
        "import sys\nfor name in ('hydra', 'omegaconf'): sys.modules[name] = None\n"
        "from clusterft import CapacityKMeans, ClusterBatchSampler, weighted_loss\n"
        "import clusterft.integrations\n"
        "sampler = ClusterBatchSampler([0, 0, 1, 1], global_batch=2, seed=0)\n"
        "assert sorted(i for batch in sampler for i in batch) == [0, 1, 2, 3]"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
