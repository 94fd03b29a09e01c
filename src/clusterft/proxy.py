"""The gradient-proxy pass (paper, section 4): one forward pass a sample, no backward.

In come a causal language model and samples; out comes a row a sample,

    g_i = (1 / |R_i|) Σ_{t in R_i} (p_t - 1) · h_{t-1}          (h,) float32

with R_i the response tokens, p_t the model's probability of token t, h_{t-1} the final hidden state that feeds the output head.

    samples ► rows of tokens ► batches (longest first, packed) ► last hidden states ► signal of each sample ► normalise, centre

`gradient_proxies` keeps everything in memory; `extract_gradient_proxies` streams into the feature store, sharded and resumable.
Signals other than the paper's are in `proxy_signals`. Only the last layer's states and the logits at response positions are
ever made, a chunk at a time.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from clusterft.batching import TokenRow, plan_batches, row_of_encoded, row_of_pair, run_batches
from clusterft.feature_context import FeatureContext
from clusterft.feature_writer import RowWriter
from clusterft.heads import body_of, find_head, last_hidden
from clusterft.interfaces import FeatureSpec
from clusterft.packing import check_packing, packed, packed_positions
from clusterft.progress import PassProgress
from clusterft.proxy_signals import SIGNALS, head_flops

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class ProxyParams:
    """Parameters of the extractor: everything that changes its values.

    normalise  each row to unit length (the released code on several ranks)
    centre     subtract the mean of all rows that have a response (the released code on one rank); before normalising
    precision  float32 | bfloat16, of weights and activations; probabilities and sums are float32 either way
    proxy      paper | output_gradient | concat, see `proxy_signals`
    """

    normalise: bool = True
    centre: bool = False
    precision: str = "float32"
    proxy: str = "paper"

    def __post_init__(self) -> None:
        for name, allowed in (("precision", DTYPES), ("proxy", SIGNALS)):
            if getattr(self, name) not in allowed:
                raise ValueError(f"{name} {getattr(self, name)!r} is not one of {', '.join(allowed)}")


def with_precision(model: Any, precision: str) -> Any:
    """The model itself if its weights have that dtype, or a bfloat16 copy. Raises ValueError for float32 from other weights."""
    wanted = DTYPES[precision]
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

    layout  packed (default) | right | left: how samples share a batch; see `batching.LAYOUTS`

    Raises HeadNotUnderstood or PackingUnsupported naming the model's class.
    """

    def __init__(self, model: Any, *, proxy: str = "paper", layout: str = "packed") -> None:
        self.model, self.body, self.layout = model, body_of(model), layout
        self._training = model.training
        model.eval()
        self.head = find_head(model)
        if layout == "packed":
            check_packing(model)
        self.signal, self.proxy = SIGNALS[proxy], proxy
        self.device = self.head.weight.device

    @property
    def width(self) -> int:
        """d of the rows."""
        return self.head.weight.shape[1] * (2 if self.proxy == "concat" else 1)

    def flops(self, batch: Sequence[TokenRow]) -> float:
        """Floating-point operations of a batch: 2 a parameter and token, causal attention, the head at response tokens."""
        config = self.model.config.get_text_config()
        embedded = {id(p) for p in self.model.get_input_embeddings().parameters()} | {id(self.head.weight)}
        body = sum(p.numel() for p in self.body.parameters() if id(p) not in embedded)
        attention = sum(2.0 * config.num_hidden_layers * config.hidden_size * len(r) ** 2 for r in batch)
        head = head_flops(self.head, sum(len(r.targets) for r in batch), self.proxy)
        return 2.0 * body * sum(map(len, batch)) + attention + head

    def restore(self) -> None:
        """Puts the model's training mode back."""
        self.model.train(self._training)

    @torch.inference_mode()
    def rows(self, batch: Sequence[TokenRow]) -> np.ndarray:
        """(b, d) float32, one raw row a sample; every sample must have a response token."""
        hidden = self._hidden_at_places(batch)
        targets = torch.as_tensor(np.concatenate([r.targets for r in batch]), device=self.device)
        counts = [len(r.targets) for r in batch]
        return self.signal(self.head, hidden, targets, counts).cpu().numpy()

    def _hidden_at_places(self, batch: Sequence[TokenRow]) -> torch.Tensor:
        """(r, h): last hidden states that predict a response token, sample after sample."""
        lengths = [len(r) for r in batch]
        if self.layout == "packed":
            ids = torch.as_tensor(np.concatenate([r.input_ids for r in batch]), device=self.device)[None]
            with packed(self.model, lengths):
                states = last_hidden(self.body, input_ids=ids, position_ids=packed_positions(lengths, self.device))
            starts = np.cumsum([0, *lengths[:-1]])
        else:
            states = last_hidden(self.body, **padded_inputs(batch, self.layout, self.device))
            width = max(lengths)
            starts = np.array([i * width + (width - n if self.layout == "left" else 0) for i, n in enumerate(lengths)])
        places = np.concatenate([start + r.places for start, r in zip(starts, batch, strict=True)])
        return states.flatten(0, 1)[torch.as_tensor(places, device=self.device)]


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


