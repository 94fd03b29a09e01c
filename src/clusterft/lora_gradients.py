"""Projected gradients for LESS (Xia et al. 2024): of the pool's rows and of the validation rows, at every checkpoint of a LoRA
warm-up.

In come the pool, validation rows by subtask and the run's model; out comes, for every row and checkpoint, a unit vector of d
columns.

    warm-up     LoRA on a share of the pool, one checkpoint an epoch with moments
    pool        gradient ► what Adam would make of it ► projection ► unit length        rows
    validation  gradient                              ► projection ► unit length        extra

Rows are handled in groups: the gradients of a group are held while each checkpoint is put in, and its signs are made once for
all of them. Whole batches are dealt to ranks and projected sums are exact, so any number of ranks gives the same bits.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from clusterft.batching import TokenRow, plan_batches, row_of_encoded
from clusterft.exact import floor_product
from clusterft.feature_columns import LESS_REASONS
from clusterft.feature_context import FeatureContext
from clusterft.feature_writer import RowWriter
from clusterft.interfaces import FeatureSpec
from clusterft.lora_model import AdapterCheckpoint, LoraParams, load_checkpoint, lora_on, save_checkpoint
from clusterft.per_sample_gradients import ADAM_VARIANTS, GradientPass, adam_feature
from clusterft.progress import PassProgress
from clusterft.projection import SignProjection, unit_rows
from clusterft.proxy_pass import with_precision
from clusterft.records import Encoded
from clusterft.row_losses import count, without_eos
from clusterft.seeding import generator
from clusterft.warmup import Recipe, train_rows

GROUP_BYTES = 2 * 1024 * 1024 * 1024
"""Gradients held at a time. More rows share the making of the signs, up to where the matrix product is all that counts: 36 rows of
LoRA's 14.7 million values at rank 128 for a hidden size of 576."""


@dataclass(frozen=True)
class LessParams:
    """Parameters of the extractor.

    warmup_fraction  share of the pool that the warm-up trains on (released: 0.05), a prefix of a permutation of its ids
    training         `warmup.Recipe`: one checkpoint an epoch
    lora             `lora_model.LoraParams`
    precision        of the frozen weights and the activations (`proxy_pass.PRECISIONS`); adapters are float32
    adam_variant     official | paper | none, see `adam_feature`; validation rows always have the plain gradient
    dim              columns of the projection
    projection_seed  names the signs
    validation_eos   whether the EOS of a validation answer counts (released: no, while training rows have it)
    uses_validation  always true: the validation rows are part of the feature's key
    """

    warmup_fraction: str | float
    training: Mapping[str, Any]
    lora: Mapping[str, Any]
    precision: str
    adam_variant: str
    dim: int
    projection_seed: int
    validation_eos: bool
    uses_validation: bool = True

    def __post_init__(self) -> None:
        if self.adam_variant not in ADAM_VARIANTS:
            raise ValueError(f"adam_variant {self.adam_variant!r} is unknown; known are {', '.join(ADAM_VARIANTS)}")


def warmup_rows(encoded: Sequence[Encoded], fraction: str | float, seed: int) -> list[Encoded]:
    """floor(fraction n) rows, at least one: the first that have a response in a permutation of the ids."""
    ordered = sorted(encoded, key=lambda e: e.id)
    order = generator(seed, "less-warmup").permutation(len(ordered))
    taught = [ordered[i] for i in order if ordered[i].n_target]
    return taught[: max(1, floor_product(fraction, len(ordered)))]


def epoch_rates(recipe: Recipe, n_rows: int) -> list[float]:
    """Mean learning rate of each epoch: the weights of the checkpoints (LESS, eq. 1), not yet normalised."""
    rates, per_epoch = recipe.rates(n_rows), recipe.steps_per_epoch(n_rows)
    return [float(np.mean(rates[e * per_epoch : (e + 1) * per_epoch])) for e in range(recipe.epochs)]


