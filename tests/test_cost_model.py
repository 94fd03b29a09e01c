"""The cost model: counts by hand, and what it says of the committed runs, whose passes and seconds were measured."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from clusterft.records import RunRecord
from experiments.cost_check import check, check_markdown
from experiments.cost_model import TWO_CORES, CostModel, Hardware
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
CONFIG = {
    "model": {"name": "smollm2_135m", "shape": SHAPE},
    "data": {"name": "magicoder_oss_instruct_75k", "max_rows": None, "expected_rows": 1000},
    "selector": {"name": "cluster", "proxy": {"proxy": "paper"}, "budget": "match_cluster", "ratio": "0.50", "rows": None},
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
    for sampler, times in (
        ({"reselect_every_epochs": 1}, 2),
        ({"reselect_every_steps": 4}, 3),
        ({"reselect_every_steps": 10}, 1),
    ):
        assert CostModel(machine).stages({**config, "sampler": sampler})["selection"] == pytest.approx(times * once)


def test_measured_runs_win_over_the_count() -> None:
    record = measured_run(config=CONFIG, training=30.0, tokens=120_000)
    seconds, source = CostModel(measured=[record]).run_seconds({**CONFIG, "trainer": {**CONFIG["trainer"], "epochs": 4}})
    assert source == "measured"
    assert seconds == pytest.approx(60.0 + 10.0 + 5.0)  # twice the epochs, the same selection and evaluation
    assert CostModel().run_seconds({**CONFIG, "model": {"name": "x", "shape": {}}}) == (0.0, "")


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
        ({"name": "ifd", "pre_experience": None}, "2 N forward"),
        ({"name": "ifd", "pre_experience": {"epochs": 1, "clusters": 100, "per_cluster": 1}}, "3.1 N forward, 0.1 N backward"),
        (
            {"name": "less", "gradients": {"warmup_fraction": 0.05, "training": {"epochs": 4}}},
            "4.24 N forward, 4.24 N backward",
        ),
        (
            {"name": "s2l", "proxy": {"points": 12, "training": {"epochs": 3}, "model": {"name": "small", "shape": SHAPE}}},
            "15 N forward, 3 N backward, of the proxy small",
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
    assert {selector_name(r.config) for r in runs} == set(SELECTORS)
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
    """Predicted and measured seconds of three runs by hand: factors 2, 1.5 and 1 in training, a selection without a pass left out."""
    predicted = CostModel(TWO_CORES).stages(MEASURABLE)["training"]
    found = {x.stage: x for x in check([measured_run(MEASURABLE, predicted * factor, 120_000) for factor in (0.5, 1.0, 1.5)])}
    assert found["training"].runs == 3
    assert (found["training"].typical_factor, found["training"].worst_factor) == (pytest.approx(1.5), pytest.approx(2.0))
    assert found["training"].measured == pytest.approx(3 * predicted)
    assert "selection" not in found
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
