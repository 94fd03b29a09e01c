"""The tracker is asked for by name or not imported at all; a resumed offline run keeps its id."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys

import pytest

from clusterft.tracking import check_mode, wandb_tracker

HAVE_WANDB = importlib.util.find_spec("wandb") is not None


def test_disabled_imports_nothing(tmp_path):
    code = (
        "import sys; from pathlib import Path; from clusterft.tracking import wandb_tracker\n"
        f"with wandb_tracker('disabled', run_id='x', folder=Path({str(tmp_path)!r}), config={{}}) as on_step:\n"
        "    print(on_step, 'wandb' in sys.modules)"
    )
    printed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert printed.split() == ["None", "False"]


def test_an_unknown_mode_is_refused():
    with pytest.raises(ValueError, match="online, offline, disabled"):
        check_mode("on")


@pytest.mark.skipif(HAVE_WANDB, reason="wandb is installed here")
def test_asking_for_a_tracker_that_is_not_installed_is_refused():
    with pytest.raises(ValueError, match="not installed; use runtime"):
        check_mode("offline")


@pytest.mark.slow
@pytest.mark.skipif(not HAVE_WANDB, reason="wandb is not installed")
def test_a_resumed_offline_run_stays_one_run(tmp_path):
    for steps in ((1, 2), (3,)):
        with wandb_tracker("offline", run_id="run123", folder=tmp_path, config={"seed": 1}) as on_step:
            for step in steps:
                on_step({"step": step, "loss": 1.0 / step, "order": "text is left out"})
    ids = {p.name.split("-")[-1].removesuffix(".wandb") for p in tmp_path.rglob("*.wandb")}
    assert ids == {"run123"}, json.dumps(sorted(str(p) for p in tmp_path.rglob("*.wandb")))
