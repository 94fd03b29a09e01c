"""True per-sample gradients (torch.func), a chunk of samples at a time, projected as they come.

In come a causal language model and encoded rows; out come rows (n, p) or, projected, (n, d) float32: the gradient of each
sample's mean loss over its response tokens. With a projection the memory beyond the model is a few gradients, whatever n.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor
from torch.func import functional_call, grad, vmap

from clusterft.heads import HeadNotUnderstood, OutputHead, find_head
from clusterft.loss import target_loss
from clusterft.records import IGNORE_INDEX, Encoded
from clusterft.seeding import generator
from clusterft.sketch_kernels import fold


class Projection(Protocol):
    """Turns gradients (b, p), or one that comes in parts, into (b, d) or (d,); inner products are kept on average."""

    dim: int

    def project(self, rows: Tensor) -> Tensor: ...

    def project_parts(self, parts: Sequence[Tensor]) -> Tensor: ...


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
        if p == self._p:
            return
        rng = generator(self.seed, "folded sketch")
        bits = np.unpackbits(np.frombuffer(rng.bytes(-(-p // 8)), np.uint8))[:p]
        self._signs = torch.from_numpy(bits.astype(np.int8) * 2 - 1)
        self._shifts, self._p = rng.integers(0, self.dim, -(-p // self.dim)), p

    def project(self, rows: Tensor) -> Tensor:
        """(b, p) -> (b, dim) float32. The same seed and p give the same sketch on any machine."""
        if rows.device.type == "cpu" and rows.dtype == torch.float32:
            return torch.stack([self.project_parts([row]) for row in rows])
        return self._in_blocks(rows)

    def project_parts(self, parts: Sequence[Tensor]) -> Tensor:
        """One row of p numbers in several tensors, of any shape -> (dim,) float32, equal to `project` of the whole row."""
        if any(part.device.type != "cpu" or part.dtype != torch.float32 for part in parts):
            return self._in_blocks(torch.cat([part.flatten() for part in parts])[None])[0]
        self._prepare(sum(part.numel() for part in parts))
        out, first = torch.zeros(self.dim), 0
        for part in parts:
            fold(part.detach().reshape(-1).numpy(), first, self._signs.numpy(), self._shifts, out.numpy())
            first += part.numel()
        return out

    def _in_blocks(self, rows: Tensor) -> Tensor:
        """The same by torch, for any device and dtype."""
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
    chunk_size  samples differentiated at once: 1 by plain autograd, more by vmap over rows padded on the right, which nothing looks at

    Raises ValueError if no parameter is chosen.
    """
    chosen = [n for n, _ in model.named_parameters() if parameters is None or parameters(n)]
    if not chosen:
        raise ValueError("no parameter of the model was chosen, so there is nothing to differentiate")
    p = sum(model.get_parameter(n).numel() for n in chosen)
    rows = np.empty((len(encoded), p if projection is None else projection.dim), np.float32)
    one_by_one = chunk_size == 1
    with _evaluating(model), _differentiating(model, chosen) if one_by_one else nullcontext():
        head = _head_or_none(model) if one_by_one else None
        for start in range(0, len(encoded), chunk_size):
            chunk = encoded[start : start + chunk_size]
            if one_by_one:
                parts = _row_gradient(model, head, chosen, chunk[0])
                flat = torch.cat([g.flatten() for g in parts]) if projection is None else projection.project_parts(parts)
            else:
                flat = _chunk_gradients(model, chosen, chunk)
                flat = flat if projection is None else projection.project(flat)
            rows[start : start + len(chunk)] = flat.cpu().numpy()
    return rows


@contextmanager
def _differentiating(model: Any, chosen: Sequence[str]) -> Iterator[None]:
    """Within it exactly the chosen parameters want gradients."""
    before = {n: p.requires_grad for n, p in model.named_parameters()}
    wanted = set(chosen)
    try:
        for n, p in model.named_parameters():
            p.requires_grad_(n in wanted)
        yield
    finally:
        for n, p in model.named_parameters():
            p.requires_grad_(before[n])


def _head_or_none(model: Any) -> OutputHead | None:
    """None, which means logits at every position, for a head that is more than a matrix: slower, the same numbers."""
    try:
        return find_head(model)
    except HeadNotUnderstood:
        return None


def _row_gradient(model: Any, head: OutputHead | None, chosen: Sequence[str], row: Encoded) -> Sequence[Tensor]:
    """One row by plain autograd, logits only where there is a target: on a CPU faster than torch.func's `grad`."""
    device = model.get_parameter(chosen[0]).device
    ids = torch.as_tensor(row.input_ids, dtype=torch.int64, device=device)[None]
    labels = torch.as_tensor(row.labels, dtype=torch.int64, device=device)[None]
    with torch.enable_grad():
        losses, _ = target_loss(model, head, ids, None, labels, "sample")
        return torch.autograd.grad(losses.sum(), [model.get_parameter(n) for n in chosen], materialize_grads=True)


def _chunk_gradients(model: Any, chosen: Sequence[str], chunk: Sequence[Encoded]) -> Tensor:
    """(b, p) gradients of one chunk, by vmap."""
    weights = {n: model.get_parameter(n).detach() for n in chosen}
    fixed = {n: p.detach() for n, p in model.named_parameters() if n not in weights}

    def loss(weights: dict[str, Tensor], ids: Tensor, labels: Tensor) -> Tensor:
        out = functional_call(model, {**weights, **fixed}, kwargs={"input_ids": ids[None], "use_cache": False})
        return mean_loss(out.logits[0], labels)

    device, width = next(iter(weights.values())).device, max(len(e) for e in chunk)
    ids = torch.zeros(len(chunk), width, dtype=torch.int64, device=device)
    labels = torch.full_like(ids, IGNORE_INDEX)
    for i, row in enumerate(chunk):
        ids[i, : len(row)] = torch.as_tensor(row.input_ids, device=device)
        labels[i, : len(row)] = torch.as_tensor(row.labels, device=device)
    parts = vmap(grad(loss), (None, 0, 0))(weights, ids, labels)
    return torch.cat([parts[n].flatten(1) for n in weights], 1)
