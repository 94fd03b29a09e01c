"""The cost model: counts by hand, and what it says of the committed runs, whose passes and seconds were measured."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from clusterft.records import RunRecord
from experiments.cost_check import check, check_markdown
from experiments.cost_model import TWO_CORES, CostModel, Estimate, Hardware
from experiments.cost_passes import LAYERS, SELECTORS, counted_passes, parameters, selection_passes, selector_name

ROOT = Path(__file__).resolve().parents[1]
GOLDEN = ROOT / "tests/golden"

SHAPE = {
    "hidden_size": 576,
    "num_hidden_layers": 30,
    "intermediate_size": 1536,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "vocab_size": 49152,
}
SMALL = {"name": "small", "shape": SHAPE}
CONFIG = {
    "model": {"name": "smollm2_135m", "shape": SHAPE},
    "data": {"name": "magicoder_oss_instruct_75k", "max_rows": None, "expected_rows": 1000},
    "selector": {"name": "cluster", "proxy": {"proxy": "paper"}, "budget": "match_cluster", "ratio": "0.50", "rows": None},
    "clustering": {"proxy": {"proxy": "paper"}},
    "trainer": {"workers": 4, "epochs": 2, "max_length": 200, "gradient_checkpointing": False},
}


def test_parameters_of_a_known_model() -> None:
    """SmolLM2-135M has 134,515,008 parameters with tied embeddings; 35,136 of them are norms, which the count leaves out."""
    assert parameters(SHAPE) == 134_515_008 - 61 * 576


def test_operations_by_hand() -> None:
    """1,000 rows of 200 tokens; half of 60 % is trained on, twice, at 6 operations; the proxy pass takes 2 on all of them."""
    machine = Hardware("test", train_flops=1e9, forward_flops=2e9, decode_tokens_per_second=1.0)
    stages = CostModel(machine).stages(CONFIG)
    p = parameters(SHAPE)
    assert stages["training"] == pytest.approx(200_000 * 0.3 * 2 * 6 * p / 4e9)
    assert stages["selection"] == pytest.approx(200_000 * 2 * p / 8e9)
    full = {
        **CONFIG,
        "selector": {"_target_": "baselines.full_data.FullSelector", "budget": "all", "ratio": "0.50", "rows": None},
    }
    assert CostModel(machine).stages(full)["selection"] == 0.0
    assert CostModel(machine).stages(full)["training"] == pytest.approx(stages["training"] / 0.3)


def test_each_re_selection_costs_another_pass_over_the_pool() -> None:
    """300 rows in steps of 64 are 5 an epoch, 10 in all: anew at step 5, or at 4 and 8, or never."""
    machine = Hardware("test", train_flops=1e9, forward_flops=2e9, decode_tokens_per_second=1.0)
    config = {**CONFIG, "trainer": {**CONFIG["trainer"], "global_batch": 64}}
    once = CostModel(machine).stages(config)["selection"]
    plain = CostModel(machine).device_hours([config])
    for sampler, times in (
        ({"reselect_every_epochs": 1}, 2),
        ({"reselect_every_steps": 4}, 3),
        ({"reselect_every_steps": 10}, 1),
    ):
        again = {**config, "sampler": sampler}
        assert CostModel(machine).selections(again) == times
        assert CostModel(machine).device_hours([again]) - plain == pytest.approx((times - 1) * once * 4 / 3600)


def test_what_runs_share_is_counted_once() -> None:
    """Three seeds of CluSTER and of random, whose budget is read off the same pass: it is made once, training six times."""
    machine = Hardware("test", train_flops=1e9, forward_flops=2e9, decode_tokens_per_second=1.0)
    rows = {"budget": "match_cluster", "ratio": "0.50", "rows": None}
    drawn = {**CONFIG, "selector": {"name": "random", **rows}}
    stages = CostModel(machine).stages(CONFIG)
    hours = CostModel(machine).device_hours([{**one, "seed": seed} for one in (CONFIG, drawn) for seed in range(3)])
    assert hours == pytest.approx((stages["selection"] + 6 * stages["training"]) * 4 / 3600)
    own = {**CONFIG, "selector": {**CONFIG["selector"], "proxy": {"proxy": "lora_b"}}}
    assert len(CostModel(machine).features(own)) == 2  # its own signal, and the paper's that sets the number of rows


def test_a_method_of_the_user_s_own_is_known_by_its_runs_alone() -> None:
    """Its target is no name of ours, whatever words are in it; what was measured of it is taken, and others are not disturbed."""
    rows = {"budget": "match_cluster", "ratio": "0.50", "rows": None}
    for target in ("baselines.complexity.ComplexitySelector", "mine.RandomForestSelector", "mine.CarefullyChosen"):
        own = {**CONFIG, "selector": {"_target_": target, **rows}}
        assert selector_name(own) == target
        assert CostModel().estimate(own) == Estimate()
        record = measured_run(config=own, training=30.0, tokens=120_000)
        assert CostModel(measured=[record]).estimate(own) == Estimate(30.0 + 5.0 + 10.0, {}, "measured")
        assert CostModel(measured=[record]).estimate(CONFIG).seconds == pytest.approx(30.0 + 5.0)


def test_measured_passes_are_told_apart_by_their_signal() -> None:
    """10 s of the paper's proxy say nothing of LoRA-B's pass, which stays the model's; two selections in one run are two of 5 s."""
    paper = measured_run(config=MEASURABLE, training=30.0, tokens=120_000)
    own = {**MEASURABLE, "selector": {**MEASURABLE["selector"], "proxy": {"proxy": "lora_b"}}}
    found = list(CostModel(measured=[paper]).estimate(own).features.values())
    assert found == [pytest.approx(CostModel().stages(own)["selection"]), 10.0]
    twice = replace(paper, selection={**paper.selection, "reselections": [{}]})
    assert list(CostModel(measured=[twice]).estimate(MEASURABLE).features.values()) == [5.0]


