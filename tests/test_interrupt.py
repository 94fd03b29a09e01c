"""Ctrl-C: a terminal signals every process of a run at once, and one sentence is the answer."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


@pytest.mark.slow
def test_ctrl_c_in_training_is_one_sentence(tmp_path):
    command = [sys.executable, "run.py", "+scale=smoke", "selector=random", "trainer.epochs=50", "runtime.processes=2"]
    command += [f"runtime.runs_dir={tmp_path}/runs", f"runtime.cache_dir={tmp_path}/cache"]
    said = tmp_path / "said"
    with said.open("w") as out:
        run = subprocess.Popen(command, cwd=ROOT, stdout=out, stderr=subprocess.STDOUT, start_new_session=True)
    deadline = time.monotonic() + 300
    while not any(p.stat().st_size for p in tmp_path.glob("runs/*/train/metrics.jsonl")):
        assert run.poll() is None and time.monotonic() < deadline, said.read_text()
        time.sleep(0.1)
    os.killpg(run.pid, signal.SIGINT)
    assert run.wait(60) == 130, said.read_text()
    text = said.read_text()
    assert "interrupted; the same command goes on from what is finished" in text
    assert "Traceback" not in text
