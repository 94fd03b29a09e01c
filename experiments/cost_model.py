"""How long a run takes: from measured runs like it where there are any, else from a count of floating-point operations.

In comes a run's configuration; out come wall seconds and where they come from. The operation count is the usual one: 2 operations
a parameter and token forward, 4 backward, 2 more where activations are computed again. Rates and what is assumed about data stand
in `Hardware` and `Assumptions`; `check` compares the count with measured runs, so that the paper-scale estimate has an error bar.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from clusterft.records import RunRecord


@dataclass(frozen=True)
class Hardware:
    """One device. Rates are sustained, in FLOP/s: peak times a utilisation that is commonly reached."""

    name: str
    train_flops: float
    forward_flops: float
    decode_tokens_per_second: float
    shared: bool = False  # all workers share this one device
    start_seconds: float = 0.0  # starting processes and loading weights, once a run


H100 = Hardware("H100", train_flops=0.40 * 989e12, forward_flops=0.45 * 989e12, decode_tokens_per_second=1000.0)
"""989e12: dense bf16 peak of an H100 SXM; 40 and 45 % utilisation and the decoding rate (7B, batches of 16) are assumptions."""

TWO_CORES = Hardware(
    "2 CPU cores", train_flops=1.2e11, forward_flops=2.6e11, decode_tokens_per_second=120.0, shared=True, start_seconds=8.0
)
"""What two cores with AVX-512 gave for the 135 M model in bf16 autocast: some 150 tokens/s training, 1,000 forward."""


def hardware_for(device: str) -> Hardware:
    """H100 for cuda, two cores for cpu: where the estimate of a configuration comes from until runs were measured."""
    return TWO_CORES if device == "cpu" else H100


@dataclass(frozen=True)
class Assumptions:
    """What is not known before a run. Mean lengths are of whole rows after the prompt template."""

    mean_tokens: Mapping[str, float] = field(
        default_factory=lambda: {
            "magicoder_oss_instruct_75k": 450.0,
            "evol_instruct_code_80k": 450.0,
            "medinstruct_52k": 200.0,
            "stdlib_instruct": 215.0,
            "stdlib_instruct_b": 215.0,
            "medical_smoke_instruct": 120.0,
        }
    )
    share_at_full_ratio: float = 0.6  # K q / N at r = 1: the paper reports 59 and 65.9 %, an unbalanced clustering gives less
    eval_problems: int = 564  # HumanEval 164 + MBPP 399 or so
    eval_tokens: float = 250.0


PASSES: dict[str, tuple[float, float]] = {
    "full": (0.0, 0.0),
    "random": (0.0, 0.0),
    "cluster": (1.0, 0.0),
    "ifd": (2.0, 0.0),
    "less": (4.0 + 0.05 * 4, 4.0 + 0.05 * 4),
    "s2l": (0.0, 0.0),
}
"""Passes of the target model over the pool for choosing: (forward, backward). LESS: 4 checkpoints plus 4 warm-up epochs on 5 %.
S2L uses a proxy model: `S2L_PROXY_PASSES` passes of it."""

S2L_PROXY_PARAMETERS = 70e6
S2L_PROXY_PASSES = (3.0 + 12.0, 3.0)  # 3 epochs of training, 12 checkpoints scored


def passes_text(selector: str) -> str:
    """How a method's cost reads in table 1, from the numbers above. Raises KeyError for an unknown method."""
    forward, backward = PASSES[selector]
    if selector == "s2l":
        forward, backward = S2L_PROXY_PASSES
    parts = [f"{count:g} N {word}" for count, word in ((forward, "forward"), (backward, "backward")) if count]
    text = ", ".join(parts) or "none"
    return f"{text}, of a {S2L_PROXY_PARAMETERS / 1e6:g} M proxy" if selector == "s2l" else text


def parameters(shape: Mapping[str, Any]) -> float:
    """Parameters of a Llama-shaped model outside the input embedding (which is looked up, not multiplied), with the output head.

    Raises KeyError for a shape without the usual names.
    """
    h, layers, f = shape["hidden_size"], shape["num_hidden_layers"], shape["intermediate_size"]
    kv = h * shape["num_key_value_heads"] / shape["num_attention_heads"] if "num_key_value_heads" in shape else h
    return float(layers * (2 * h * h + 2 * h * kv + 3 * h * f) + h * shape["vocab_size"])


