"""Kills real runs at chosen or random moments, starts them again, and compares what is left with an uninterrupted run.

A chain is one cell in folders of its own: the same command again and again, struck each time, then left alone until it is done. A blow
is SIGKILL, SIGTERM or SIGUSR1 to the process group of `run.py` (or to its leader alone), either after a random time or at a named
moment: `kill_points/sitecustomize.py` strikes from inside, at the file event that begins the moment. At the end every file of
the run and of its features must be that of the reference, byte by byte where it holds no times.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
ASSETS = Path(os.environ.get("CLUSTERFT_ASSETS", ROOT / "assets"))
CELL = (
    "+scale=smoke",
    "selector=cluster",
    "data.max_rows=40",
    "trainer.epochs=2",
    "trainer.per_device_batch=1",
    "trainer.checkpoint_every_steps=1",
    "trainer.keep_last=2",
    "runtime.keep_model=true",
    "runtime.threads_per_process=1",
    "runtime.feature_threads=1",
)
"""A smoke cell with two epochs of several accumulated micro-batches a step, so that there is something to kill."""

MOMENTS: dict[str, tuple[str, str]] = {
    "config": ("os.rename", r"config\.yaml"),
    "feature rows": ("open", r"gradient_proxy.*/shard-"),
    "feature merge": ("open", r"\.rows\.npy\.tmp"),
    "feature manifest": ("os.rename", r"gradient_proxy.*/manifest\.json"),
    "clustering": ("open", r"gradient_proxy.*/rows\.npy"),
    "selection writing": ("open", r"/runs/\w+/selection/"),
    "training": ("open", r"train/metrics\.jsonl"),
    "checkpoint writing": ("open", r"\.checkpoint-\d+\.tmp/"),
    "checkpoint renaming": ("os.rename", r"\.checkpoint-\d+\.tmp"),
    "checkpoint pruning": ("shutil.rmtree", r"/checkpoint-\d+"),
    "model writing": ("open", r"train/model/"),
    "training result": ("os.rename", r"result\.json"),
    "evaluation": ("open", r"/runs/\w+/eval/"),
    "record writing": ("os.rename", r"record\.json"),
    "after the record": ("shutil.rmtree", r"/checkpoint-\d+"),
}
"""Moment -> (audit event, what its path looks like), in the order in which a run comes by."""

PATIENCE = 3600.0
"""Seconds that one start may take before it counts as stuck: machines may be very busy."""

VOLATILE = {"seconds", "wall_seconds", "cpu_seconds", "peak_memory_gib", "phases", "resumed_from", "rejected_checkpoints", "cost"}
VOLATILE |= {"carrier", "processes", "feature_processes", "commit", "dirty"}  # a tree may be committed to between two starts
IGNORED = re.compile(r"(^|/)(\.?lock(\.holder)?|account-\d+-\d+\.json|generated-\d+\.jsonl)$")
"""Files that tell how a run was made, not what it found. The journal of generated texts may repeat one that was torn; what is
scored, samples.jsonl and per_problem.jsonl, may not."""


@dataclass(frozen=True)
class Blow:
    """One interruption. moment None: after `delay` seconds from the start, wherever the run is."""

    moment: str | None
    nth: int = 1
    delay: float = 0.0
    signal: str = "SIGKILL"
    to: str = "group"


@dataclass(frozen=True)
class Struck:
    """What a blow did. stage: where the run was, read from its folders afterwards; code: exit code of `run.py`."""

    blow: Blow
    fell: bool
    stage: str
    code: int


class Chain:
    """One cell in folders of its own below `folder`; `more`: further overrides; `prefix`: a command that runs the command."""

    def __init__(self, folder: Path, *more: str, prefix: tuple[str, ...] = ()) -> None:
        self.folder, self.more, self.prefix = folder, more, prefix
        folder.mkdir(parents=True, exist_ok=True)
        self.started = 0

    launch: Callable[[list[str], dict[str, str], int], Any] | None = None
    """How to start `run.py ...` in place of a new interpreter: arguments, environment, file of the output (see `forked_runs`)."""

    def start(self, *more: str, **environment: str) -> Any:
        places = [f"runtime.runs_dir={self.folder}/runs", f"runtime.cache_dir={self.folder}/cache"]
        command = [*self.prefix, sys.executable, "run.py", *CELL, *places, f"runtime.assets_dir={ASSETS}", *self.more, *more]
        self.started += 1
        with (self.folder / f"said-{self.started:03d}.txt").open("w") as said:
            own = {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", **environment}
            if self.launch is not None and not self.prefix:
                return self.launch(command[1:], own, said.fileno())
            return subprocess.Popen(
                command, cwd=ROOT, env=os.environ | own, stdout=said, stderr=subprocess.STDOUT, start_new_session=True
            )

    def said(self) -> str:
        return (self.folder / f"said-{self.started:03d}.txt").read_text(errors="replace")

    def finish(self, *more: str) -> float:
        """Runs undisturbed to the end; the seconds it took. Raises RuntimeError with what the run said if it fails."""
        began = time.monotonic()
        code = self.start(*more).wait(PATIENCE)
        if code != 0:
            raise RuntimeError(f"{self.folder}: exit code {code}\n{self.said()}")
        return time.monotonic() - began

    def strike(self, blow: Blow, *more: str) -> Struck:
        """Starts the command and strikes. Afterwards no process of it may live on: raises RuntimeError."""
        note = self.folder / f"note-{self.started + 1:03d}"
        extra = {}
        if blow.moment is not None:
            event, pattern = MOMENTS[blow.moment]
            point = {"event": event, "pattern": pattern} | {k: v for k, v in asdict(blow).items() if k != "moment"}
            extra = {"KILL_POINT": json.dumps(point), "KILL_NOTE": str(note)}
            extra["PYTHONPATH"] = os.pathsep.join(filter(None, [str(HERE / "kill_points"), os.environ.get("PYTHONPATH", "")]))
        run = self.start(*more, **extra)
        family = self._await_blow(run, blow, note)
        code = run.wait(PATIENCE)
        self._nobody_left(family)
        return Struck(blow, note.exists(), self.stage(), code)

    def _await_blow(self, run: Any, blow: Blow, note: Path) -> set[psutil.Process]:
        """Returns when the run has ended or was struck from outside; every process that was seen of it."""
        family, parent = set(), psutil.Process(run.pid)
        deadline = time.monotonic() + (blow.delay if blow.moment is None else PATIENCE)
        while run.poll() is None and time.monotonic() < deadline:
            try:
                family |= set(parent.children(recursive=True))
            except psutil.NoSuchProcess:
                break
            time.sleep(min(0.05, max(0.0, deadline - time.monotonic())))
        if blow.moment is None and run.poll() is None:
            note.touch()
            (os.killpg if blow.to == "group" else os.kill)(run.pid, signal.Signals[blow.signal])
        return family

    def _nobody_left(self, family: set[psutil.Process], patience: float = 120.0) -> None:
        _, alive = psutil.wait_procs([p for p in family if _lives(p)], timeout=patience)
        alive = [p for p in alive if _lives(p)]
        if alive:
            raise RuntimeError(f"{self.folder}: processes outlived the run: {[(p.pid, p.name()) for p in alive]}")

    def stage(self) -> str:
        """How far the folders say that the run has come: the stage that the next start will go on in."""
        runs = list(self.folder.glob("runs/*/config.yaml"))
        if not runs:
            return "start"
        run = runs[0].parent
        if (run / "record.json").exists():
            return "after the record"
        if (run / "train/result.json").exists():
            return "evaluation" if not (run / "eval/heldout/per_row.jsonl").exists() else "record writing"
        if list(run.glob("train/.checkpoint-*.tmp")):
            return "checkpoint writing"
        if (run / "train/metrics.jsonl").exists():
            return "model writing" if (run / "train/model").exists() else "training"
        if (run / "selection/header.json").exists():
            return "training start"
        if list(self.folder.glob("cache/features/*/manifest.json")):
            return "clustering"
        return "features" if list(self.folder.glob("cache/features/*/*")) else "preparing"

    def end_state(self) -> dict[str, Any]:
        """Every file of the run and of its features -> its content without times and places."""
        found = {}
        for top in ("runs", "cache/features"):
            for path in sorted((self.folder / top).rglob("*")):
                name = str(path.relative_to(self.folder))
                if path.is_file() and not IGNORED.search(name):
                    found[name] = self._content(path)
        return found

    def _content(self, path: Path) -> Any:
        data = path.read_bytes()
        if path.suffix not in (".json", ".jsonl", ".yaml"):
            return data
        text = data.decode().replace(str(self.folder), "FOLDER")
        if path.name == "config.yaml":
            return re.sub(r"^  (processes|feature_processes): .*$", "", text, flags=re.MULTILINE)
        parts = [line for line in text.splitlines() if line] if path.suffix == ".jsonl" else [text]
        return [_steady(json.loads(part)) for part in parts]

    def differences(self, reference: Chain) -> list[str]:
        """What differs from the reference, in words; empty when nothing does."""
        here, there = self.end_state(), reference.end_state()
        lines = [f"{name} is missing" for name in sorted(there.keys() - here.keys())]
        lines += [f"{name} is left over" for name in sorted(here.keys() - there.keys())]
        lines += [f"{name} differs" for name in sorted(here.keys() & there.keys()) if here[name] != there[name]]
        (metrics,) = self.folder.glob("runs/*/train/metrics.jsonl")
        steps = [json.loads(line)["step"] for line in metrics.read_text().splitlines()]
        if steps != list(range(1, len(steps) + 1)):
            lines.append(f"metrics.jsonl has the steps {steps}")
        return lines


def _steady(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: _steady(v) for k, v in value.items() if k not in VOLATILE and not k.endswith("_seconds")}
    return [_steady(v) for v in value] if isinstance(value, list) else value


def _lives(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def reference_run(folder: Path) -> tuple[Chain, float]:
    """The uninterrupted run, and its seconds."""
    chain = Chain(folder)
    return chain, chain.finish()


def fresh_chain(folder: Path, reference: Chain, *more: str, prefix: tuple[str, ...] = ()) -> Chain:
    """A chain that need not harvest the pool again; everything else is still to do."""
    chain = Chain(folder, *more, prefix=prefix)
    for part in (reference.folder / "cache").iterdir():
        if part.name != "features":
            shutil.copytree(part, chain.folder / "cache" / part.name)
    return chain


def unexpected(one: Struck, chain: Chain) -> list[str]:
    """A blow may end a run in few ways: SIGKILL, requeue, or not at all because it came too late."""
    good = {-signal.SIGKILL} if one.blow.signal == "SIGKILL" else {75, -signal.Signals[one.blow.signal]}
    if not one.fell or one.stage == "after the record":
        good |= {0}
    if one.code in good:
        return []
    return [f"{chain.folder.name}: exit code {one.code} after {one.blow} in stage {one.stage}: {chain.said()[-600:]}"]
