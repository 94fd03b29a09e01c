"""What is checked before any work: the machine, the hub, the disk, the selector, the evaluators' data.

Each check raises PreflightError with one sentence that names what was asked, what was found and what to do. Nothing is loaded.
"""

from __future__ import annotations

import math
import os
import shutil
from pathlib import Path

from omegaconf import DictConfig

from clusterft import evaluation, stages
from clusterft.arithmetic import check_arithmetic, check_attention
from clusterft.engine_names import check_engine
from clusterft.nodes import check_layout
from clusterft.overrides import UserError
from clusterft.segments import check_reselection, period
from clusterft.tracking import check_online

LAPTOP_HINT = "try +scale=laptop, which needs neither GPU nor network"


class PreflightError(UserError):
    """Something that the run needs is not there."""


def preflight(cfg: DictConfig) -> None:
    """Raises PreflightError for the first thing that is missing."""
    check_sizes(cfg)
    check_layout(cfg.runtime, os.environ)
    check_device(cfg)
    check_engine(cfg.trainer)
    check_formats(cfg)
    check_hub(cfg)
    check_disk(cfg)
    check_online(cfg.runtime.wandb)
    check_reselection(cfg.sampler, stages.make_selector(cfg), epochs=cfg.trainer.epochs)
    for evaluator in evaluation.evaluators(cfg).values():
        check = getattr(evaluator, "preflight", None)
        if check is not None:
            check()


def check_sizes(cfg: DictConfig) -> None:
    """Numbers that contradict each other."""
    trainer, runtime = cfg.trainer, cfg.runtime
    if not 1 <= runtime.processes <= trainer.workers:
        raise PreflightError(
            f"runtime.processes is {runtime.processes}, but trainer.workers is {trainer.workers}: "
            "a process carries one worker or several, so choose 1 ... trainer.workers processes"
        )
    if trainer.global_batch < trainer.workers:
        raise PreflightError(
            f"trainer.global_batch {trainer.global_batch} is below trainer.workers {trainer.workers}; each needs a row"
        )
    if trainer.epochs < 1:
        raise PreflightError(f"trainer.epochs={trainer.epochs}: at least one pass over the rows is needed")
    if not (math.isfinite(trainer.learning_rate) and trainer.learning_rate > 0):
        raise PreflightError(f"trainer.learning_rate={trainer.learning_rate} is no rate above 0, such as 5e-5")
    if cfg.seed < 0:
        raise PreflightError(f"seed {cfg.seed} is negative; use 0, 1, 2, ...")


def check_device(cfg: DictConfig) -> None:
    """Enough GPUs for the processes of this node."""
    if cfg.runtime.device == "cpu":
        return
    import torch

    found = torch.cuda.device_count() if torch.cuda.is_available() else 0
    wanted = -(-cfg.runtime.processes // cfg.runtime.nodes)
    if found < wanted:
        raise PreflightError(f"this run wants {wanted} CUDA devices on this machine and found {found}; {LAPTOP_HINT}")


def check_formats(cfg: DictConfig) -> None:
    """The number formats and the attention kernel are there on the device. Raises ValueError."""
    import torch

    check_arithmetic(cfg.trainer, torch.device(cfg.runtime.device))
    check_attention(cfg.model, cfg.runtime.device)


def check_hub(cfg: DictConfig) -> None:
    """A hub model or data set is in the local cache, or the hub answers."""
    wanted = []
    if cfg.model.source == "hub":
        wanted.append(("model", cfg.model.path, cfg.model.revision))
    if cfg.data.kind == "hub":
        wanted.append(("dataset", cfg.data.path, cfg.data.revision))
    for kind, name, revision in wanted:
        if not _reachable(kind, name, revision):
            raise PreflightError(
                f"the {kind} {name} is not in the local hub cache and the hub does not answer; fetch it on a connected machine "
                f"with `python -m eval.prefetch {kind} {name}`, or {LAPTOP_HINT}"
            )


def _reachable(kind: str, name: str, revision: str | None) -> bool:
    from huggingface_hub import HfApi, scan_cache_dir
    from huggingface_hub.errors import CacheNotFound, HfHubHTTPError

    try:
        cached = {(repo.repo_type, repo.repo_id) for repo in scan_cache_dir().repos}
    except CacheNotFound:
        cached = set()
    if (kind, name) in cached:
        return True
    if os.environ.get("HF_HUB_OFFLINE", "0") not in ("", "0"):
        return False
    try:
        HfApi().repo_info(name, repo_type=kind, revision=revision, timeout=10)
    except (HfHubHTTPError, OSError):
        return False
    return True


def check_disk(cfg: DictConfig) -> None:
    """Room for the checkpoints that may lie side by side, and for the cache."""
    parameters = cfg.model.shape.parameters if "parameters" in cfg.model.shape else 0
    copies = 2 + (cfg.trainer.keep_last * 3 if cfg.trainer.checkpoint_every_steps or period(cfg.sampler) else 0)
    wanted = parameters * (4 if cfg.model.weights_dtype == "float32" else 2) * copies + 200 * 2**20
    folder = Path(cfg.runtime.runs_dir).absolute()
    while not folder.exists():
        folder = folder.parent
    if not folder.is_dir():
        raise PreflightError(f"{folder} is no folder, so nothing can be written below it; set runtime.runs_dir to another place")
    if not os.access(folder, os.W_OK):
        raise PreflightError(f"{folder} cannot be written to; set runtime.runs_dir to a folder that can")
    free = shutil.disk_usage(folder).free
    if free < wanted:
        raise PreflightError(
            f"{folder} has {free / 2**30:.1f} GiB free and this run may write {wanted / 2**30:.1f} GiB; free some or set runtime.runs_dir"
        )
