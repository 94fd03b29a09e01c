"""How long a run takes: from measured runs like it where there are any, else from a count of floating-point operations.

In comes a run's configuration; out come wall seconds and where they come from. The operation count is the usual one: 2 operations
a parameter and token forward, 4 backward, 2 more where activations are computed again. Rates and what is assumed about data stand
in `Hardware` and `Assumptions`; `cost_check` compares it with measured runs, so that the paper-scale estimate has an error bar.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from clusterft.records import RunRecord
from experiments.cost_passes import (
    Passes,
    feature_passes,
    own_feature_key,
    parameters,
    pool_rows,
    selection_passes,
    selector_name,
)


@dataclass(frozen=True)
class Hardware:
    """One device. Rates are sustained, in FLOP/s: peak times a utilisation that is commonly reached."""

    name: str
    train_flops: float
    forward_flops: float
    decode_tokens_per_second: float
    shared: bool = False  # all workers share this one device
    start_seconds: float = 0.0  # starting processes and loading weights, once a stage that has work


H100 = Hardware("H100", train_flops=0.40 * 989e12, forward_flops=0.45 * 989e12, decode_tokens_per_second=1000.0)
"""989e12: dense bf16 peak of an H100 SXM; 40 and 45 % utilisation and the decoding rate (7B, batches of 16) are assumptions."""

TWO_CORES = Hardware(
    "2 CPU cores", train_flops=2.0e11, forward_flops=2.6e11, decode_tokens_per_second=120.0, shared=True, start_seconds=6.0
)
"""What two cores with AVX-512 gave for the 135 M model in bf16 autocast: some 250 tokens/s training, 1,000 forward."""


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
            "medical_smoke_instruct": 80.0,
        }
    )
    share_at_full_ratio: float = 0.6  # K q / N at r = 1: the paper reports 59 and 65.9 %, an unbalanced clustering gives less
    share_of_limit: float = 0.9  # mean length over the limit, where a limit on rows cuts most of a pool off
    problems: Mapping[str, int] = field(default_factory=lambda: {"HumanEval": 164, "MBPP": 378})  # as evalplus has them
    answer_tokens: float = 250.0  # of a generated answer, when the limit allows more
    questions: int = 1000  # of a medical task that is scored whole; they have 100 to 4,183
    question_tokens: float = 110.0
    options: int = 4
    option_tokens: float = 10.0


@dataclass(frozen=True)
class Estimate:
    """Wall seconds of a run. features: key -> seconds of work that runs with the same key share; source: measured | model | ""."""

    seconds: float = 0.0
    features: Mapping[str, float] = field(default_factory=dict)
    source: str = ""

    def without(self, made: Collection[str]) -> Estimate:
        """The same run where some features are there already."""
        return replace(self, features={key: seconds for key, seconds in self.features.items() if key not in made})


@dataclass(frozen=True)
class CostModel:
    """Estimates runs.

    measured  complete records to learn from; a similar run is one of the same model, data and workers
    devices   devices that there are, when workers share them; None: one a worker
    """

    hardware: Hardware = H100
    assumptions: Assumptions = field(default_factory=Assumptions)
    measured: Sequence[RunRecord] = ()
    devices: int | None = None

    def estimate(self, config: Mapping[str, Any]) -> Estimate:
        """What a run will take, from runs like it where there are any; empty when the sizes or the method are unknown."""
        try:
            stages, features = self.stages(config), self.features(config)
        except (KeyError, TypeError):
            stages, features = {}, {}
        passes = self._measured_passes(config)
        features |= {key: passes[key] for key in features if key in passes}
        once = next(iter(features.values()), 0.0) if features and selection_passes(config) else 0.0
        again = (self.selections(config) - 1) * once
        seconds = self._from_measured(config)
        if seconds is not None:
            alone = (
                0.0 if stages else passes.get(selector_name(config), 0.0)
            )  # a method of the user's own shares nothing that is known
            return Estimate(seconds + again + alone, features, "measured")
        return Estimate(again + stages["training"] + stages["evaluation"], features, "model") if stages else Estimate()

    def features(self, config: Mapping[str, Any]) -> dict[str, float]:
        """Key of a feature -> wall seconds of its pass over the pool, which runs with equal keys share. Raises KeyError like `stages`."""
        return {key: self._pass_seconds(passes, config) for key, passes in feature_passes(config).items()}

    def stages(self, config: Mapping[str, Any]) -> dict[str, float]:
        """Wall seconds of one selection by the method's own passes, of training and of evaluation, by operation count.

        Raises KeyError, TypeError if a size is not in the config.
        """
        p, trainer, start = parameters(config["model"]["shape"]), config["trainer"], self.hardware.start_seconds
        a_token = 8 if trainer["gradient_checkpointing"] else 6
        train = self._pool_tokens(config) * self.share(config) * trainer["epochs"] * a_token * p
        generated, scored = self.evaluation_tokens(config)
        evaluate = generated / self.hardware.decode_tokens_per_second + scored * 2 * p / self.hardware.forward_flops
        return {
            "selection": self._pass_seconds(selection_passes(config), config),
            "training": train / (self._devices(config) * self.hardware.train_flops) + start,
            "evaluation": evaluate + (start if evaluate else 0.0),
        }

    def _pass_seconds(self, made: Passes, config: Mapping[str, Any]) -> float:
        if not made:
            return 0.0
        p = parameters((made.proxy or config["model"])["shape"])
        work = self._pool_tokens(config) * (2 * made.forward + 4 * made.backward) * p
        return work / (self._devices(config) * self.hardware.forward_flops) + self.hardware.start_seconds

    def _pool_tokens(self, config: Mapping[str, Any]) -> float:
        return pool_rows(config) * self._mean_tokens(config)

    def _devices(self, config: Mapping[str, Any]) -> int:
        workers = int(config["trainer"]["workers"])
        return 1 if self.hardware.shared else min(workers, self.devices or workers)

    def evaluation_tokens(self, config: Mapping[str, Any]) -> tuple[float, float]:
        """(tokens to generate, tokens to score in forward passes) of all evaluators. Raises KeyError for an unknown evaluator."""
        known, generated, scored = self.assumptions, 0.0, 0.0
        for node in (config.get("evaluators") or {}).values():
            name = str(node["_target_"]).rsplit(".", 1)[-1]
            if name == "HeldoutLoss":
                scored += (config["data"].get("holdout_rows") or 0) * self._mean_tokens(config)
            elif name == "MedicalEvaluator":
                questions = len(node["tasks"]) * len(node["modes"]) * (node["limit"]["n"] if node["limit"] else known.questions)
                asked = known.options if node["pack_tokens"] is None else 1  # packed options share their question
                scored += questions * (asked * known.question_tokens + known.options * known.option_tokens)
            else:
                problems = node["subset"]["n"] if node.get("subset") else known.problems[name]
                generated += problems * min(node["max_new_tokens"], known.answer_tokens)
        return generated, scored

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

    def device_hours(self, configs: Iterable[Mapping[str, Any]]) -> float:
        """Device-hours of some runs by operation count: a feature that several of them share is made once, evaluation takes one
        device, the rest all workers. Raises KeyError, TypeError like `stages`."""
        seconds, features = 0.0, {}
        for config in configs:
            stages, workers = self.stages(config), config["trainer"]["workers"]
            seconds += ((self.selections(config) - 1) * stages["selection"] + stages["training"]) * workers + stages["evaluation"]
            features.update({key: its * workers for key, its in self.features(config).items()})
        return (seconds + sum(features.values())) / 3600

    def _mean_tokens(self, config: Mapping[str, Any]) -> float:
        mean = min(self.assumptions.mean_tokens[config["data"]["name"]], float(config["trainer"]["max_length"]))
        limit = config["data"].get("max_row_tokens")
        return mean if limit is None else min(mean, self.assumptions.share_of_limit * limit)

    def _alike(self, config: Mapping[str, Any]) -> list[RunRecord]:
        place = _place(config)
        return [r for r in self.measured if place and r.status == "complete" and _place(r.config) == place and _is_timed(r)]

    def _from_measured(self, config: Mapping[str, Any]) -> float | None:
        """Seconds of training and evaluation, None without a run like this one."""
        alike = self._alike(config)
        if not alike:
            return None
        share = _measured_share(config, alike) or self.share(config)
        per_unit = [r.cost["training_seconds"] / (r.selection["data_usage"] * r.config["trainer"]["epochs"]) for r in alike]
        evaluation = statistics.median(r.cost["evaluation_seconds"] for r in alike)
        return statistics.median(per_unit) * share * float(config["trainer"]["epochs"]) + evaluation

    def _measured_passes(self, config: Mapping[str, Any]) -> dict[str, float]:
        """Key of a feature, or name of a method of the user's own -> seconds of one selection, the median of the runs like this one."""
        seconds: dict[str, list[float]] = {}
        for r in self._alike(config):
            try:
                key = own_feature_key(r.config)
            except (KeyError, TypeError):
                key = selector_name(r.config)
            times = 1 + len(r.selection.get("reselections") or ())
            seconds.setdefault(key, []).append(r.cost["selection_seconds"] / times)
        return {key: statistics.median(its) for key, its in seconds.items()}


