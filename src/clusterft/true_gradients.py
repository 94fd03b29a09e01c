"""True per-sample gradients (torch.func), a chunk of samples at a time, projected as they come.

In come a causal language model and encoded rows; out come rows (n, p) or, projected, (n, d) float32: the gradient of each
sample's mean loss over its response tokens. With a projection the memory beyond the model is a few gradients, whatever n.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor
from torch.func import functional_call, grad, vmap

from clusterft.records import IGNORE_INDEX, Encoded
from clusterft.seeding import generator


class Projection(Protocol):
    """Turns gradients (b, p) into (b, d); inner products are kept on average."""

    dim: int

    def project(self, rows: Tensor) -> Tensor: ...


@dataclass
class FoldedSketch:
    """A count sketch for very long rows: random signs, cut into blocks of `dim`, each block rotated at random, all added up.

    E[<Sa, Sb>] = <a, b>, with a spread of about ‖a‖‖b‖ / sqrt(dim); costs O(p) a row, where a dense projection costs O(p · dim).
    (Charikar, Chen, Farach-Colton 2002; entries of one block never meet.)
    """

    dim: int
    seed: int

    def __post_init__(self) -> None:
        self._p, self._signs, self._shifts = -1, torch.empty(0), np.empty(0, int)

    def _prepare(self, p: int) -> None:
        rng = generator(self.seed, "folded sketch")
        bits = np.unpackbits(np.frombuffer(rng.bytes(-(-p // 8)), np.uint8))[:p]
        self._signs = torch.from_numpy(bits.astype(np.int8) * 2 - 1)
        self._shifts, self._p = rng.integers(0, self.dim, -(-p // self.dim)), p

    def project(self, rows: Tensor) -> Tensor:
        """(b, p) -> (b, dim) float32. The same seed and p give the same sketch on any machine."""
        if rows.shape[1] != self._p:
            self._prepare(rows.shape[1])
        out = torch.zeros(len(rows), self.dim, dtype=torch.float32, device=rows.device)
        for shift, start in zip(self._shifts.tolist(), range(0, self._p, self.dim), strict=True):
            part = rows[:, start : start + self.dim].float() * self._signs[start : start + self.dim].to(rows.device)
            head = min(part.shape[1], self.dim - shift)
            out[:, shift : shift + head] += part[:, :head]
            out[:, : part.shape[1] - head] += part[:, head:]
        return out


@contextmanager
def _evaluating(model: Any) -> Iterator[None]:
    training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(training)


def mean_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """Mean negative log-likelihood over labelled tokens of one row: logits (t, v), unshifted labels (t,); 0 if there are none."""
    targets = labels[1:]
    kept = targets != IGNORE_INDEX
    losses = torch.nn.functional.cross_entropy(logits[:-1].float(), targets.clamp_min(0), reduction="none")
    return (losses * kept).sum() / kept.sum().clamp_min(1)


def per_sample_gradients(
    model: Any,
    encoded: Sequence[Encoded],
    *,
    parameters: Callable[[str], bool] | None = None,
    chunk_size: int = 1,
    projection: Projection | None = None,
) -> np.ndarray:
    """Gradient of each row's mean loss with respect to the model's parameters, (n, p) float32, or (n, d) when projected.

    parameters  which parameters by name; None takes all. Order: `model.named_parameters()`; tied ones count once
    chunk_size  samples differentiated at once (vmap over rows padded on the right, which nothing looks at)

    Raises ValueError if no parameter is chosen.
    """
    chosen = {n: p.detach() for n, p in model.named_parameters() if parameters is None or parameters(n)}
    if not chosen:
        raise ValueError("no parameter of the model was chosen, so there is nothing to differentiate")
    fixed = {n: p.detach() for n, p in model.named_parameters() if n not in chosen}

    def loss(weights: dict[str, Tensor], ids: Tensor, labels: Tensor) -> Tensor:
        out = functional_call(model, {**weights, **fixed}, kwargs={"input_ids": ids[None], "use_cache": False})
        return mean_loss(out.logits[0], labels)

    p = sum(w.numel() for w in chosen.values())
    rows = np.empty((len(encoded), p if projection is None else projection.dim), np.float32)
    with _evaluating(model):
        for start in range(0, len(encoded), chunk_size):
            chunk = encoded[start : start + chunk_size]
            flat = _chunk_gradients(loss, chosen, chunk)
            rows[start : start + len(chunk)] = (flat if projection is None else projection.project(flat)).cpu().numpy()
    return rows


def _chunk_gradients(loss: Callable, weights: dict[str, Tensor], chunk: Sequence[Encoded]) -> Tensor:
    """(b, p) gradients of one chunk."""
    device, width = next(iter(weights.values())).device, max(len(e) for e in chunk)
    ids = torch.zeros(len(chunk), width, dtype=torch.int64, device=device)
    labels = torch.full_like(ids, IGNORE_INDEX)
    for i, row in enumerate(chunk):
        ids[i, : len(row)] = torch.as_tensor(row.input_ids, device=device)
        labels[i, : len(row)] = torch.as_tensor(row.labels, device=device)
    if len(chunk) == 1:
        parts = {n: g[None] for n, g in grad(loss)(weights, ids[0], labels[0]).items()}
    else:
        parts = vmap(grad(loss), (None, 0, 0))(weights, ids, labels)
    return torch.cat([parts[n].flatten(1) for n in weights], 1)
