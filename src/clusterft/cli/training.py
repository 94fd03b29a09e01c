"""`clusterft train FOLDER`: the training stage of `run.py` on a finished selection.

Without options the run directory of the selection is continued. With other settings a further run directory is begun beside it,
with the same selection; nothing is overwritten.
"""

from __future__ import annotations

import argparse
import shutil
from collections.abc import Sequence
from pathlib import Path

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from clusterft import adaptive
from clusterft.api import check_unchanged, open_folder
from clusterft.cli.console import console, duration, facts_table
from clusterft.overrides import UserError
from clusterft.preflight import preflight
from clusterft.store import RunStore
from clusterft.trainer import TrainResult

OPTIONS = {
    "epochs": "trainer.epochs",
    "learning_rate": "trainer.learning_rate",
    "workers": "trainer.workers",
    "processes": "runtime.processes",
    "device": "runtime.device",
}


def run(args: argparse.Namespace) -> int:
    given = [f"{key}={getattr(args, name)}" for name, key in OPTIONS.items() if getattr(args, name) is not None]
    run_dir, trained = train_folder(args.folder, [*args.settings, *given])
    first, last = trained.losses[0], trained.losses[-1]
    warmup = OmegaConf.load(run_dir / "config.yaml").trainer.warmup_steps
    rows = [
        ("steps", f"{trained.steps} of {trained.total_steps}, {trained.tokens:,} tokens, {duration(trained.wall_seconds)}"),
        ("loss", f"{first:.4f} at the first step, {last:.4f} at the last"),
        ("model", str(run_dir / "train" / "model")),
    ]
    if trained.total_steps < 2 * warmup:
        rows.append(("look out", short_run(trained.total_steps, warmup)))
    console().print(facts_table("trained", rows))
    return 0


def short_run(steps: int, warmup: int) -> str:
    """What a person must know of a run that is over before its learning rate has got anywhere."""
    return (
        f"the learning rate rises over the first {warmup} steps, and this run has {steps}: it changed the model very little, so a "
        "comparison with it says little; train for more --epochs, or with --set trainer.warmup_steps=0"
    )


def train_folder(folder: Path, settings: Sequence[str]) -> tuple[Path, TrainResult]:
    """The run directory and what training found. Raises UserError, StoreError, or launch.WorkerError from a rank."""
    folder = folder.absolute()
    selected = open_folder(folder)
    check_unchanged(selected.header)
    cfg = changed(OmegaConf.load(selected.run_dir / "config.yaml"), settings)
    cfg.runtime.runs_dir = str(folder / "run")
    preflight(cfg)
    store = RunStore(folder / "run")
    run_dir = store.begin(cfg)
    with store.lock(run_dir.name):
        if not (run_dir / "selection" / "header.json").exists():
            copy_selection(selected.run_dir / "selection", run_dir / "selection")
        return run_dir, adaptive.train(cfg, run_dir)


def copy_selection(source: Path, target: Path) -> None:
    """The files of a first selection, its header last; re-selections below it belong to the run that made them."""
    target.mkdir(parents=True, exist_ok=True)
    for file in sorted((p for p in source.iterdir() if p.is_file()), key=lambda p: p.name == "header.json"):
        shutil.copy2(file, target / file.name)


def changed(cfg: DictConfig, settings: Sequence[str]) -> DictConfig:
    """The configuration with `KEY=VALUE` settings. Raises UserError for a key that is absent or that selection depended on."""
    OmegaConf.set_struct(cfg, True)
    for setting in settings:
        key, equals, _ = setting.partition("=")
        if not equals:
            raise UserError(f"--set {setting}: write KEY=VALUE, for example trainer.epochs=3")
        if key.split(".")[0] not in ("trainer", "sampler", "runtime", "evaluators"):
            raise UserError(f"--set {setting}: {key} belongs to the selection; select again to change it")
        before, value = OmegaConf.select(cfg, key), OmegaConf.select(OmegaConf.from_dotlist([setting]), key)
        if isinstance(before, int | float) and not isinstance(value, int | float):
            raise UserError(f"--set {setting}: {value!r} is no number, as {key}={before} is")
        try:
            OmegaConf.update(cfg, key, value)
        except OmegaConfBaseException as problem:
            raise UserError(f"--set {setting}: there is no such setting ({str(problem).splitlines()[0]})") from problem
    return cfg
