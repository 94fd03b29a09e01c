"""The evaluation stage: every configured evaluator on the trained model.

In come the frozen configuration and `train/model` of a run; out come Metrics, and per-problem results below `eval/`. Evaluators that share
their work over ranks run in runtime.evaluation_processes processes, the others in this one.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from clusterft import stages
from clusterft.atomic import write_atomic
from clusterft.config import load_frozen
from clusterft.distributed import Dist
from clusterft.interfaces import EvalContext
from clusterft.records import Metric
from clusterft.targets import build


def evaluators(cfg: DictConfig, ready: stages.Prepared | None = None, dist: Dist | None = None) -> dict[str, Any]:
    """Every configured evaluator, made; making one is cheap. Without `ready` they have no held-out rows: enough for a preflight."""
    context = EvalContext(
        model=cfg.model,
        template=cfg.data.template,
        max_length=cfg.trainer.max_length,
        assets_dir=Path(cfg.runtime.assets_dir),
        device=cfg.runtime.device,
        precision=cfg.trainer.precision,
        threads=cfg.runtime.feature_threads,
        heldout=ready.heldout if ready else (),
        heldout_groups=ready.heldout_groups if ready else (),
        progress=cfg.runtime.progress,
        dist=dist,
    )
    nodes = OmegaConf.to_container(cfg.evaluators, resolve=True)
    return {name: build(f"evaluators.{name}", node, context=context) for name, node in nodes.items()}


def evaluate(cfg: DictConfig, ready: stages.Prepared, run_dir: Path) -> list[Metric]:
    """Scores the trained model with every configured evaluator.

    With runtime.evaluation_processes above 1, those that shard their work run in so many processes first; the others follow here.
    """
    shared: dict[str, list[Metric]] = {}
    if cfg.runtime.evaluation_processes > 1 and any(_sharded(e) for e in evaluators(cfg, ready).values()):
        layout = {"processes": cfg.runtime.evaluation_processes, "threads": cfg.runtime.feature_threads, "run_dir": run_dir}
        stages.run_on_workers(cfg, "clusterft.evaluation:evaluate_entry", **layout)
        shared = {
            name: [Metric(**m) for m in found]
            for name, found in json.loads((run_dir / "eval" / "sharded.json").read_text(encoding="utf-8")).items()
        }
    metrics: list[Metric] = []
    for name, evaluator in evaluators(cfg, ready).items():
        metrics += shared[name] if name in shared else _scored(evaluator, run_dir, name)
    return metrics


def evaluate_entry(*, dist: Dist, config_path: str) -> None:
    """One rank of the evaluation stage: the evaluators that shard their work; rank 0 writes eval/sharded.json."""
    cfg = load_frozen(Path(config_path))
    run_dir = Path(config_path).parent
    found = {name: _scored(e, run_dir, name) for name, e in evaluators(cfg, dist=dist).items() if _sharded(e)}
    if dist.is_main:
        text = json.dumps({name: [asdict(m) for m in metrics] for name, metrics in found.items()}, indent=1)
        write_atomic(run_dir / "eval" / "sharded.json", text)


def _sharded(evaluator: Any) -> bool:
    return getattr(evaluator, "sharded", False)


def _scored(evaluator: Any, run_dir: Path, name: str) -> list[Metric]:
    out = run_dir / "eval" / name
    out.mkdir(parents=True, exist_ok=True)
    return evaluator.evaluate(run_dir / "train" / "model", out)
