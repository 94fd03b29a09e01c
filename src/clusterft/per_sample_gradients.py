"""Gradients of each sample's own loss with respect to LoRA adapters, many samples a pass.

In come a model with adapters and packed rows of tokens; out comes a flat gradient a sample, (b, p) float32, the tensors in the
model's order.

A linear layer's gradient is the sum over tokens of (gradient at its output) x (its input). Samples do not see each other, so
cutting that sum at the borders of the samples gives each one's own gradient: one forward and one backward pass serve the whole
batch, and the frozen weights' gradients are never made. `slow_gradients`, one sample and one backward pass at a time, is the
twin.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from clusterft.batching import TokenRow
from clusterft.lora_model import adapter_parameters
from clusterft.row_losses import LossPass

ADAM_VARIANTS = ("official", "paper", "none")
BETA_1, BETA_2, EPSILON = 0.9, 0.999, 1e-8


class GradientPass(LossPass):
    """A model with adapters made ready: in evaluation mode, packed, every adapter a plain linear layer.

    Raises ValueError naming a trainable tensor that is not the weight of a linear layer.
    """

    def __init__(self, model: Any, *, layout: str = "packed", autocast: bool = False) -> None:
        super().__init__(model, layout=layout, autocast=autocast)
        self.named = adapter_parameters(model)
        self.n_features = sum(p.numel() for p in self.named.values())
        owners = {id(p): module for module in model.modules() for p in module.parameters(recurse=False)}
        odd = [name for name, p in self.named.items() if not isinstance(owners[id(p)], nn.Linear) or p.ndim != 2]
        if odd or not self.named:
            raise ValueError(f"per-sample gradients need trainable linear weights only; found {odd or 'nothing trainable'}")
        self.layers = [owners[id(p)] for p in self.named.values()]

    def gradients(self, batch: Sequence[TokenRow]) -> Tensor:
        """(b, p) float32: the gradient of each row's mean response loss. Every row must have a response token."""
        seen: dict[nn.Module, tuple[Tensor, Tensor]] = {}
        hooks = [layer.register_forward_hook(lambda m, i, o: seen.__setitem__(m, (i[0], o))) for layer in self.layers]
        try:
            with torch.enable_grad():
                loss = self.losses(batch).sum()
        finally:
            for hook in hooks:
                hook.remove()
        at_outputs = torch.autograd.grad(loss, [seen[layer][1] for layer in self.layers])
        return self._per_sample([len(r) for r in batch], [seen[layer][0].detach() for layer in self.layers], at_outputs)

    def _per_sample(self, lengths: Sequence[int], inputs: Sequence[Tensor], at_outputs: Sequence[Tensor]) -> Tensor:
        out = torch.empty(len(lengths), self.n_features, device=self.device)
        start = 0
        for x, d in zip(inputs, at_outputs, strict=True):
            size = x.shape[-1] * d.shape[-1]
            parts = zip(x[0].float().split(lengths), d[0].float().split(lengths), strict=True)
            for row, (x_one, d_one) in enumerate(parts):
                torch.mm(d_one.T, x_one, out=out[row, start : start + size].view(d.shape[-1], x.shape[-1]))
            start += size
        return out

    def slow_gradients(self, batch: Sequence[TokenRow]) -> Tensor:
        """The twin of `gradients`: batch 1, autograd on the weights, as the released code does it."""
        rows = []
        for row in batch:
            parts = torch.autograd.grad(self.losses([row]).sum(), list(self.named.values()))
            rows.append(torch.cat([g.flatten().float() for g in parts]))
        return torch.stack(rows)


def adam_feature(gradients: Tensor, first: Tensor, second: Tensor, *, variant: str, step: int) -> Tensor:
    """(b, p) what an Adam update would be made of, for each gradient (b, p) alone, from a checkpoint's moments (p,).

    official  m' / sqrt(v' + eps): no bias correction, eps inside the root (released code)
    paper     m^ / (sqrt(v^) + eps) with m^ = m' / (1 - 0.9**step), v^ = v' / (1 - 0.999**step)
    none      the gradient itself

    m' = 0.9 m + 0.1 g, v' = 0.999 v + 0.001 g**2. Raises ValueError for another variant, or step < 1 where it is used.
    """
    if variant not in ADAM_VARIANTS:
        raise ValueError(f"adam_variant {variant!r} is unknown; known are {', '.join(ADAM_VARIANTS)}")
    if variant == "none":
        return gradients
    m = BETA_1 * first + (1 - BETA_1) * gradients
    v = BETA_2 * second + (1 - BETA_2) * gradients**2
    if variant == "official":
        return m / torch.sqrt(v + EPSILON)
    if step < 1:
        raise ValueError(f"the bias correction of update {step} is not defined; updates count from 1")
    return (m / (1 - BETA_1**step)) / (torch.sqrt(v / (1 - BETA_2**step)) + EPSILON)
