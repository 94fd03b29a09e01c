"""The weighted loss: one number, however the rows are spread over ranks, micro-batches and accumulation steps.

In come logits (or only those at positions that have a target), labels and a weight a row; out comes the part of the step's
loss that this micro-batch holds. Two definitions, by name (S = rows of the global step, T_i = target tokens of row i, l_it
their losses):

    sample   L = sum_i w_i (sum_t l_it / T_i) / sum_i w_i          a row counts by its weight
    token    L = sum_i w_i  sum_t l_it        / sum_i w_i T_i      a row counts by weight times length

The denominators run over the whole global step: `step_denominator`. The gradient is then the plain sum of the micro-batches'
gradients over all ranks (averaging engines such as DDP: pass scale=world). With w_c = K pi_c and B/K rows of each cluster the
denominator of `sample` is B, so that the gradient is sum_c pi_c gbar_c (paper, section 4); in a short or uneven step the sum of
weights, not B, keeps it a mean. Rows without target tokens have no loss and count in neither sum.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from clusterft.heads import OutputHead, body_of, last_hidden
from clusterft.records import IGNORE_INDEX

REDUCTIONS = ("sample", "token")


def check_reduction(reduction: str) -> str:
    """Raises ValueError for a name that is not one of REDUCTIONS."""
    if reduction not in REDUCTIONS:
        raise ValueError(f"loss_reduction={reduction!r} is not one of {', '.join(REDUCTIONS)}")
    return reduction


def per_sample_loss(output: Any, labels: Tensor, reduction: str = "sample") -> tuple[Tensor, Tensor]:
    """((n,) losses, (n,) target tokens) from logits (n, t, v) or a model output that has `.logits`; labels (n, t), not shifted.

    `sample`: mean over the row's target tokens; `token`: their sum. Zero for rows without targets. Computed in float32 (float64
    where the logits are). Raises ValueError if shapes do not fit.
    """
    check_reduction(reduction)
    logits = output if isinstance(output, Tensor) else output.logits
    if logits.shape[:2] != labels.shape:
        raise ValueError(
            f"logits {tuple(logits.shape)} do not fit labels {tuple(labels.shape)}; pass the model's full, unshifted logits"
        )
    targets = labels[:, 1:]
    rows, _ = torch.nonzero(targets != IGNORE_INDEX, as_tuple=True)
    keep = targets != IGNORE_INDEX
    return _reduce(logits[:, :-1][keep], targets[keep], rows, len(labels), reduction)


def _reduce(logits: Tensor, targets: Tensor, rows: Tensor, n: int, reduction: str) -> tuple[Tensor, Tensor]:
    """Target logits (s, v), their labels (s,) and rows (s,) -> per-row losses and counts."""
    wide = logits if logits.dtype == torch.float64 else logits.float()
    losses = F.cross_entropy(wide, targets.long(), reduction="none")
    sums = torch.zeros(n, dtype=losses.dtype, device=losses.device).index_add(0, rows, losses)
    tokens = torch.bincount(rows, minlength=n)
    return (sums / tokens.clamp(min=1) if reduction == "sample" else sums), tokens


def step_denominator(weights: Sequence[float], tokens: Sequence[int], reduction: str) -> float:
    """The divisor of a global step: sum of weights (times target tokens) over its rows that have targets. 0: none has."""
    check_reduction(reduction)
    pairs = [(float(w), int(t)) for w, t in zip(weights, tokens, strict=True) if t > 0]
    return sum(w * t for w, t in pairs) if reduction == "token" else sum(w for w, _ in pairs)


def weighted_loss(
    output: Any,
    labels: Tensor,
    weights: Tensor,
    *,
    reduction: str = "sample",
    denominator: float | Tensor | None = None,
    scale: float = 1.0,
) -> Tensor:
    """This micro-batch's part of the step's loss: scale * sum_i w_i l_i / denominator, a scalar to call backward on.

    weights      (n,) of the rows in this micro-batch
    denominator  `step_denominator` of the whole global step over all ranks; None: these rows are the whole step
    scale        what undoes the engine's averaging: world for DDP and accelerate, 1 where gradients are summed

    An empty micro-batch, or one without targets, gives 0 with a graph, so that backward works on idle ranks too.
    """
    losses, tokens = per_sample_loss(output, labels, reduction)
    return combine(losses, tokens, weights, reduction=reduction, denominator=denominator, scale=scale)


def combine(
    losses: Tensor, tokens: Tensor, weights: Tensor, *, reduction: str, denominator: float | Tensor | None, scale: float = 1.0
) -> Tensor:
    """`weighted_loss` from per-row losses (n,) and counts (n,). Raises ValueError if `denominator` is not positive."""
    weights = weights.to(device=losses.device, dtype=losses.dtype)
    if denominator is None:
        counted = weights * (tokens > 0) if reduction == "sample" else weights * tokens
        denominator = float(counted.sum()) or 1.0
    if not float(denominator) > 0:
        raise ValueError(f"the step's denominator is {float(denominator)}: it has no target tokens, or weights are not positive")
    return scale * (weights * losses).sum() / denominator


def target_loss(
    model: nn.Module,
    head: OutputHead | None,
    input_ids: Tensor,
    attention_mask: Tensor | None,
    labels: Tensor,
    reduction: str,
) -> tuple[Tensor, Tensor]:
    """Per-row losses and counts as `per_sample_loss`, with logits only where there is a target; head=None: full logits.

    input_ids, labels (n, t); attention_mask (n, t), None where nothing is padded. Logits take targets x v instead of n x t x v.
    `head` comes from `heads.find_head`, which refuses a model whose head it does not understand.
    """
    if head is None:
        output = model(input_ids=input_ids, attention_mask=attention_mask, use_cache=False)
        return per_sample_loss(output, labels, reduction)
    hidden = last_hidden(body_of(model), input_ids=input_ids, attention_mask=attention_mask)
    targets = labels[:, 1:]
    keep = targets != IGNORE_INDEX
    rows, _ = torch.nonzero(keep, as_tuple=True)
    return _reduce(head.logits(hidden[:, :-1][keep]), targets[keep], rows, len(labels), reduction)