def _is_timed(record: RunRecord) -> bool:
    """Whether a record has the finite, positive numbers that an estimate needs."""
    seconds = [record.cost.get(f"{stage}_seconds") for stage in ("selection", "training", "evaluation")]
    known = [*seconds, record.selection.get("data_usage")]
    return all(isinstance(x, int | float) and math.isfinite(x) for x in known) and bool(known[-1])


def _measured_share(config: Mapping[str, Any], alike: Sequence[RunRecord]) -> float | None:
    """The share at this ratio if clusters are as unbalanced as in measured runs; None where no such run is known."""
    if config["selector"]["budget"] != "match_cluster":
        return None
    known = [r for r in alike if r.config["selector"]["budget"] == "match_cluster"]
    balance = [r.selection["data_usage"] / float(r.config["selector"]["ratio"]) for r in known]
    return float(config["selector"]["ratio"]) * statistics.median(balance) if balance else None


def _place(config: Mapping[str, Any]) -> tuple[Any, ...] | None:
    """What runs have in common whose seconds can be compared; None for a configuration that lacks it."""
    try:
        trainer, data = config["trainer"], config["data"]
        return config["model"]["name"], data["name"], data["max_rows"], trainer["workers"], trainer["max_length"]
    except (KeyError, TypeError):
        return None
