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

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from clusterft.batching import plan_batches, row_of_encoded, row_of_pair, run_batches, shared_beginning
from clusterft.feature_context import FeatureContext
from clusterft.feature_writer import RowWriter
from clusterft.interfaces import FeatureSpec
from clusterft.progress import PassProgress
from clusterft.proxy_gradients import KINDS, FactoredGradientPass
from clusterft.proxy_pass import PRECISIONS, ProxyPass, with_precision
from clusterft.proxy_signals import SIGNALS

__all__ = ["ProxyParams", "ProxyPass", "RowFinish", "extract_gradient_proxies", "gradient_proxies", "with_precision"]

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class ProxyParams:
    """Parameters of the extractor: everything that changes its values.

    normalise  each row to unit length (the released code on several ranks)
    centre     subtract the mean of all rows that have a response (the released code on one rank); before normalising
    precision  float32 | bfloat16 (or bf16) | bf16_autocast; probabilities and sums are float32 in all
    proxy      paper | output_gradient | concat, see `proxy_signals`; lora_b | last_layers, see `proxy_gradients`
    layers     how many layers from the end last_layers differentiates
    rank       columns of the random factors of lora_b and last_layers: d = (matrices) · rank²
    projection_seed  names those factors

    Raises ValueError for a value that is not offered, and for bf16_autocast with lora_b or last_layers.
    """

    normalise: bool = True
    centre: bool = False
    precision: str = "float32"
    proxy: str = "paper"
    layers: int = 10
    rank: int = 8
    projection_seed: int = 0

    def __post_init__(self) -> None:
        for name, allowed in (("precision", PRECISIONS), ("proxy", (*SIGNALS, *KINDS))):
            if getattr(self, name) not in allowed:
                raise ValueError(f"{name} {getattr(self, name)!r} is not one of {', '.join(allowed)}")
        if self.proxy in KINDS and self.precision == "bf16_autocast":
            raise ValueError(f"proxy {self.proxy} runs in float32 or bfloat16, got precision bf16_autocast")


def ready_pass(model: Any, params: ProxyParams, *, layout: str = "packed") -> ProxyPass:
    """The pass that computes `params.proxy`. Raises ValueError, HeadNotUnderstood, PackingUnsupported, LayersNotFound."""
    autocast = params.precision == "bf16_autocast"
    model = with_precision(model, "float32" if autocast else params.precision)
    options = {"proxy": params.proxy, "layout": layout, "autocast": autocast}
    if params.proxy in SIGNALS:
        return ProxyPass(model, **options)
    if layout != "packed":
        raise ValueError(f"proxy {params.proxy} runs packed, got layout {layout}")
    return FactoredGradientPass(model, layers=params.layers, rank=params.rank, seed=params.projection_seed, **options)


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
    layers: int = 10,
    rank: int = 8,
    layout: str = "packed",
    share_beginning: bool = True,
    progress: bool = False,
    on_zero_rows: Callable[[list[int]], None] | None = None,
) -> np.ndarray:
    """Gradient proxies of samples in memory, (n, h) float32 in the order given (paper, section 4).

    samples       (prompt ids, response ids) each; only response tokens count
    token_budget  tokens a batch; halved, with a warning, where memory runs out
    normalise     rows of unit length; centre: subtract the mean row first
    proxy         paper; output_gradient | concat | lora_b | last_layers give other widths d; layers, rank: see `ProxyParams`
    precision     float32 | bfloat16 | bf16_autocast; None takes the weights as they are
    layout        packed | right | left
    share_beginning  packed: tokens that all samples begin with (a template's lead-in) are computed once a batch; exact
    on_zero_rows  is given the positions of rows that are zero (no response tokens); without it they are logged as a warning

    Raises ValueError for a bad option, HeadNotUnderstood or PackingUnsupported for a model that cannot be handled.
    """
    if precision is None:
        precision = str(model.dtype).removeprefix("torch.")
    params = ProxyParams(precision=precision, proxy=proxy, layers=layers, rank=rank)
    token_rows = [row_of_pair(prompt, response) for prompt, response in samples]
    lengths = [len(r) for r in token_rows]
    keys = [r.input_ids.tobytes() for r in token_rows]
    plan = plan_batches(lengths, keys, token_budget, layout)
    ready = ready_pass(model, params, layout=layout)
    if share_beginning and layout == "packed" and proxy in SIGNALS:
        ready.shared = shared_beginning(token_rows)
    raw = np.zeros((len(samples), ready.width), np.float32)

    with PassProgress("gradient proxies", len(samples), sum(lengths), shown=progress) as bar:

        def step(batch: list[int]) -> None:
            raw[batch] = ready.rows([token_rows[i] for i in batch])
            bar.advance(len(batch), sum(lengths[i] for i in batch))

        with ready.evaluating():
            run_batches(plan, lengths, token_budget, layout, step)
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
    ready = ready_pass(context.load_model(), params)
    if params.proxy in SIGNALS:  # a backward pass could not tell whose gradient reaches a shared token
        ready.shared = shared_beginning(map(row_of_encoded, context.encoded))
    if len(empty):
        writer.put(empty, np.zeros((len(empty), ready.width), np.float32))
    total = sum(lengths[i] for b in mine for i in b)
    shown = context.progress and context.dist.rank == 0
    with PassProgress(spec.name, sum(map(len, mine)), total, shown=shown) as bar:

        def step(batch: list[int]) -> None:
            rows = [row_of_encoded(context.encoded[i]) for i in batch]
            writer.put(batch, ready.rows(rows))
            writer.add_cost(flops=ready.flops(rows), forward_passes=len(batch), backward_passes=ready.share * len(batch))
            bar.advance(len(batch), sum(map(len, rows)))

        with ready.evaluating():
            run_batches(mine, lengths, context.token_budget, "packed", step)
