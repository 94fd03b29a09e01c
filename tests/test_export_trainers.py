"""The entries for LLaMA-Factory and axolotl, loaded by the real libraries: every row arrives, and the loss falls on the answers alone.

Neither can live in this project's environment (they pin other versions of torch and datasets), so each runs in an interpreter of its own:

    python3 -m venv lf && lf/bin/pip install llamafactory && CLUSTERFT_LLAMAFACTORY_PYTHON=lf/bin/python pytest tests/test_export_trainers.py
    python3 -m venv ax && ax/bin/pip install axolotl && CLUSTERFT_AXOLOTL_PYTHON=ax/bin/python pytest tests/test_export_trainers.py
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from data_configs import conf

from clusterft import select
from clusterft.models import load_model, load_tokenizer

HERE = Path(__file__).parent
CHAT_TEMPLATE = (
    "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}{% if m['role'] == 'assistant' %}{{ eos_token }}{% endif %}\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
PAIRS = [
    {"instruction": f"say {i} </s> ../x", "input": "a block" if i % 3 == 0 else "", "output": f"answer {i} ä 漢 <script>"}
    for i in range(12)
]
CHATS = [
    {
        "messages": [
            *([{"role": "system", "content": "be brief"}] if i % 2 else []),
            {"role": "user", "content": f"q{i}"},
            {"role": "assistant", "content": f"first {i}"},
            {"role": "user", "content": "and?"},
            {"role": "assistant", "content": f"second {i}"},
            {"role": "user", "content": "a question without an answer"},
        ]
    }
    for i in range(8)
]


def interpreter(library: str) -> str:
    """The interpreter that has a library: named by the environment, or this one. Skips the test where there is none."""
    named = os.environ.get(f"CLUSTERFT_{library.upper()}_PYTHON")
    if named:
        return named
    if importlib.util.find_spec(library) is None:
        pytest.skip(f"{library} is not installed; CLUSTERFT_{library.upper()}_PYTHON names an interpreter that has it")
    return sys.executable


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """(folder of a selection of all rows, folder of the model)."""
    home = tmp_path_factory.mktemp("trainers")
    (home / "mine.jsonl").write_text("".join(json.dumps(r) + "\n" for r in PAIRS + CHATS))
    load_model(conf("model", "tiny")).save_pretrained(home / "model")
    tokenizer = load_tokenizer(conf("model", "tiny"))
    tokenizer.chat_template = CHAT_TEMPLATE
    tokenizer.save_pretrained(home / "model")
    settings = [f"runtime.cache_dir={home}/cache"]
    return select(
        home / "mine.jsonl", "tiny", selector="full", holdout=0, out=home / "out", settings=settings
    ).folder, home / "model"


@pytest.mark.slow
@pytest.mark.parametrize("library", ["llamafactory", "axolotl"])
def test_the_library_reads_every_row_and_trains_on_the_answers(library, made, tmp_path):
    python, (folder, model) = interpreter(library), made
    command = [python, str(HERE / "trainer_loading.py"), library, str(folder), str(model), str(tmp_path / "scratch")]
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"} | {
        "HF_HUB_OFFLINE": "1",
        "AXOLOTL_DO_NOT_TRACK": "1",
    }
    environment |= {"HF_HOME": str(tmp_path / "hf"), "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=900, cwd=tmp_path)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    (line,) = [x for x in done.stdout.splitlines() if x.startswith("ROWS ")]
    read = json.loads(line.removeprefix("ROWS "))
    wanted = [json.loads(x)["messages"] for x in (folder / "messages.jsonl").read_text("utf-8").splitlines()]
    assert len(read) == len(wanted) == 20
    unread = list(wanted)
    for whole, target in read:
        (match,) = [m for m in unread if all(t["content"] in whole for t in m)]
        unread.remove(match)
        answers = [t["content"] for t in match if t["role"] == "assistant"]
        assert "".join(target.replace("</s>", "").split()) == "".join("".join(answers).split())
        assert target.count("</s>") == len(answers)  # each answer ends in a supervised EOS
    assert unread == []