class RowFinish:
    """Centring and normalising, block by block (a `Finaliser`). Zero rows stay zero and are counted in `zero`.

    The mean is over rows that are not zero: a sample without a response has no gradient and takes no part.
    """

    def __init__(self, normalise: bool, centre: bool) -> None:
        self.normalise, self.centre = normalise, centre
        self.zero: list[int] = []
        self._seen = 0
        self._sum: np.ndarray | None = None

    def observe(self, rows: np.ndarray) -> None:
        zero = ~rows.any(axis=1)
        self.zero += (self._seen + np.flatnonzero(zero)).tolist()
        self._seen += len(rows)
        if self.centre:
            total = rows.sum(axis=0, dtype=np.float64)
            self._sum = total if self._sum is None else self._sum + total

    def apply(self, rows: np.ndarray) -> np.ndarray:
        zero = ~rows.any(axis=1)
        if self.centre and self._seen > len(self.zero):
            assert self._sum is not None
            rows = (rows - self._sum / (self._seen - len(self.zero))).astype(np.float32)
        if self.normalise:
            norms = np.linalg.norm(rows.astype(np.float64), axis=1, keepdims=True)
            rows = (rows / np.where(norms > 0, norms, 1)).astype(np.float32)
        rows = np.array(rows, np.float32)
        rows[zero] = 0
        return rows


def gradient_proxies(
    model: Any,
    samples: Sequence[tuple[Sequence[int], Sequence[int]]],
    *,
    token_budget: int = 8192,
    normalise: bool = True,
    centre: bool = False,
    proxy: str = "paper",
    precision: str | None = None,
    layout: str = "packed",
    progress: bool = False,
    on_zero_rows: Callable[[list[int]], None] | None = None,
) -> np.ndarray:
    """Gradient proxies of samples in memory, (n, h) float32 in the order given (paper, section 4).

    samples       (prompt ids, response ids) each; only response tokens count
    token_budget  tokens a batch; halved, with a warning, where memory runs out
    normalise     rows of unit length; centre: subtract the mean row first
    proxy         paper | output_gradient | concat (then d = 2h)
    precision     float32 | bfloat16; None takes the weights as they are
    layout        packed | right | left
    on_zero_rows  is given the positions of rows that are zero (no response tokens); without it they are logged as a warning

    Raises ValueError for a bad option, HeadNotUnderstood or PackingUnsupported for a model that cannot be handled.
    """
    if precision is not None:
        ProxyParams(precision=precision)
        model = with_precision(model, precision)
    ProxyParams(proxy=proxy)
    token_rows = [row_of_pair(prompt, response) for prompt, response in samples]
    lengths = [len(r) for r in token_rows]
    keys = [r.input_ids.tobytes() for r in token_rows]
    plan = plan_batches(lengths, keys, token_budget, layout)
    ready = ProxyPass(model, proxy=proxy, layout=layout)
    raw = np.zeros((len(samples), ready.width), np.float32)

    with PassProgress("gradient proxies", len(samples), sum(lengths), shown=progress) as bar:

        def step(batch: list[int]) -> None:
            raw[batch] = ready.rows([token_rows[i] for i in batch])
            bar.advance(len(batch), sum(lengths[i] for i in batch))

        run_batches(plan, lengths, token_budget, layout, step)
    ready.restore()
    return _finished(raw, normalise, centre, on_zero_rows)


def _finished(raw: np.ndarray, normalise: bool, centre: bool, on_zero_rows: Callable[[list[int]], None] | None) -> np.ndarray:
    finish = RowFinish(normalise, centre)
    finish.observe(raw)
    if finish.zero and on_zero_rows is not None:
        on_zero_rows(finish.zero)
    elif finish.zero:
        log.warning(
            "%d of %d gradient proxies are zero (no response tokens), the first at %d",
            len(finish.zero),
            len(raw),
            finish.zero[0],
        )
    return finish.apply(raw)


class _ReportingFinish(RowFinish):
    """Also writes the ids of zero rows into the feature's manifest and the log."""

    def __init__(self, params: ProxyParams, writer: RowWriter, ids: Sequence[str]) -> None:
        super().__init__(params.normalise, params.centre)
        self._writer, self._ids, self._told = writer, sorted(ids), False

    def apply(self, rows: np.ndarray) -> np.ndarray:
        if not self._told:
            self._told = True
            zero = [self._ids[i] for i in self.zero]
            self._writer.note(zero_rows=zero)
            if zero:
                total = len(self._ids)
                log.warning("%d of %d gradient proxies are zero (no response tokens), e.g. id %s", len(zero), total, zero[0])
        return super().apply(rows)


def extract_gradient_proxies(context: FeatureContext, spec: FeatureSpec, writer: RowWriter) -> None:
    """Extractor of the feature store: the same rows as `gradient_proxies`, sharded over ranks, resumable. Params: `ProxyParams`.

    The plan is made from the whole pool, and whole batches are dealt to ranks: values are bit-identical for any number of ranks
    with the same threads each, and after any interruption.
    """
    params = ProxyParams(**spec.params)
    writer.finalise_with(_ReportingFinish(params, writer, context.pool.ids))
    lengths = [len(row_of_encoded(e)) for e in context.encoded]
    remaining = [b for b in plan_batches(lengths, context.pool.ids, context.token_budget) if not writer.done[b].all()]
    mine = remaining[context.dist.rank :: context.dist.world]
    empty = np.flatnonzero((np.array(lengths) == 0) & ~writer.done) if context.dist.rank == 0 else np.empty(0, int)
    if not mine and not len(empty):
        return
    ready = ProxyPass(with_precision(context.load_model(), params.precision), proxy=params.proxy)
    if len(empty):
        writer.put(empty, np.zeros((len(empty), ready.width), np.float32))
    total = sum(lengths[i] for b in mine for i in b)
    shown = context.progress and context.dist.rank == 0
    with PassProgress(spec.name, sum(map(len, mine)), total, shown=shown) as bar:

        def step(batch: list[int]) -> None:
            rows = [row_of_encoded(context.encoded[i]) for i in batch]
            writer.put(batch, ready.rows(rows))
            writer.add_cost(flops=ready.flops(rows), forward_passes=len(batch))
            bar.advance(len(batch), sum(map(len, rows)))

        run_batches(mine, lengths, context.token_budget, "packed", step)
    ready.restore()
