"""Mean response loss of each row under a model: what IFD, S2L and any loss-based selector are made of.

In come a causal language model and rows of tokens; out comes one loss a row (nats a response token), with a graph where one is
wanted.

    rows ► batches (longest first, packed) ► last hidden states ► logits at response positions, a chunk at a time ► mean a row

The forward machinery is that of the gradient-proxy pass: nothing is padded, logits are made only where there is a target.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Self

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from clusterft.batching import TokenRow, plan_batches, row_of_encoded, run_batches
from clusterft.feature_context import DistLike, FeatureContext
from clusterft.feature_writer import RowWriter
from clusterft.interfaces import FeatureSpec
from clusterft.progress import PassProgress
from clusterft.proxy_pass import ProxyPass, with_precision
from clusterft.records import IGNORE_INDEX, Encoded

CHUNK_TARGETS = 1024
"""Response positions whose logits exist at a time: 1,024 x 49,152 float32 are 200 MB."""


def without_eos(encoded: Encoded, eos: int) -> Encoded:
    """The row without loss on a closing EOS."""
    targets = np.flatnonzero(encoded.labels != IGNORE_INDEX)
    if not len(targets) or encoded.labels[targets[-1]] != eos:
        return encoded
    labels = encoded.labels.copy()
    labels[targets[-1]] = IGNORE_INDEX
    return Encoded(encoded.id, encoded.input_ids, labels, encoded.truncated)


class LossPass(ProxyPass):
    """A model made ready for losses: head understood, packing proved, in evaluation mode (no dropout).

    autocast  matrix products in bfloat16, weights as they are; the head stays the model's own, so that training can move it
    """

    def __init__(self, model: Any, *, layout: str = "packed", autocast: bool = False) -> None:
        super().__init__(model, layout=layout)
        self.autocast = autocast

    @classmethod
    def of(cls, model: Any, precision: str) -> Self:
        """For a precision by name (`proxy_pass.PRECISIONS`). Raises ValueError for another one, or float32 from other weights."""
        autocast = precision == "bf16_autocast"
        return cls(with_precision(model, "float32" if autocast else precision), autocast=autocast)

    def losses(self, batch: Sequence[TokenRow]) -> Tensor:
        """(b,) float32 mean loss of each row, differentiable; every row must have a response token."""
        hidden = self._hidden_at_places(batch)
        targets = torch.as_tensor(np.concatenate([r.targets for r in batch]), device=self.device)
        counts = torch.as_tensor([len(r.targets) for r in batch], device=self.device)
        rows = torch.repeat_interleave(torch.arange(len(batch), device=self.device), counts)
        each = torch.cat(
            [self._chunk(h, y) for h, y in zip(hidden.split(CHUNK_TARGETS), targets.split(CHUNK_TARGETS), strict=True)]
        )
        return torch.zeros(len(batch), device=self.device).index_add(0, rows, each) / counts

    def _chunk(self, hidden: Tensor, targets: Tensor) -> Tensor:
        """Losses (r,) of r positions; with a graph the logits are made again in the backward pass instead of being kept."""
        if torch.is_grad_enabled() and hidden.requires_grad:
            return checkpoint(self._nll, hidden, targets, use_reentrant=False)
        return self._nll(hidden, targets)

    def _nll(self, hidden: Tensor, targets: Tensor) -> Tensor:
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.autocast):
            logits = self.head.logits(hidden)
        return F.cross_entropy(logits.float(), targets, reduction="none")

    @torch.inference_mode()
    def rows(self, batch: Sequence[TokenRow]) -> np.ndarray:
        """(b, 1) float32 losses."""
        return self.losses(batch)[:, None].cpu().numpy()


def mean_losses(
    model: Any,
    rows: Sequence[TokenRow],
    keys: Sequence[str],
    *,
    token_budget: int,
    precision: str,
    dist: DistLike,
    on_rows: Callable[[LossPass, list[int]], None] | None = None,
) -> np.ndarray:
    """(n,) float32 mean loss of each row; NaN for rows without a response token. The same on every rank, bit-identical for any
    world.

    keys break ties among rows of one length. on_rows(pass, numbers) is called after each batch of this rank. precision float32
    | bfloat16.
    """
    lengths = [len(r) for r in rows]
    mine = plan_batches(lengths, keys, token_budget)[dist.rank :: dist.world]
    out = np.full(len(rows), np.nan, np.float32)
    if mine:
        ready = LossPass.of(model, precision)

        def step(batch: list[int]) -> None:
            out[batch] = ready.rows([rows[i] for i in batch])[:, 0]
            if on_rows is not None:
                on_rows(ready, batch)

        run_batches(mine, lengths, token_budget, "packed", step)
        ready.restore()
    return _merged(out, [r for b in mine for r in b], dist)


def _merged(values: np.ndarray, mine: list[int], dist: DistLike) -> np.ndarray:
    """Every rank's values (n,) put together. Rows that nobody computed stay NaN."""
    if dist.world == 1:
        return values
    box: list[Any] = [None] * dist.world
    torch.distributed.all_gather_object(box, (mine, values[mine]))
    for numbers, found in box:
        values[numbers] = found
    return values


