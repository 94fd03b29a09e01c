"""What choosing costs in passes of a model over the pool, from a run's configuration or from the record of a run that was made.

Table 1 shows the counted passes of its runs; the cost model takes the planned ones. `tests/test_cost_model.py` holds both against each
other for every committed record.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from clusterft.records import RunRecord

SELECTORS = ("full", "random", "cluster", "ifd", "less", "s2l")
LAYERS = 10
"""Layers from the end that the proxy `last_layers` takes if its configuration says nothing (`clusterft.proxy.FeatureParams`)."""


@dataclass(frozen=True)
class Passes:
    """Passes over N rows; 0.5 is half the pool, or half the layers of all of it. proxy: another model's node that makes them."""

    forward: float = 0.0
    backward: float = 0.0
    proxy: Mapping[str, Any] | None = None

    def __str__(self) -> str:
        parts = [f"{count:.3g} N {word}" for count, word in ((self.forward, "forward"), (self.backward, "backward")) if count]
        return (", ".join(parts) or "none") + (f", of the proxy {self.proxy['name']}" if self.proxy and parts else "")


def selection_passes(config: Mapping[str, Any]) -> Passes:
    """What one selection will take. Raises KeyError for a method that is not one of `SELECTORS`, or a pool of unknown size.

    LESS: one epoch of gradients over the pool and the validation rows for each of its checkpoints, after a warm-up of as many epochs
    on a part of the pool. Validation sets that come by subtask are left out: a hundred rows or so.
    S2L: epochs of training of its proxy, and one pass for each point of a trajectory. IFD: with and without the instruction.
    """
    selector, rows, name = config["selector"], pool_rows(config), selector_name(config)
    if name not in SELECTORS:
        raise KeyError(f"selector {name}")
    if name == "cluster":
        proxy = selector["proxy"]
        depth = {"lora_b": 1.0, "last_layers": proxy.get("layers", LAYERS) / config["model"]["shape"]["num_hidden_layers"]}
        return Passes(1.0, depth.get(proxy["proxy"], 0.0))
    if name == "ifd":
        before = selector["pre_experience"]
        if before is None:
            return Passes(2.0)
        trained = before["epochs"] * before["clusters"] * before["per_cluster"] / rows
        return Passes(3.0 + trained, trained)
    if name == "less":
        settings, validation = selector["gradients"], config["data"]["validation"]
        asked = validation["rows"] / rows if validation["kind"] == "heldout" else 0.0
        each = settings["training"]["epochs"] * (1.0 + settings["warmup_fraction"] + asked)
        return Passes(each, each)
    if name == "s2l":
        settings = selector["proxy"]
        epochs = float(settings["training"]["epochs"])
        return Passes(epochs + settings["points"], epochs, _proxy(config))
    return Passes()


def counted_passes(record: RunRecord) -> Passes | None:
    """What a run that was made counted, over all its selections; None where it did not count."""
    forward, backward = (record.cost.get(f"{word}_passes") for word in ("forward", "backward"))
    if forward is None or backward is None:
        return None
    rows = record.selection["pool_rows"]
    return Passes(forward / rows, backward / rows, _proxy(record.config))


def _proxy(config: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """The model of `selector.proxy.model`, where a method has one of its own."""
    proxy = config["selector"].get("proxy") or {}
    return proxy.get("model") or None


def parameters(shape: Mapping[str, Any]) -> float:
    """Parameters of a Llama or GPT-NeoX outside the input embedding (which is looked up, not multiplied), with the output head.

    Raises KeyError for a shape without the usual names.
    """
    h, layers, f = shape["hidden_size"], shape["num_hidden_layers"], shape["intermediate_size"]
    matrices = 2 if "use_parallel_residual" in shape else 3  # GPT-NeoX has no gate
    kv = h * shape["num_key_value_heads"] / shape["num_attention_heads"] if "num_key_value_heads" in shape else h
    return float(layers * (2 * h * h + 2 * h * kv + matrices * h * f) + h * shape["vocab_size"])


def pool_rows(config: Mapping[str, Any]) -> float:
    """Rows of the pool as far as the configuration knows. Raises KeyError when it does not."""
    known = [config["data"][key] for key in ("max_rows", "expected_rows") if config["data"][key] is not None]
    if not known:
        raise KeyError("data.expected_rows")
    return float(min(known))


def selector_name(config: Mapping[str, Any]) -> str:
    """full, random, less, s2l, ifd or cluster: the last word of the selector's target, or its own `name`."""
    selector = config["selector"]
    if selector.get("name"):
        return str(selector["name"])
    target = str(selector["_target_"]).lower()
    for name in SELECTORS:
        if name in target.rsplit(".", 1)[-1]:
            return name
    raise KeyError(f"selector {target}")