@dataclass(frozen=True)
class CostModel:
    """Estimates runs. `measured`: complete records to learn from; a similar run is one of the same model, data and workers."""

    hardware: Hardware = H100
    assumptions: Assumptions = field(default_factory=Assumptions)
    measured: Sequence[RunRecord] = ()

    def run_seconds(self, config: Mapping[str, Any]) -> tuple[float, str]:
        """(wall seconds of selection, training and evaluation, "measured" | "model"). 0 and "" when the sizes are unknown."""
        seconds = self._from_measured(config)
        if seconds is not None:
            return seconds, "measured"
        try:
            return sum(self.stages(config).values()), "model"
        except (KeyError, TypeError):
            return 0.0, ""

    def stages(self, config: Mapping[str, Any]) -> dict[str, float]:
        """Wall seconds of selection, training, evaluation by operation count. Raises KeyError if a size is not in the config."""
        rows = pool_rows(config)
        tokens = rows * self._mean_tokens(config)
        p = parameters(config["model"]["shape"])
        trainer = config["trainer"]
        devices = 1 if self.hardware.shared else trainer["workers"]
        forward, backward = PASSES[selector_name(config)]
        choose = tokens * (2 * forward + 4 * backward) * p
        if selector_name(config) == "s2l":
            choose = tokens * (2 * S2L_PROXY_PASSES[0] + 4 * S2L_PROXY_PASSES[1]) * S2L_PROXY_PARAMETERS
        elif selector_name(config) == "random" and config["selector"]["budget"] == "match_cluster":
            choose = tokens * 2 * p  # the budget is read off CluSTER's clusters; shared through the feature store
        choose *= self.selections(config)
        a_token = 8 if trainer["gradient_checkpointing"] else 6
        train = tokens * self.share(config) * trainer["epochs"] * a_token * p
        return {
            "selection": choose / (devices * self.hardware.forward_flops),
            "training": train / (devices * self.hardware.train_flops),
            "evaluation": self.eval_tokens(config) / self.hardware.decode_tokens_per_second + self.hardware.start_seconds,
        }

    def eval_tokens(self, config: Mapping[str, Any]) -> float:
        """Tokens to generate: of the subset that the configuration names, else of the benchmarks as a whole."""
        named = [node for node in (config.get("evaluators") or {}).values() if node.get("subset")]
        if named:
            return float(sum(node["subset"]["n"] * node["max_new_tokens"] for node in named))
        return self.assumptions.eval_problems * self.assumptions.eval_tokens

    def share(self, config: Mapping[str, Any]) -> float:
        """Expected share of the pool that a run trains on."""
        rule = config["selector"]["budget"]
        if rule == "all":
            return 1.0
        if rule == "rows":
            return float(config["selector"]["rows"]) / pool_rows(config)
        ratio = float(config["selector"]["ratio"])
        return ratio if rule == "fraction" else ratio * self.assumptions.share_at_full_ratio

    def selections(self, config: Mapping[str, Any]) -> int:
        """How often a run chooses: once, and once more for each re-selection that its expected number of steps holds."""
        sampler, trainer = config.get("sampler") or {}, config["trainer"]
        epochs, steps = sampler.get("reselect_every_epochs"), sampler.get("reselect_every_steps")
        if epochs is None and steps is None:
            return 1
        per_epoch = math.ceil(pool_rows(config) * self.share(config) / trainer["global_batch"])
        return math.ceil(trainer["epochs"] * per_epoch / (steps or epochs * per_epoch))

    def device_hours(self, config: Mapping[str, Any]) -> float:
        """Device-hours of a run by operation count: evaluation takes one device, the rest all workers."""
        stages = self.stages(config)
        return ((stages["selection"] + stages["training"]) * config["trainer"]["workers"] + stages["evaluation"]) / 3600

    def _mean_tokens(self, config: Mapping[str, Any]) -> float:
        mean = self.assumptions.mean_tokens[config["data"]["name"]]
        limits = [config["trainer"]["max_length"], config["data"].get("max_row_tokens")]
        return min(mean, *(float(limit) for limit in limits if limit is not None))

    def _from_measured(self, config: Mapping[str, Any]) -> float | None:
        alike = [r for r in self.measured if _place(r.config) == _place(config) and r.status == "complete"]
        if not alike:
            return None
        share = _measured_share(config, alike) or self.share(config)
        per_unit = [r.cost["training_seconds"] / (r.selection["data_usage"] * r.config["trainer"]["epochs"]) for r in alike]
        training = statistics.median(per_unit) * share * config["trainer"]["epochs"]
        same = [r.cost["selection_seconds"] for r in alike if selector_name(r.config) == selector_name(config)]
        evaluation = statistics.median(r.cost["evaluation_seconds"] for r in alike)
        return training + (statistics.median(same) if same else 0.0) + evaluation


def _measured_share(config: Mapping[str, Any], alike: Sequence[RunRecord]) -> float | None:
    """The share at this ratio if clusters are as unbalanced as in measured runs; None where no such run is known."""
    if config["selector"]["budget"] != "match_cluster":
        return None
    known = [r for r in alike if r.config["selector"]["budget"] == "match_cluster"]
    balance = [r.selection["data_usage"] / float(r.config["selector"]["ratio"]) for r in known]
    return float(config["selector"]["ratio"]) * statistics.median(balance) if balance else None


def _place(config: Mapping[str, Any]) -> tuple[Any, ...]:
    trainer = config["trainer"]
    return config["model"]["name"], config["data"]["name"], config["data"]["max_rows"], trainer["workers"], trainer["max_length"]


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
    for name in PASSES:
        if name in target.rsplit(".", 1)[-1]:
            return name
    raise KeyError(f"selector {target}")


@dataclass(frozen=True)
class Check:
    """How well the operation count orders and scales measured training times, after one common rate was fitted.

    rate_flops  the fitted rate of one machine; worst and typical: factor between predicted and measured seconds
    """

    runs: int
    rate_flops: float
    typical_factor: float
    worst_factor: float


def check(records: Iterable[RunRecord]) -> Check:
    """Fits one rate to training seconds of complete records and says how far off single runs are. Raises ValueError for none."""
    work, seconds = [], []
    for r in records:
        if r.status == "complete" and r.cost["training_seconds"] > 0 and r.train["tokens"] > 0:
            a_token = 8 if r.config["trainer"]["gradient_checkpointing"] else 6
            work.append(a_token * parameters(r.config["model"]["shape"]) * r.train["tokens"])
            seconds.append(r.cost["training_seconds"])
    if not work:
        raise ValueError("no complete record with a training time to check the cost model against")
    logs = [math.log(w / s) for w, s in zip(work, seconds, strict=True)]
    rate = statistics.median(logs)
    errors = [abs(x - rate) for x in logs]
    return Check(len(work), math.exp(rate), math.exp(statistics.median(errors)), math.exp(max(errors)))
