"""What choosing costs in passes of a model over the pool, from a run's configuration or from the record of a run that was made.

Table 1 shows the counted passes of its runs; the cost model takes the planned ones. `tests/test_cost_model.py` holds both against each
other for every committed record.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from clusterft.records import RunRecord

SELECTORS = {
    "baselines.full_data.FullSelector": "full",
    "baselines.random_choice.RandomSelector": "random",
    "clusterft.cluster.ClusterSelector": "cluster",
    "baselines.ifd.IfdSelector": "ifd",
    "baselines.less.LessSelector": "less",
    "baselines.s2l.S2LSelector": "s2l",
}
"""The methods whose passes are known beforehand. A method of the user's own is known by its runs alone."""

FEATURE_KEYS = {
    "cluster": ("proxy",),
    "ifd": ("precision", "score_eos", "pre_experience"),
    "less": ("gradients",),
    "s2l": ("proxy",),
}
"""The settings of a method that its features depend on; the rest only chooses among rows."""

LAYERS = 10
"""Layers from the end that the proxy `last_layers` takes if its configuration says nothing (`clusterft.proxy.FeatureParams`)."""


@dataclass(frozen=True)
class Passes:
    """Passes over N rows; 0.5 is half the pool, or half the layers of all of it. proxy: another model's node that makes them."""

    forward: float = 0.0
    backward: float = 0.0
    proxy: Mapping[str, Any] | None = None

    def __bool__(self) -> bool:
        return bool(self.forward or self.backward)

    def __str__(self) -> str:
        parts = [f"{count:.3g} N {word}" for count, word in ((self.forward, "forward"), (self.backward, "backward")) if count]
        return (", ".join(parts) or "none") + (f", of the proxy {self.proxy['name']}" if self.proxy and parts else "")


def selection_passes(config: Mapping[str, Any]) -> Passes:
    """What one selection will take. Raises KeyError for a method that is not one of `SELECTORS`, or a size that is asked for and unknown.

    LESS: one epoch of gradients over the pool and the validation rows for each of its checkpoints, after a warm-up of as many epochs
    on a part of the pool. Validation sets that come by subtask are left out: a hundred rows or so.
    S2L: epochs of training of its proxy, and one pass for each point of a trajectory, of which there are no more than updates. IFD: with and without the instruction.
    """
    selector, name = config["selector"], selector_name(config)
    if name == "cluster":
        return _proxy_passes(selector["proxy"], config)
    if name == "ifd":
        before = selector["pre_experience"]
        if before is None:
            return Passes(2.0)
        trained = before["epochs"] * min(1.0, before["clusters"] * before["per_cluster"] / pool_rows(config))
        return Passes(3.0 + trained, trained)
    if name == "less":
        settings, validation = selector["gradients"], config["data"]["validation"]
        asked = validation["rows"] / pool_rows(config) if validation["kind"] == "heldout" else 0.0
        each = settings["training"]["epochs"] * (1.0 + settings["warmup_fraction"] + asked)
        return Passes(each, each)
    if name == "s2l":
        settings = selector["proxy"]
        epochs, batch = settings["training"]["epochs"], settings["training"]["batch_rows"]
        updates = epochs * math.ceil(pool_rows(config) / batch)
        return Passes(float(epochs + min(settings["points"], updates)), float(epochs), _proxy(config))
    if name in ("full", "random"):
        return Passes()
    raise KeyError(f"selector {name}")


def _proxy_passes(proxy: Mapping[str, Any], config: Mapping[str, Any]) -> Passes:
    """CluSTER's signal: a forward pass, and a backward one through the layers whose gradient it is."""
    if proxy["proxy"] == "lora_b":
        return Passes(1.0, 1.0)
    if proxy["proxy"] == "last_layers":
        return Passes(1.0, min(1.0, proxy.get("layers", LAYERS) / config["model"]["shape"]["num_hidden_layers"]))
    return Passes(1.0)


def feature_passes(config: Mapping[str, Any]) -> dict[str, Passes]:
    """Key of a feature -> its passes: the method's own, and CluSTER's where they set the budget. Runs with equal keys share one pass.

    Raises KeyError like `selection_passes`.
    """
    selector, name = config["selector"], selector_name(config)
    found = {}
    if own := selection_passes(config):
        found[_feature_key(name, {key: selector[key] for key in FEATURE_KEYS[name]}, config)] = own
    if selector["budget"] == "match_cluster":
        proxy = config["clustering"]["proxy"]
        found.setdefault(_feature_key("cluster", {"proxy": proxy}, config), _proxy_passes(proxy, config))
    return found


def own_feature_key(config: Mapping[str, Any]) -> str:
    """The first key of `feature_passes`; "" for a method without passes."""
    return next(iter(feature_passes(config)), "") if selection_passes(config) else ""


def _feature_key(name: str, settings: Mapping[str, Any], config: Mapping[str, Any]) -> str:
    place = [config["data"], config["model"], config["trainer"].get("max_length")]
    return json.dumps([name, settings, *place], sort_keys=True, default=str)


def counted_passes(record: RunRecord) -> Passes | None:
    """What a run that was made counted, over all its selections; None where it did not count."""
    forward, backward = (record.cost.get(f"{word}_passes") for word in ("forward", "backward"))
    rows = record.selection.get("pool_rows")
    if not all(isinstance(x, int | float) and math.isfinite(x) for x in (forward, backward, rows)) or not rows:
        return None
    return Passes(forward / rows, backward / rows, _proxy(record.config))


def _proxy(config: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """The model of S2L's proxy, where it is another than the run's own."""
    return (config["selector"]["proxy"].get("model") or None) if selector_name(config) == "s2l" else None


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
    """full, random, less, s2l, ifd or cluster; of a method of the user's own its `name`, else its target."""
    selector = config["selector"]
    if selector.get("name"):
        return str(selector["name"])
    target = str(selector.get("_target_"))
    return SELECTORS.get(target, target)
