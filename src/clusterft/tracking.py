"""Weights & Biases as one more reader of the metrics lines; metrics.jsonl is written in any case.

In comes `runtime.wandb` (auto, online, offline, disabled) and the run's id; out comes a function to pass to `train(on_step=...)`
on rank 0. The tracker's run id is the run's own, so that a resumed run stays one run. Nothing is imported unless it is asked for.
"""

from __future__ import annotations

import importlib.util
import netrc
import os
import socket
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import urlparse

MODES = ("auto", "online", "offline", "disabled")
PROJECT = "clusterft"


class Tracker(Protocol):
    def __call__(self, line: dict[str, Any]) -> None: ...


def check_mode(mode: str) -> str:
    """The mode to use: `auto` means offline where wandb is installed and disabled where it is not.

    Raises ValueError for an unknown mode, or for one that asks for the package wandb where it is not installed.
    """
    if mode not in MODES:
        raise ValueError(f"runtime.wandb={mode!r} is not one of {', '.join(MODES)}")
    installed = importlib.util.find_spec("wandb") is not None
    if mode == "auto":
        return "offline" if installed else "disabled"
    if mode != "disabled" and not installed:
        raise ValueError(f"runtime.wandb={mode} needs the package wandb, which is not installed; use runtime.wandb=disabled")
    return mode


def check_online(mode: str) -> None:
    """Raises ValueError if `online` is asked for without a key, or where the tracker's host cannot be reached within seconds.

    Otherwise the tracker itself would find out after features and selection, and only after minutes of trying.
    """
    if check_mode(mode) != "online":
        return
    address = urlparse(os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai"))
    if not (os.environ.get("WANDB_API_KEY") or _key_in_netrc(address.hostname)):
        raise ValueError(
            f"runtime.wandb=online finds no key for {address.hostname}: set WANDB_API_KEY, or use runtime.wandb=offline and sync later"
        )
    if any(os.environ.get(name) for name in ("HTTPS_PROXY", "https_proxy", "ALL_PROXY", "all_proxy")):
        return  # whether the proxy reaches it cannot be told without using the key
    try:
        socket.create_connection(
            (address.hostname, address.port or (80 if address.scheme == "http" else 443)), timeout=5.0
        ).close()
    except OSError as problem:
        raise ValueError(
            f"runtime.wandb=online cannot reach {address.hostname} ({problem}); use runtime.wandb=offline and sync later"
        ) from problem


def _key_in_netrc(host: str | None) -> bool:
    places = [os.environ["NETRC"]] if "NETRC" in os.environ else ["~/.netrc", "~/_netrc"]
    for path in (Path(p).expanduser() for p in places):
        try:
            if host is not None and netrc.netrc(str(path)).authenticators(host):
                return True
        except (FileNotFoundError, netrc.NetrcParseError):
            continue
    return False


@contextmanager
def wandb_tracker(mode: str, *, run_id: str, folder: Path, config: Mapping[str, Any]) -> Iterator[Tracker | None]:
    """Yields what to call with each metrics line, or None if disabled; closes the tracker's run at the end."""
    mode = check_mode(mode)
    if mode == "disabled":
        yield None
        return
    import wandb

    folder.mkdir(parents=True, exist_ok=True)
    run = wandb.init(project=PROJECT, id=run_id, resume="allow", mode=mode, dir=str(folder), config=dict(config))
    try:
        yield lambda line: run.log({k: v for k, v in line.items() if isinstance(v, int | float)}, step=line["step"])
    finally:
        run.finish()
