"""What one forward pass says about a sample's gradient, from last hidden states and the output head alone.

In come an `OutputHead`, the states (r, h) that predict response tokens, their targets (r,) and how many belong to each sample;
out comes one row a sample, (b, d) float32. Logits exist for a chunk of positions at a time, never for a whole batch.

    paper            mean of (p_t - 1) · h_{t-1}                                   (paper, section 4)
    output_gradient  mean of Wᵀ(p - onehot): the gradient at the final hidden state
    concat           both, each of unit length, side by side                       d = 2h
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from clusterft.heads import OutputHead

LOGIT_BYTES = 64 * 1024 * 1024
"""Bytes of float32 logits held at once."""

Signal = Callable[[OutputHead, Tensor, Tensor, Sequence[int]], Tensor]


def _chunks(head: OutputHead, rows: int) -> list[slice]:
    step = max(1, LOGIT_BYTES // (4 * head.weight.shape[0]))
    return [slice(start, min(rows, start + step)) for start in range(0, rows, step)]


def log_probabilities(head: OutputHead, hidden: Tensor, targets: Tensor) -> Tensor:
    """(r,) float32: log p of each target, by log-sum-exp over a chunk of positions at a time."""
    out = torch.empty(len(targets), dtype=torch.float32, device=hidden.device)
    for part in _chunks(head, len(targets)):
        logits = head.logits(hidden[part]).float()
        out[part] = logits.gather(1, targets[part, None])[:, 0] - torch.logsumexp(logits, 1)
    return out


def sample_means(values: Tensor, counts: Sequence[int], coefficients: Tensor | None = None) -> Tensor:
    """Means of rows (r, h), weighted by coefficients (r,) if given, over consecutive runs: (b, h) float32."""
    parts = values.split(list(counts))
    if coefficients is None:
        return torch.stack([v.float().mean(0) for v in parts])
    weights = coefficients.split(list(counts))
    return torch.stack([(c @ v.float()) / len(c) for v, c in zip(parts, weights, strict=True)])


def paper(head: OutputHead, hidden: Tensor, targets: Tensor, counts: Sequence[int]) -> Tensor:
    """The paper's proxy. expm1 keeps p - 1 exact where p is close to 1."""
    return sample_means(hidden, counts, torch.expm1(log_probabilities(head, hidden, targets)))


def head_pull(head: OutputHead, hidden: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """(u (r, h) float32, log p (r,)): the loss's gradient at each hidden state, and the target's log-probability."""
    u = torch.empty(hidden.shape, dtype=torch.float32, device=hidden.device)
    log_p = torch.empty(len(targets), dtype=torch.float32, device=hidden.device)
    for part in _chunks(head, len(targets)):
        logits = head.logits(hidden[part]).float()
        wanted = targets[part, None]
        logs = torch.log_softmax(logits, 1)
        log_p[part] = logs.gather(1, wanted)[:, 0]
        d_logits = logs.exp_().scatter_add_(1, wanted, -torch.ones_like(wanted, dtype=torch.float32))
        u[part] = head.pull_back(d_logits, logits).float()
    return u, log_p


def output_gradient(head: OutputHead, hidden: Tensor, targets: Tensor, counts: Sequence[int]) -> Tensor:
    """Mean gradient of the loss at the final hidden state, u = Wᵀ(p - onehot)."""
    return sample_means(head_pull(head, hidden, targets)[0], counts)


def concat(head: OutputHead, hidden: Tensor, targets: Tensor, counts: Sequence[int]) -> Tensor:
    """(b, 2h): the paper's proxy and the output gradient, each of unit length."""
    u, log_p = head_pull(head, hidden, targets)
    halves = sample_means(hidden, counts, torch.expm1(log_p)), sample_means(u, counts)
    return torch.cat([torch.nn.functional.normalize(x, dim=1, eps=1e-30) for x in halves], 1)


SIGNALS: dict[str, Signal] = {"paper": paper, "output_gradient": output_gradient, "concat": concat}


def head_flops(head: OutputHead, positions: int, proxy: str) -> float:
    """Floating-point operations of the head: one product with (v, h) a position, two where the gradient comes back through it."""
    return 2.0 * head.weight.numel() * positions * (1 if proxy == "paper" else 2)