@pytest.mark.parametrize(
    "lost", ["evaluation_seconds", "training_seconds", "selection_seconds", "feature_seconds", "forward_passes"]
)
@pytest.mark.parametrize("value", [None, float("nan"), "12 s", "absent"])
def test_a_record_without_its_seconds_is_passed_over(lost: str, value: object) -> None:
    whole = measured_run(config=MEASURABLE, training=30.0, tokens=120_000)
    cost = {key: its for key, its in whole.cost.items() if key != lost} | ({} if value == "absent" else {lost: value})
    broken = replace(whole, cost=cost)
    assert CostModel(measured=[broken, whole]).estimate(MEASURABLE).source == "measured"
    assert check([broken, whole])
    assert check_markdown([broken, replace(broken, config={}), replace(broken, hardware={})]) is not None
    counted_passes(broken)


def test_measured_runs_win_over_the_count() -> None:
    record = measured_run(config=CONFIG, training=30.0, tokens=120_000)
    found = CostModel(measured=[record]).estimate({**CONFIG, "trainer": {**CONFIG["trainer"], "epochs": 4}})
    assert found.source == "measured"
    assert found.seconds == pytest.approx(60.0 + 5.0)  # twice the epochs, the same evaluation
    assert list(found.features.values()) == [10.0]
    assert CostModel().estimate({**CONFIG, "model": {"name": "x", "shape": {}}}) == Estimate()


def test_evaluation_tokens_by_hand() -> None:
    """Sixteen answers of at most 64 tokens; 24 held-out rows of 200; 6 tasks of 25 questions, whose 4 options share the question."""
    heldout = {"_target_": "eval.heldout.HeldoutLoss", "precision": "training"}
    generate = {"_target_": "eval.humaneval.HumanEval", "subset": {"n": 16, "rule": "x"}, "max_new_tokens": 64}
    config = {**CONFIG, "data": {**CONFIG["data"], "holdout_rows": 24}, "evaluators": {"a": generate, "b": heldout}}
    assert CostModel().evaluation_tokens(config) == (16 * 64, 24 * 200)
    medical = {"_target_": "eval.medical.MedicalEvaluator", "tasks": list("abcdef"), "modes": ["plain"], "limit": {"n": 25}}
    asked = {**config, "evaluators": {"m": {**medical, "pack_tokens": 512}}}
    assert CostModel().evaluation_tokens(asked) == (0, 150 * (110 + 40))
    apart = {**config, "evaluators": {"m": {**medical, "pack_tokens": None, "limit": None, "modes": ["plain", "template"]}}}
    assert CostModel().evaluation_tokens(apart) == (0, 2 * 6 * 1000 * 4 * 120)
    whole = {**config, "evaluators": {"a": {**generate, "subset": None, "max_new_tokens": 512}}}
    assert CostModel().evaluation_tokens(whole) == (164 * 250, 0)


