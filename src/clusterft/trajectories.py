"""Loss trajectories (S2L: Yang et al. 2024, "SmallToLarge"): how the loss of each row falls while a small proxy model learns
the pool.

In come the pool and a small model; out come, for every row, the mean response loss at a few moments of the training.

    pool ► proxy's own tokenizer and the recipe's prompt format ► fine-tuning of the whole proxy ► at each moment: loss of every
    row

The moments are spread evenly over the whole training (the released settings keep the last twelve checkpoints only, so on a
large pool they see its final part). No checkpoint of weights is kept: a moment's losses are written as soon as they are known.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from omegaconf import OmegaConf

from clusterft.atomic import write_atomic
from clusterft.batching import TokenRow, row_of_encoded
from clusterft.feature_context import FeatureContext
from clusterft.feature_writer import RowWriter
from clusterft.interfaces import FeatureSpec
from clusterft.models import load_model, load_tokenizer
from clusterft.prompting import encode_example
from clusterft.records import Encoded
from clusterft.row_losses import LossPass, mean_losses
from clusterft.warmup import Recipe, train_rows

log = logging.getLogger(__name__)

_WEIGHTS = ("source", "path", "revision", "gguf_file", "sha256", "architecture", "weights_dtype", "shape")


@dataclass(frozen=True)
class TrajectoryParams:
    """Parameters of the extractor.

    model       the proxy as a model configuration (conf/model), or None for a copy of the run's own model with its tokens,
                which is also what a configuration of the same weights gets
    template    prompt format of the proxy's rows (released: alpaca); unused without `model`
    max_length  tokens at which the proxy's rows are cut (released: 512); unused without `model`
    points      moments at which losses are taken, the last one after the last update
    training    `warmup.Recipe`
    """

    model: Mapping[str, Any] | None
    template: str
    max_length: int
    points: int
    training: Mapping[str, Any]


def moments(total_steps: int, points: int) -> list[int]:
    """Updates (1-based) after which losses are taken: evenly spread, ending with the last; fewer where there are fewer updates.

    Raises ValueError if points < 1.
    """
    if points < 1:
        raise ValueError(f"points is {points}; a trajectory needs at least 1")
    return sorted({-(-total_steps * k // points) for k in range(1, points + 1)})


def proxy_rows(context: FeatureContext, params: TrajectoryParams) -> tuple[Any, list[Encoded]]:
    """The proxy model, free to be trained, and the pool in its tokens, aligned with the pool.

    Raises ValueError for a GGUF proxy without model.sha256, and ModelError for one that is not there.
    """
    if params.model is None or _is_the_runs(params.model, context):
        return copy.deepcopy(context.load_model()), list(context.encoded)
    if params.model["source"] == "gguf" and params.model["sha256"] is None:
        raise ValueError(
            f"S2L: the proxy model {params.model['name']} is a GGUF file without model.sha256, which names its weights"
        )
    cfg = OmegaConf.create(dict(params.model))
    tokenizer = load_tokenizer(cfg, **context.places)
    encoded = [encode_example(e, tokenizer, params.template, params.max_length) for e in context.pool.examples]
    return load_model(cfg, device=str(context.dist.device), **context.places), encoded


def _is_the_runs(model: Mapping[str, Any], context: FeatureContext) -> bool:
    """Whether both configurations name the same weights, so that the run's loaded model can serve."""
    return all(model[name] == getattr(context.model_cfg, name) for name in _WEIGHTS)


def extract_trajectories(context: FeatureContext, spec: FeatureSpec, writer: RowWriter) -> None:
    """Extractor: rows (n, 2t) float32, t losses and then t flags: 1 where the loss is finite, 0 where there is none (stored as
    0).

    Rows without a response token in the proxy's length have no losses and take no part in the training. Extra: `steps` (t,).
    Params: `TrajectoryParams`.
    """
    params = TrajectoryParams(**spec.params)
    recipe = Recipe(**params.training)
    model, encoded = proxy_rows(context, params)
    taught = [e for e in encoded if e.n_target]
    log.info("%s: %d of %d rows have a response within the proxy's length", spec.name, len(taught), len(encoded))
    steps = moments(recipe.epochs * recipe.steps_per_epoch(len(taught)), params.points)
    rows = [row_of_encoded(e) for e in encoded]
    places = np.argsort(np.array(context.pool.ids), kind="stable")  # files hold rows in the order of their ids

    def look(step: int, _: torch.optim.Optimizer) -> None:
        file = _file(context.work_dir, step)
        if step in steps and not file.exists():
            losses = mean_losses(
                model,
                [rows[i] for i in places],
                [context.pool.ids[i] for i in places],
                token_budget=context.token_budget,
                precision=recipe.precision,
                dist=context.dist,
            )
            if context.dist.rank == 0:
                write_atomic(file, losses.tobytes())

    assert context.work_dir is not None
    train_rows(
        model,
        taught,
        recipe,
        dist=context.dist,
        token_budget=context.token_budget,
        on_step=look,
        state_file=context.work_dir / "training.pt",
    )
    context.dist.barrier()
    if context.dist.rank == 0:
        _store(context, writer, steps, places)
        _account(writer, model, rows, [row_of_encoded(e) for e in taught], recipe.epochs, len(steps))
        (context.work_dir / "training.pt").unlink()


def _file(folder: Path | None, step: int) -> Path:
    assert folder is not None
    return folder / f"losses-{step:06d}.f32"


def _store(context: FeatureContext, writer: RowWriter, steps: Sequence[int], places: np.ndarray) -> None:
    columns = [np.frombuffer(_file(context.work_dir, step).read_bytes(), np.float32) for step in steps]
    losses = np.stack(columns, axis=1)
    finite = np.isfinite(losses)
    rows = np.hstack([np.where(finite, losses, 0), finite]).astype(np.float32)
    writer.put(places, rows)
    writer.put_extra(steps=np.array(steps))


def _account(
    writer: RowWriter, model: Any, rows: Sequence[TokenRow], taught: Sequence[TokenRow], epochs: int, points: int
) -> None:
    ready = LossPass(model)
    once = ready.flops([r for r in rows if len(r)])
    ready.restore()
    passes = epochs * len(taught)
    writer.add_cost(
        flops=3 * epochs * ready.flops(list(taught)) + points * once,
        forward_passes=passes + points * len(rows),
        backward_passes=passes,
    )