def extract_response_losses(context: FeatureContext, spec: FeatureSpec, writer: RowWriter) -> None:
    """Extractor: rows (n, 2) float32, mean response loss and response tokens; (0, 0) for a row without a response token.

    Params: precision (`proxy_pass.PRECISIONS`). Sharded over ranks by whole batches, resumable.
    """
    rows = [row_of_encoded(e) for e in context.encoded]

    def block(ready: LossPass, batch: list[int]) -> np.ndarray:
        losses = ready.rows([rows[i] for i in batch])
        return np.hstack([losses, np.array([[len(rows[i].targets)] for i in batch], np.float32)])

    empty = np.zeros((len(rows), 2), np.float32)
    write_by_batch(context, spec, writer, rows, block, empty=empty, precision=spec.params["precision"])


def write_by_batch(
    context: FeatureContext,
    spec: FeatureSpec,
    writer: RowWriter,
    rows: Sequence[TokenRow],
    block: Callable[[LossPass, list[int]], np.ndarray],
    *,
    empty: np.ndarray,
    precision: str,
    model: Any = None,
) -> None:
    """Runs `block` over this rank's batches and stores what it returns, (b, c) float32.

    empty (n, c): what is stored instead for rows of no tokens. model: another one than the run's.
    """
    lengths = [len(r) for r in rows]
    remaining = [b for b in plan_batches(lengths, context.pool.ids, context.token_budget) if not writer.done[b].all()]
    mine = remaining[context.dist.rank :: context.dist.world]
    if context.dist.rank == 0:
        nothing = np.flatnonzero((np.array(lengths) == 0) & ~writer.done)
        writer.put(nothing, empty[nothing])
    if not mine:
        return
    ready = LossPass.of(context.load_model() if model is None else model, precision)
    shown = context.progress and context.dist.rank == 0
    with PassProgress(spec.name, sum(map(len, mine)), sum(lengths[i] for b in mine for i in b), shown=shown) as bar:

        def step(batch: list[int]) -> None:
            writer.put(batch, block(ready, batch).astype(np.float32))
            count(writer, ready, [rows[i] for i in batch])
            bar.advance(len(batch), sum(lengths[i] for i in batch))

        run_batches(mine, lengths, context.token_budget, "packed", step)
    ready.restore()


def count(writer: RowWriter, ready: LossPass, rows: Sequence[TokenRow], *, backward: bool = False) -> None:
    """Puts a pass on the account; with a backward pass it costs three times the forward's operations."""
    writer.add_cost(
        flops=ready.flops(rows) * (3 if backward else 1), forward_passes=len(rows), backward_passes=len(rows) * backward
    )
