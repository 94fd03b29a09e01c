"""The tracker is asked for by name or not imported at all; a resumed offline run keeps its id."""

from __future__ import annotations

import importlib.util
import json
import socket
import subprocess
import sys

import pytest

from clusterft import tracking
from clusterft.tracking import check_mode, check_online, wandb_tracker

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


@pytest.fixture
def as_if_installed(monkeypatch, tmp_path):
    """`online` may be asked for; no key and no proxy of this machine is seen."""
    monkeypatch.setattr(tracking, "check_mode", lambda mode: mode)
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    for name in ("WANDB_API_KEY", "HTTPS_PROXY", "https_proxy", "ALL_PROXY", "all_proxy"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path / "netrc"


def test_online_without_a_key_is_refused_before_any_work(as_if_installed):
    with pytest.raises(ValueError, match=r"finds no key for api\.wandb\.ai: set WANDB_API_KEY"):
        check_online("online")
    check_online("offline")
    check_online("disabled")


@pytest.mark.parametrize("place", ["variable", "netrc"])
def test_online_with_a_key_asks_whether_the_host_answers(as_if_installed, monkeypatch, place):
    """A real server on loopback, then the same port closed."""
    if place == "variable":
        monkeypatch.setenv("WANDB_API_KEY", "0" * 40)
    else:
        as_if_installed.write_text("machine 127.0.0.1 login user password " + "0" * 40)
        as_if_installed.chmod(0o600)
    with socket.create_server(("127.0.0.1", 0)) as server:
        monkeypatch.setenv("WANDB_BASE_URL", f"http://127.0.0.1:{server.getsockname()[1]}")
        check_online("online")
    with pytest.raises(ValueError, match=r"cannot reach 127\.0\.0\.1 .*use runtime\.wandb=offline"):
        check_online("online")