def check_validation(context: FeatureContext) -> None:
    """Raises ValueError, before anything is trained, if there are no validation rows, an empty subtask, or rows of the pool
    among them."""
    if not context.validation:
        raise ValueError("LESS needs validation rows, and there are none; set data.holdout_rows, or name a validation set")
    empty = [name for name, rows in context.validation.items() if not any(r.n_target for r in rows)]
    if empty:
        raise ValueError(f"LESS: validation subtask {empty[0]!r} has no row with a response token; remove it or add rows")
    shared = set(context.pool.ids) & {r.id for rows in context.validation.values() for r in rows}
    if shared:
        raise ValueError(f"LESS: {len(shared)} validation rows are rows of pool {context.pool.name!r}, for example {min(shared)}")


def extract_lora_gradients(context: FeatureContext, spec: FeatureSpec, writer: RowWriter) -> None:
    """Extractor: rows (n, t d + 1) float16, t unit vectors and then the number of a reason (LESS_REASONS) why they are zero.

    Extra: `validation` (v, t d), `subtask` (v,) numbers into `subtask_names`, `rates` (t,) mean learning rates, `projection` its
    fingerprint. Params: `LessParams`. Resumable: finished checkpoints and rows are kept.
    """
    params = LessParams(**spec.params)
    check_validation(context)
    assert context.work_dir is not None
    autocast = params.precision == "bf16_autocast"
    base = with_precision(context.load_model(), "float32" if autocast else params.precision)
    with lora_on(base, LoraParams(**params.lora)) as model:
        checkpoints = _checkpoints(model, context, params, writer)
        ready = GradientPass(model, autocast=autocast)
        projection = SignProjection(
            ready.n_features, params.dim, params.projection_seed, backend="numba" if ready.device.type == "cpu" else "torch"
        )
        work = _Work(ready, checkpoints, projection, params.adam_variant, writer)
        if context.dist.rank == 0:
            _put_validation(work, context, params)
        _put_pool(work, context, spec.name)
        ready.restore()
    context.dist.barrier()