@pytest.mark.parametrize(
    ("selector", "text"),
    [
        ({"name": "full"}, "none"),
        ({"name": "cluster", "proxy": {"proxy": "paper"}}, "1 N forward"),
        ({"name": "cluster", "proxy": {"proxy": "last_layers"}}, "1 N forward, 0.333 N backward"),
        ({"name": "cluster", "proxy": {"proxy": "last_layers", "layers": 40}}, "1 N forward, 1 N backward"),
        ({"name": "ifd", "pre_experience": None}, "2 N forward"),
        ({"name": "ifd", "pre_experience": {"epochs": 1, "clusters": 100, "per_cluster": 1}}, "3.1 N forward, 0.1 N backward"),
        (
            {"name": "ifd", "pre_experience": {"epochs": 2, "clusters": 100, "per_cluster": 100}},
            "5 N forward, 2 N backward",
        ),
        (
            {"name": "less", "gradients": {"warmup_fraction": 0.05, "training": {"epochs": 4}}},
            "4.24 N forward, 4.24 N backward",
        ),
        (
            {"name": "s2l", "proxy": {"points": 12, "training": {"epochs": 3, "batch_rows": 128}, "model": SMALL}},
            "15 N forward, 3 N backward, of the proxy small",
        ),
        (  # three updates of at most 400 rows leave three points
            {"name": "s2l", "proxy": {"points": 12, "training": {"epochs": 1, "batch_rows": 400}, "model": SMALL}},
            "4 N forward, 1 N backward, of the proxy small",
        ),
    ],
)
def test_passes_by_hand(selector: dict[str, object], text: str) -> None:
    """1,000 rows, 10 validation rows, 30 layers: 10 of 30 are a third; 4 (1 + 0.05 + 0.01) is 4.24."""
    data = {**CONFIG["data"], "validation": {"kind": "heldout", "rows": 10}}
    assert str(selection_passes({**CONFIG, "data": data, "selector": selector})) == text


def test_the_passes_of_an_unknown_method_are_not_guessed() -> None:
    with pytest.raises(KeyError, match="mine"):
        selection_passes({**CONFIG, "selector": {"name": "mine"}})


def test_the_default_depth_is_the_proxy_s() -> None:
    from clusterft.proxy import ProxyParams

    assert ProxyParams.__dataclass_fields__["layers"].default == LAYERS


@pytest.mark.parametrize("scale", ["laptop", "overnight"])
def test_every_committed_run_counted_the_passes_that_were_planned(scale: str) -> None:
    """What table 1 and the paper-scale hours rest on. A run that selects again counts every selection."""
    runs = committed(scale)
    assert {selector_name(r.config) for r in runs} == set(SELECTORS.values())
    for record in runs:
        planned, counted = selection_passes(record.config), counted_passes(record)
        times = 1 + len(record.selection.get("reselections") or ())
        assert counted is not None
        assert (counted.forward, counted.backward) == pytest.approx((times * planned.forward, times * planned.backward)), (
            record.run_id
        )


@pytest.mark.parametrize("scale", ["laptop", "overnight"])
def test_the_cost_model_holds_for_the_committed_runs(scale: str) -> None:
    """In the sum of all runs each stage is predicted within a factor of 2, and half of the runs are, too."""
    for stage in check(committed(scale)):
        assert 0.5 < stage.predicted / stage.measured < 2.0, stage
        assert stage.typical_factor < 2.0, stage


def test_the_check_says_how_far_the_prediction_is_off() -> None:
    """Predicted and measured seconds of three runs by hand: factors 2, 1.5 and 1 in training."""
    predicted = CostModel(TWO_CORES).stages(MEASURABLE)["training"]
    found = {x.stage: x for x in check([measured_run(MEASURABLE, predicted * factor, 120_000) for factor in (0.5, 1.0, 1.5)])}
    assert found["training"].runs == 3
    assert (found["training"].typical_factor, found["training"].worst_factor) == (pytest.approx(1.5), pytest.approx(2.0))
    assert found["training"].measured == pytest.approx(3 * predicted)
    assert found["selection"].runs == 1  # three runs that read the features of one pass
    assert "| training | 1 | 490 | 490 | 1.00 | 1.00 |" in check_markdown([measured_run(MEASURABLE, predicted, 120_000)])
    with pytest.raises(ValueError, match="no complete record"):
        check([])
    assert check_markdown([]) == ""


MEASURABLE = {**CONFIG, "evaluators": {"heldout": {"_target_": "eval.heldout.HeldoutLoss"}}}


def committed(scale: str) -> list[RunRecord]:
    return [
        RunRecord.from_json(json.loads(path.read_text())) for path in sorted((ROOT / f"results/{scale}/records").glob("*.json"))
    ]


def measured_run(config: dict[str, object], training: float, tokens: int) -> RunRecord:
    record = json.loads((GOLDEN / "tables/machine_a/cluster-1.00-0.json").read_text())
    cost = {**record["cost"], "training_seconds": training, "selection_seconds": 10.0, "evaluation_seconds": 5.0}
    cost |= {"forward_passes": 0, "backward_passes": 0}
    return RunRecord.from_json(
        {**record, "config": config, "cost": cost, "hardware": {"gpus": []}, "train": {**record["train"], "tokens": tokens}}
    )
