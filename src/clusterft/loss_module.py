"""The model and its step loss as one module: one `forward` in which every weight is used.

Engines that keep weights in shards gather them around a module's `forward`. The training step calls a model's body and its head
apart from each other (see loss.target_loss), which such an engine would not notice; here both happen inside one forward.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn

from clusterft.heads import OutputHead
from clusterft.loss import combine, target_loss


class LayerHead:
    """`OutputHead` whose matrix is looked up at every call: a sharded engine puts another tensor there for the time of a forward."""

    def __init__(self, layer: nn.Linear, head: OutputHead) -> None:
        self._layer, self._head = layer, head

    def logits(self, hidden: Tensor) -> Tensor:
        """(r, h) -> (r, v). Calls the layer itself, so that hooks on it run."""
        return self._head.finish(self._layer(hidden.to(self._layer.weight.dtype)))


class LossModule(nn.Module):
    """forward(ids, mask, labels, weights, denominator) -> this micro-batch's part of the step's loss, a scalar.

    head           of `heads.find_head`, or None for full logits
    bf16_autocast  products in bf16; casts are not kept, because a kept cast would hold the whole model on every rank
    """

    def __init__(self, model: nn.Module, head: OutputHead | None, reduction: str, *, bf16_autocast: bool) -> None:
        super().__init__()
        self.model, self.reduction, self.bf16_autocast = model, reduction, bf16_autocast
        self._head = None if head is None else LayerHead(model.get_output_embeddings(), head)

    def forward(self, ids: Tensor, mask: Tensor | None, labels: Tensor, weights: Tensor, denominator: float) -> Tensor:
        with torch.autocast(ids.device.type, dtype=torch.bfloat16, enabled=self.bf16_autocast, cache_enabled=False):
            losses, tokens = target_loss(self.model, self._head, ids, mask, labels, self.reduction)
            return combine(losses, tokens, weights, reduction=self.reduction, denominator=denominator)


def twin_of(model: nn.Module) -> Any:
    """A copy of the modules whose parameters are new objects on the same memory (tied ones stay tied).

    A sharding engine rebuilds the modules that it is given and hangs hooks on them. It gets the twin; the caller's model keeps its modules and
    its parameters' identity, and gets the trained values back at the end.
    """
    memo: dict[int, Any] = {id(p): nn.Parameter(p.data, requires_grad=p.requires_grad) for p in model.parameters()}
    memo |= {id(b): b for b in model.buffers()}
    return copy.deepcopy(model, memo)


def release(model: nn.Module) -> None:
    """Drops the memory of all parameters; `p.data = ...` gives it back."""
    for parameter in model.parameters():
        parameter.data = torch.empty(0, dtype=parameter.dtype, device=parameter.device)