def _checkpoints(model: Any, context: FeatureContext, params: LessParams, writer: RowWriter) -> list[AdapterCheckpoint]:
    """The warm-up's checkpoints: read where an earlier attempt finished them, else trained. The list is derived, never typed
    in."""
    recipe = Recipe(**params.training)
    rows = warmup_rows(context.encoded, params.warmup_fraction, recipe.seed)
    rates, per_epoch = epoch_rates(recipe, len(rows)), recipe.steps_per_epoch(len(rows))
    assert context.work_dir is not None
    files = [context.work_dir / f"checkpoint-{(e + 1) * per_epoch}.safetensors" for e in range(recipe.epochs)]

    def keep(step: int, optimizer: torch.optim.Optimizer) -> None:
        if step % per_epoch == 0 and context.dist.rank == 0:
            save_checkpoint(files[step // per_epoch - 1], model, optimizer, step=step, rate=rates[step // per_epoch - 1])

    present = all(f.exists() for f in files)
    context.dist.barrier()  # everybody has looked before anybody writes
    if not present:
        train_rows(model, rows, recipe, dist=context.dist, token_budget=context.token_budget, on_step=keep)
        context.dist.barrier()
        if context.dist.rank == 0:
            ready = GradientPass(model)
            for _ in range(recipe.epochs):
                count(writer, ready, [row_of_encoded(r) for r in rows], backward=True)
    writer.note(warmup_rows=len(rows), warmup_updates=recipe.epochs * per_epoch, checkpoint_rates=rates)
    return [load_checkpoint(f) for f in files]


@dataclass(frozen=True)
class _Work:
    ready: GradientPass
    checkpoints: Sequence[AdapterCheckpoint]
    projection: SignProjection
    variant: str
    writer: RowWriter

    @property
    def width(self) -> int:
        return len(self.checkpoints) * self.projection.dim

    def vectors(self, batches: Sequence[Sequence[TokenRow]], *, adam: bool) -> tuple[np.ndarray, np.ndarray]:
        """(b, t d) float16 unit vectors and (b,) whether all of a row's are finite, for the rows of some batches."""
        parts = []
        starts = np.cumsum([0, *map(len, batches)])
        gradients = torch.empty(int(starts[-1]), self.projection.n_features, device=self.ready.device)
        for checkpoint in self.checkpoints:
            checkpoint.load_into(self.ready.model)
            for start, batch in zip(starts[:-1], batches, strict=True):
                gradients[start : start + len(batch)] = self.ready.gradients(batch)
            if adam and self.variant != "none":
                first, second = (m.to(gradients.device) for m in checkpoint.flat_moments())
                for row in gradients.split(1):
                    row.copy_(adam_feature(row, first, second, variant=self.variant, step=checkpoint.step + 1))
            parts.append(unit_rows(self.projection.project(gradients)))
        for batch in batches:
            for _ in self.checkpoints:
                count(self.writer, self.ready, batch, backward=True)
        found = torch.cat(parts, 1).cpu().numpy()
        finite = np.isfinite(found).all(axis=1)
        return np.where(finite[:, None], found, 0).astype(np.float16), finite


def _put_validation(work: _Work, context: FeatureContext, params: LessParams) -> None:
    """Validation features, in the order of subtasks and ids. Raises ValueError if a gradient is not finite."""
    names = sorted(context.validation)
    rows = [(n, r) for n, name in enumerate(names) for r in sorted(context.validation[name], key=lambda r: r.id) if r.n_target]
    eos = context.tokenizer.eos_token_id
    tokens = [row_of_encoded(r if params.validation_eos else without_eos(r, eos)) for _, r in rows]
    kept = [i for i, t in enumerate(tokens) if len(t)]
    plan = plan_batches([len(tokens[i]) for i in kept], [rows[i][1].id for i in kept], context.token_budget)
    vectors = np.empty((len(kept), work.width), np.float16)
    for group in _groups(plan, work.projection.n_features):
        found, finite = work.vectors([[tokens[kept[i]] for i in batch] for batch in group], adam=False)
        flat = [i for batch in group for i in batch]
        if not finite.all():
            bad = rows[kept[flat[int(np.argmin(finite))]]][1].id
            raise ValueError(f"LESS: the gradient of validation row {bad} is not finite")
        vectors[flat] = found
    work.writer.put_extra(
        validation=vectors,
        subtask=np.array([rows[i][0] for i in kept]),
        subtask_names=np.array(names),
        rates=np.array([c.rate for c in work.checkpoints]),
        projection=np.array(work.projection.fingerprint),
    )


def _put_pool(work: _Work, context: FeatureContext, name: str) -> None:
    tokens = [row_of_encoded(e) for e in context.encoded]
    lengths = [len(t) for t in tokens]
    writer = work.writer
    if context.dist.rank == 0:
        nothing = np.flatnonzero((np.array(lengths) == 0) & ~writer.done)
        writer.put(nothing, _with_reason(np.zeros((len(nothing), work.width), np.float16), "no_target_tokens"))
    remaining = [b for b in plan_batches(lengths, context.pool.ids, context.token_budget) if not writer.done[b].all()]
    mine = remaining[context.dist.rank :: context.dist.world]
    shown = context.progress and context.dist.rank == 0
    with PassProgress(name, sum(map(len, mine)), sum(lengths[i] for b in mine for i in b), shown=shown) as bar:
        for group in _groups(mine, work.projection.n_features):
            flat = np.array([i for batch in group for i in batch])
            vectors, finite = work.vectors([[tokens[i] for i in batch] for batch in group], adam=True)
            writer.put(flat[finite], _with_reason(vectors[finite], ""))
            writer.put(flat[~finite], _with_reason(vectors[~finite], "nonfinite"))
            bar.advance(len(flat), sum(lengths[i] for i in flat))


def _with_reason(vectors: np.ndarray, reason: str) -> np.ndarray:
    return np.hstack([vectors, np.full((len(vectors), 1), LESS_REASONS.index(reason), np.float16)])


def _groups(batches: Sequence[list[int]], n_features: int) -> list[list[list[int]]]:
    """Batches put together until their gradients fill GROUP_BYTES."""
    groups: list[list[list[int]]] = []
    held = 0
    for batch in batches:
        size = 4 * n_features * len(batch)
        if not groups or held + size > GROUP_BYTES:
            groups.append([])
            held = 0
        groups[-1].append(batch)
        held += size
    return groups


def checkpoint_files(folder: Path) -> list[Path]:
    """The warm-up's checkpoints in a feature's work folder, by update."""
    return sorted(folder.glob("checkpoint-*.safetensors"), key=lambda f: int(f.stem.split("-")[1]))
