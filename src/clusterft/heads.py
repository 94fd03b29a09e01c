"""The output head of a causal language model, understood and checked.

In comes a Hugging Face causal LM; out comes an `OutputHead` that turns last hidden states (r, h) into logits (r, v) as the
model does: linear map (tied or not, with or without bias), logit scaling (Granite, Cohere), soft-capping (Gemma). A short probe
through the whole model decides whether it was understood; if not, the model is refused by name.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

PROBE_TOKENS = 8
_PROBE_TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-4, torch.bfloat16: 3e-2, torch.float16: 5e-3}
"""Largest difference to the model's own logits, relative to the largest logit. Half precision rounds the logits themselves."""


class HeadNotUnderstood(ValueError):
    """The model's logits are not what its last hidden state and output matrix say."""


@dataclass(frozen=True)
class OutputHead:
    """weight (v, h); bias (v,) or None; logits = softcap · tanh(scale · (W h + b) / softcap)."""

    weight: Tensor
    bias: Tensor | None = None
    scale: float = 1.0
    softcap: float | None = None

    def logits(self, hidden: Tensor) -> Tensor:
        """(r, h) -> (r, v), in the dtype of the weights."""
        return self.finish(nn.functional.linear(hidden.to(self.weight.dtype), self.weight, self.bias))

    def finish(self, out: Tensor) -> Tensor:
        """What follows the linear map: scaling and soft-capping of (r, v)."""
        if self.scale != 1.0:
            out = out * self.scale
        if self.softcap is not None:
            out = torch.tanh(out / self.softcap) * self.softcap
        return out

    def cast(self, dtype: torch.dtype) -> OutputHead:
        """The same head with its matrices in another dtype."""
        return replace(self, weight=self.weight.to(dtype), bias=None if self.bias is None else self.bias.to(dtype))

    def pull_back(self, d_logits: Tensor, logits: Tensor) -> Tensor:
        """Gradient at the hidden state (r, h) from the gradient at the logits (r, v)."""
        if self.softcap is not None:
            d_logits = d_logits * (1 - (logits / self.softcap) ** 2)
        if self.scale != 1.0:
            d_logits = d_logits * self.scale
        return d_logits.to(self.weight.dtype) @ self.weight


def body_of(model: Any) -> nn.Module:
    """The model without its head: what returns the last hidden state after the final norm. Raises HeadNotUnderstood."""
    body = getattr(model, "base_model", None)
    if body is None or body is model:
        raise HeadNotUnderstood(
            f"{type(model).__name__} has no body apart from its head (`base_model`); use a causal language model"
        )
    return body


def last_hidden(body: nn.Module, **inputs: Any) -> Tensor:
    """Last hidden state (b, t, h) of a body, without a cache and without the states of other layers."""
    return body(use_cache=False, **inputs).last_hidden_state


def find_head(model: Any) -> OutputHead:
    """The head, verified by a probe of a few tokens. Raises HeadNotUnderstood naming the model's class."""
    name = type(model).__name__
    layer = model.get_output_embeddings()
    if not isinstance(layer, nn.Linear):
        raise HeadNotUnderstood(f"{name}: the output head is {type(layer).__name__}, expected torch.nn.Linear")
    config = model.config.get_text_config()
    scale = 1.0
    if getattr(config, "logits_scaling", None) is not None:  # Granite divides
        scale = 1.0 / config.logits_scaling
    if getattr(config, "logit_scale", None) is not None:  # Cohere multiplies
        scale = config.logit_scale
    head = OutputHead(layer.weight, layer.bias, float(scale), getattr(config, "final_logit_softcapping", None))
    _probe(model, head, name)
    return head


@torch.no_grad()
def _probe(model: Any, head: OutputHead, name: str) -> None:
    vocabulary = head.weight.shape[0]
    ids = (torch.arange(1, PROBE_TOKENS + 1, device=head.weight.device) * 7919 % vocabulary)[None]
    positions = torch.arange(PROBE_TOKENS, device=ids.device)[None]
    expected = model(input_ids=ids, position_ids=positions, use_cache=False).logits[0].float()
    found = head.logits(last_hidden(body_of(model), input_ids=ids, position_ids=positions)[0]).float()
    if found.shape != expected.shape:
        raise HeadNotUnderstood(
            f"{name}: logits have shape {tuple(expected.shape)}, its output matrix gives {tuple(found.shape)}"
        )
    error = float((found - expected).abs().max() / expected.abs().max().clamp_min(1e-6))
    tolerance = _PROBE_TOLERANCE[head.weight.dtype]
    if not error <= tolerance:
        raise HeadNotUnderstood(
            f"{name}: its logits differ from those of its output matrix by {error:.2g} of the largest (allowed {tolerance:g}); "
            "the head does something this version does not know, so its gradients would be wrong"
        )
