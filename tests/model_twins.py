"""A model's architecture at toy size: for whoever must meet the real class without its memory."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from clusterft.models import config_from_shape, plain_shape
from clusterft.tiny import build_tiny_model

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def tiny_twin(cfg: Any) -> PreTrainedModel:
    """The same architecture at toy size: real class, head grouping, rotary share and tying, 2 layers, vocabulary 512.

    For tests that must meet the real class (names of its modules, its forward) without its memory.
    """
    shape = plain_shape(cfg)
    heads = shape["num_attention_heads"]
    group = heads // shape.get("num_key_value_heads", heads)
    key_heads = 4 if group == 1 else 2
    small = {"intermediate_size": 160, "num_hidden_layers": 2, "num_attention_heads": group * key_heads, "vocab_size": 512}
    small["hidden_size"] = 16 * small["num_attention_heads"]
    if "num_key_value_heads" in shape:
        small["num_key_value_heads"] = key_heads
    if "head_dim" in shape:
        small["head_dim"] = 16
    twin = type("Twin", (), {"architecture": cfg.architecture, "shape": {**shape, **small, "max_position_embeddings": 256}})
    return build_tiny_model(config_from_shape(twin), dtype=torch.float32, attn_implementation="eager")
