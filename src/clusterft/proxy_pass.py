"""A model made ready for forward passes over samples: head understood, packing proved, precision settled.

In come a causal language model and batches of `TokenRow`s; out come one row a sample, (b, d) float32, through a forward-only
signal of `proxy_signals`. `proxy_gradients` adds signals with a backward pass.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from clusterft.batching import TokenRow
from clusterft.heads import body_of, find_head, last_hidden
from clusterft.packing import check_packing, packed, packed_positions
from clusterft.proxy_signals import SIGNALS, head_flops

PRECISIONS = ("float32", "bfloat16", "bf16", "bf16_autocast")
"""bfloat16 and bf16: weights and activations; bf16_autocast: float32 weights, matrix products in bfloat16."""


def with_precision(model: Any, precision: str) -> Any:
    """The model itself if its weights have that dtype (float32 | bfloat16 = bf16), or a bfloat16 copy.

    Raises ValueError for float32 from other weights, and for any other precision.
    """
    if precision not in ("float32", "bfloat16", "bf16"):
        raise ValueError(f"weights cannot be given precision {precision!r}, only float32, bfloat16 or bf16")
    wanted = torch.float32 if precision == "float32" else torch.bfloat16
    if model.dtype == wanted:
        return model
    if wanted == torch.float32:
        raise ValueError(
            f"precision float32 was asked for, the weights of {type(model).__name__} are {model.dtype}; "
            "load them with weights_dtype float32, or ask for precision bfloat16"
        )
    return copy.deepcopy(model).to(wanted)


class ProxyPass:
    """A model made ready for the pass: head understood, packing proved, in evaluation mode.

    layout    packed (default) | right | left: how samples share a batch; see `batching.LAYOUTS`
    autocast  matrix products in bfloat16, weights as they are

    Raises HeadNotUnderstood or PackingUnsupported naming the model's class.
    """

    def __init__(self, model: Any, *, proxy: str = "paper", layout: str = "packed", autocast: bool = False) -> None:
        self.model, self.body, self.layout = model, body_of(model), layout
        self._training = model.training
        model.eval()
        self.head = find_head(model)
        if layout == "packed":
            check_packing(model)
        self.proxy, self.autocast = proxy, autocast
        self.device = self.head.weight.device
        if autocast:
            self.head = self.head.cast(torch.bfloat16)

    shared = 0
    """Tokens at the beginning of every row that are computed once a batch (`batching.shared_beginning`); packed layout only."""

    share = 0.0
    """Share of the layers that a backward pass goes through."""

    @property
    def width(self) -> int:
        """d of the rows."""
        return self.head.weight.shape[1] * (2 if self.proxy == "concat" else 1)

    def flops(self, batch: Sequence[TokenRow]) -> float:
        """Floating-point operations of a batch."""
        return sum(self.flop_parts(batch))

    def flop_parts(self, batch: Sequence[TokenRow]) -> tuple[float, float, float]:
        """(body, attention, head): 2 a parameter and token, causal attention, the head at response tokens only."""
        config = self.model.config.get_text_config()
        heads = (self.model.get_input_embeddings(), self.model.get_output_embeddings())
        embedded = {id(p) for m in heads for p in m.parameters()}
        body = sum(p.numel() for p in self.body.parameters() if id(p) not in embedded)
        p, tokens = self.shared, sum(len(r) - self.shared for r in batch) + self.shared
        squares = sum(len(r) ** 2 - p**2 for r in batch) + p**2
        attention = 2.0 * config.num_hidden_layers * config.hidden_size * squares
        head = head_flops(self.head, sum(len(r.targets) for r in batch), self.proxy)
        return 2.0 * body * tokens, attention, head

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """Puts the model's training mode back when the pass is over, also after an error. A surrounding autocast is the caller's own and
        ends at this door."""
        try:
            with torch.autocast(self.device.type, enabled=False):
                yield
        finally:
            self.restore()

    def restore(self) -> None:
        """Puts the model's training mode back."""
        self.model.train(self._training)

    @torch.inference_mode()
    def rows(self, batch: Sequence[TokenRow]) -> np.ndarray:
        """(b, d) float32, one raw row a sample; every sample must have a response token."""
        hidden = self._hidden_at_places(batch)
        targets = torch.as_tensor(np.concatenate([r.targets for r in batch]), device=self.device)
        counts = [len(r.targets) for r in batch]
        return SIGNALS[self.proxy](self.head, hidden, targets, counts).cpu().numpy()

    def _hidden_at_places(self, batch: Sequence[TokenRow]) -> torch.Tensor:
        """(r, h): last hidden states that predict a response token, sample after sample."""
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.autocast):
            states, starts = self._last_states(batch)
        places = np.concatenate([start + r.places for start, r in zip(starts, batch, strict=True)])
        return states.flatten(0, 1)[torch.as_tensor(places, device=self.device)]

    def _last_states(self, batch: Sequence[TokenRow]) -> tuple[torch.Tensor, np.ndarray]:
        """Last hidden states (b, t, h) of the whole batch, and where each sample begins among its b · t positions."""
        lengths = [len(r) for r in batch]
        if self.layout == "packed":
            head, p = [batch[0].input_ids[: self.shared]] if self.shared else [], self.shared
            ids = torch.as_tensor(np.concatenate([*head, *(r.input_ids[p:] for r in batch)]), device=self.device)[None]
            runs = [*([p] if p else []), *(n - p for n in lengths)]
            positions = packed_positions(runs, self.device, shared_first=p > 0)
            with packed(self.model, runs, shared_first=p > 0):
                states = last_hidden(self.body, input_ids=ids, position_ids=positions)
            return states, np.cumsum([0, *(n - p for n in lengths[:-1])])
        states, width = last_hidden(self.body, **padded_inputs(batch, self.layout, self.device)), max(lengths)
        return states, np.array([i * width + (width - n if self.layout == "left" else 0) for i, n in enumerate(lengths)])


def padded_inputs(batch: Sequence[TokenRow], side: str, device: torch.device) -> dict[str, torch.Tensor]:
    """Padded ids (b, t), with mask and positions from the lengths. Padding on the right needs no mask: nothing looks ahead."""
    width = max(len(r) for r in batch)
    ids, mask = np.zeros((len(batch), width), np.int64), np.zeros((len(batch), width), np.int64)
    for i, row in enumerate(batch):
        span = slice(0, len(row)) if side == "right" else slice(width - len(row), width)
        ids[i, span], mask[i, span] = row.input_ids, 1
    if side == "right" or mask.all():
        return {"input_ids": torch.as_tensor(ids, device=device)}
    positions = np.maximum(mask.cumsum(1) - 1, 0)
    arrays = {"input_ids": ids, "attention_mask": mask, "position_ids": positions}
    return {name: torch.as_tensor(array, device=device) for name, array in arrays.items()}
