"""Signals that need a short backward pass: gradients of weight matrices, projected on both sides while they arise.

In come packed samples; out comes a row a sample, (b, d) float32. For a linear layer y = W x the gradient of sample i is
G_i = Σ_t δ_t x_tᵀ; what is kept is Pᵀ G_i A = Σ_t (Pᵀ δ_t)(Aᵀ x_t)ᵀ with random A (in, r) and P (out, k), so G_i itself never
exists, nor does a gradient of any parameter: only activations are differentiated, about one more forward pass.

    lora_b       attention's matrices in all layers: LoRA's B at its start (B = 0, A random) with its rows projected by P
    last_layers  every matrix of the last `layers` layers: a truncated backward pass (earlier layers keep no graph)

Inner products are kept on average: E[A Aᵀ] = I and E[P Pᵀ] = I (the factored projection of Choe et al. 2024, LoGra).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from clusterft.batching import TokenRow
from clusterft.proxy_pass import ProxyPass
from clusterft.proxy_signals import head_pull
from clusterft.seeding import generator

KINDS = ("lora_b", "last_layers")


class LayersNotFound(ValueError):
    """The model does not keep its decoder layers in one list."""


def decoder_layers(model: Any) -> nn.ModuleList:
    """The list of the model's decoder layers. Raises LayersNotFound naming the model's class."""
    count = model.config.get_text_config().num_hidden_layers
    found = [m for m in model.base_model.modules() if isinstance(m, nn.ModuleList) and len(m) == count]
    if len(found) != 1:
        raise LayersNotFound(f"{type(model).__name__}: {len(found)} lists of {count} decoder layers, expected one")
    return found[0]


def tapped_linears(layers: Sequence[nn.Module], kind: str) -> list[nn.Linear]:
    """The matrices whose gradients count: for lora_b those inside modules whose class is called ...Attention, else all."""
    linears = []
    for layer in layers:
        scopes = [m for m in layer.modules() if "Attention" in type(m).__name__] if kind == "lora_b" else [layer]
        linears += [m for scope in scopes for m in scope.modules() if isinstance(m, nn.Linear)]
    if not linears:
        raise LayersNotFound(f"no linear layers found for {kind} in {type(layers[0]).__name__}")
    return linears


class Tap:
    """Listens to one linear layer: keeps Aᵀx (t, r) on the way forward, Pᵀδ (t, k) on the way back."""

    def __init__(self, linear: nn.Linear, rank: int | None, seed: int, number: int) -> None:
        rng = generator(seed, "factored gradients", number)
        self.a = _gaussian(rng, linear.in_features, rank, linear.weight)
        self.p = _gaussian(rng, linear.out_features, rank, linear.weight)
        self.width = self.a.shape[1] * self.p.shape[1]
        self._linear = linear

    @contextmanager
    def listening(self) -> Iterator[None]:
        handle = self._linear.register_forward_hook(self._forward)
        try:
            yield
        finally:
            handle.remove()

    def _forward(self, module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        with torch.no_grad():
            self.low_x = (inputs[0].flatten(0, -2) @ self.a).float()
        output.register_hook(self._backward)

    def _backward(self, delta: Tensor) -> None:
        self.low_delta = (delta.flatten(0, -2) @ self.p).float()

    def rows(self, lengths: Sequence[int]) -> Tensor:
        """(b, k · r): Σ_t (Pᵀδ_t)(Aᵀx_t)ᵀ over each sample's tokens."""
        parts = zip(self.low_delta.split(list(lengths)), self.low_x.split(list(lengths)), strict=True)
        return torch.stack([(d.T @ x).flatten() for d, x in parts])


def _gaussian(rng: np.random.Generator, size: int, rank: int | None, like: Tensor) -> Tensor:
    """(size, rank) with E[A Aᵀ] = I; rank None gives the identity, for checks."""
    if rank is None:
        return torch.eye(size, dtype=like.dtype, device=like.device)
    return torch.as_tensor(rng.normal(size=(size, rank)) / rank**0.5, dtype=like.dtype, device=like.device)


@contextmanager
def _frozen(model: nn.Module) -> Iterator[None]:
    """No parameter asks for a gradient within it."""
    before = [(p, p.requires_grad) for p in model.parameters()]
    model.requires_grad_(False)
    try:
        yield
    finally:
        for parameter, wanted in before:
            parameter.requires_grad_(wanted)


def _start_graph(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Forward pre-hook of the first layer that counts: the graph begins at its input."""
    if args:
        return (args[0].detach().requires_grad_(), *args[1:]), kwargs
    return args, {**kwargs, "hidden_states": kwargs["hidden_states"].detach().requires_grad_()}


class FactoredGradientPass(ProxyPass):
    """The pass for `lora_b` and `last_layers`; everything but the signal is `ProxyPass`.

    layers  how many layers from the end count (last_layers); lora_b takes all
    rank    r = k, columns of A and of P
    """

    def __init__(self, model: Any, *, proxy: str, layers: int, rank: int | None, seed: int, **options: Any) -> None:
        super().__init__(model, proxy=proxy, **options)
        stack = decoder_layers(model)
        depth = len(stack) if proxy == "lora_b" else layers
        if not 1 <= depth <= len(stack):
            raise ValueError(f"layers is {layers}, the model has {len(stack)}")
        self.share = depth / len(stack)
        used = list(stack)[-depth:]
        self._first = used[0]
        self.taps = [Tap(linear, rank, seed, i) for i, linear in enumerate(tapped_linears(used, proxy))]

    @property
    def width(self) -> int:
        return sum(tap.width for tap in self.taps)

    def rows(self, batch: Sequence[TokenRow]) -> np.ndarray:
        """(b, d) float32; every sample must have a response token."""
        counts = [len(r.targets) for r in batch]
        targets = torch.as_tensor(np.concatenate([r.targets for r in batch]), device=self.device)
        with torch.enable_grad(), _frozen(self.model), self._listening():
            hidden = self._hidden_at_places(batch)
            with torch.no_grad():
                u, _ = head_pull(self.head, hidden.detach(), targets)
                sizes = torch.as_tensor(counts, device=self.device)
                u /= sizes.repeat_interleave(sizes)[:, None]
            hidden.backward(u.to(hidden.dtype))
        lengths = [len(r) for r in batch]
        return torch.cat([tap.rows(lengths) for tap in self.taps], 1).cpu().numpy()

    @contextmanager
    def _listening(self) -> Iterator[None]:
        """Hooks on the model for one batch, gone afterwards whatever happens."""
        start = self._first.register_forward_pre_hook(_start_graph, with_kwargs=True)
        with ExitStack() as stack:
            stack.callback(start.remove)
            for tap in self.taps:
                stack.enter_context(tap.listening())
            yield

    def flops(self, batch: Sequence[TokenRow]) -> float:
        """The forward pass, plus activation gradients: as many again in the layers that count."""
        body, attention, head = self.flop_parts(batch)
        return (body + attention) * (1 + self.share) + head
