"""Packed sequences: many samples in one row of tokens, none of which sees another, without a (t, t) mask.

In comes a Hugging Face model that takes its attention from the attention registry; out comes the same model whose attention
runs once a sample (causal, over its own tokens), while every matrix product runs over all tokens at once. Nothing is padded.

`packed(model, lengths)` is the way in: within it, `model(input_ids (1, t), position_ids (1, t))` treats consecutive runs of
`lengths` tokens as separate samples. With `shared_first` the first run is a beginning that all samples have in common: it is
computed once, and every later run sees it. `check_packing` proves on a probe that the model's hidden states do not change.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

from clusterft.heads import PROBE_TOKENS, body_of, last_hidden

IMPLEMENTATION = "clusterft_packed"
_LENGTHS: ContextVar[tuple[tuple[int, ...], bool] | None] = ContextVar("packed_lengths", default=None)
_KNOWN_LAYERS = {"full_attention", "sliding_attention"}


class PackingUnsupported(ValueError):
    """The model mixes tokens in a way that packing cannot keep apart."""


def _segment(query: Tensor, key: Tensor, value: Tensor, scale: float | None, window: int | None, softcap: float | None) -> Tensor:
    """Causal attention of one sample: query (1, heads, t, d), key and value (1, kv_heads, s, d) -> (1, heads, t, d_v).

    The queries are the last t of the s positions.
    """
    t, s = query.shape[2], key.shape[2]
    grouped = key.shape[1] != query.shape[1]
    if softcap is None and t == s and (window is None or window >= t):
        return scaled_dot_product_attention(query, key, value, is_causal=True, scale=scale, enable_gqa=grouped)
    distance = torch.arange(s - t, s, device=query.device)[:, None] - torch.arange(s, device=query.device)[None]
    seen = (distance >= 0) & (distance < (window if window is not None else s))
    if softcap is None:
        return scaled_dot_product_attention(query, key, value, attn_mask=seen, scale=scale, enable_gqa=grouped)
    repeats = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(repeats, 1), value.repeat_interleave(repeats, 1)
    scores = query @ key.transpose(2, 3) * (scale if scale is not None else query.shape[-1] ** -0.5)
    scores = (torch.tanh(scores / softcap) * softcap).masked_fill(~seen, -torch.inf)
    return torch.softmax(scores, -1, dtype=torch.float32).to(query.dtype) @ value


def packed_attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    position_bias: Tensor | None = None,
    dropout: float = 0.0,
    **_: Any,
) -> tuple[Tensor, None]:
    """Attention registry's signature. query (1, heads, t, d), key and value (1, kv_heads, t, d) -> (1, t, heads, d)."""
    runs = _LENGTHS.get()
    if runs is None:
        raise RuntimeError("packed attention was called outside `packed(model, lengths)`")
    lengths, shared = runs
    unknown = [
        n for n, v in (("attention_mask", attention_mask), ("s_aux", s_aux), ("position_bias", position_bias)) if v is not None
    ]
    if unknown or dropout:
        raise PackingUnsupported(f"{type(module).__name__} wants {unknown or 'dropout'}, which packed attention does not know")
    keys, values = key.split(lengths, 2), value.split(lengths, 2)
    if shared:
        keys = (keys[0], *(torch.cat([keys[0], k], 2) for k in keys[1:]))
        values = (values[0], *(torch.cat([values[0], v], 2) for v in values[1:]))
    pieces = [
        _segment(q, k, v, scaling, sliding_window, softcap) for q, k, v in zip(query.split(lengths, 2), keys, values, strict=True)
    ]
    return torch.cat([p.transpose(1, 2) for p in pieces], 1), None


AttentionInterface.register(IMPLEMENTATION, packed_attention)


@contextmanager
def packed(model: Any, lengths: Sequence[int], *, shared_first: bool = False) -> Iterator[None]:
    """Within it the model's attention keeps runs of `lengths` tokens apart. The model's own attention is put back afterwards."""
    config = model.config.get_text_config()
    before = config._attn_implementation
    config._attn_implementation = IMPLEMENTATION
    token = _LENGTHS.set((tuple(int(n) for n in lengths), shared_first))
    try:
        yield
    finally:
        _LENGTHS.reset(token)
        config._attn_implementation = before


def packed_positions(lengths: Sequence[int], device: torch.device | str, *, shared_first: bool = False) -> Tensor:
    """(1, t) int64: 0, 1, ... anew for each sample; after a shared beginning each goes on where that ends."""
    begin = lengths[0] if shared_first else 0
    starts = [0, *[begin] * (len(lengths) - 1)]
    return torch.cat([torch.arange(s, s + n, device=device) for s, n in zip(starts, lengths, strict=True)])[None]


@torch.no_grad()
def check_packing(model: Any) -> None:
    """Compares packed with separate hidden states on two short samples. Raises PackingUnsupported naming the model's class."""
    name, config = type(model).__name__, model.config.get_text_config()
    remedy = 'use layout="right"'
    strange = set(getattr(config, "layer_types", None) or ()) - _KNOWN_LAYERS
    if strange:
        raise PackingUnsupported(f"{name} has layers of type {sorted(strange)}, which would mix packed samples; {remedy}")
    body, device = body_of(model), model.get_input_embeddings().weight.device
    lengths = (PROBE_TOKENS, PROBE_TOKENS - 3)
    ids = (torch.arange(1, sum(lengths) + 1, device=device) * 7919 % model.get_input_embeddings().weight.shape[0])[None]
    with packed(model, lengths):
        found = last_hidden(body, input_ids=ids, position_ids=packed_positions(lengths, device))[0].float()
    expected = torch.cat([last_hidden(body, input_ids=part)[0] for part in ids.split(lengths, 1)]).float()
    error = float((found - expected).abs().max() / expected.abs().max().clamp_min(1e-6))
    if not error <= (1e-4 if model.dtype == torch.float32 else 5e-2):
        raise PackingUnsupported(
            f"{name}: packed hidden states differ by {error:.2g} of the largest from separate ones; {remedy}"
        )
