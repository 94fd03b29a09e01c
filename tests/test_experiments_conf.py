"""Every experiment file composes at paper scale, and the whole grid is counted. Without conf/ these tests fail.

`python tests/test_experiments_conf.py` prints the counts and writes the cost lines of the headers again.
"""

from __future__ import annotations

import re
import sys
from functools import cache
from itertools import cycle
from pathlib import Path
from typing import Any

import pytest
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf
from omegaconf.errors import ConfigAttributeError

from clusterft.app import register_schema
from clusterft.proxy import ProxyParams
from clusterft.store import run_id
from experiments.analysis import make_table
from experiments.composing import Composer
from experiments.cost_model import CostModel
from experiments.drive import drivers, wanted_of
from experiments.plan import Plan, PlanSet, combine, plan
from experiments.recordstore import Records
from experiments.reported import reported
from experiments.resolve import DROPPED, Resolver, available_selectors, stand_in
from experiments.spec import ExperimentConfig, expand, load_spec

ROOT = Path(__file__).resolve().parents[1]
CONF = ROOT / "conf"
MEMBERS = [*(f"table{i}" for i in range(1, 18)), "figure4", "figure6", "variance", "beyond", "signals"]
SCALES = ("laptop", "overnight", "smoke")

CELLS, UNIQUE, SHARED = 452, 282, 75
"""Cells of all experiments at paper scale, runs behind them, runs that more than one experiment needs."""


@pytest.fixture(autouse=True, scope="module")
def _composing() -> Any:
    register_schema()
    with initialize_config_dir(str(CONF), version_base="1.3"):
        yield


def spec_at(experiment: str, scale: str | None = None) -> ExperimentConfig:
    overrides = [f"+experiment={experiment}", *([f"+scale={scale}"] if scale else [])]
    return load_spec(compose("config", overrides=overrides).experiment, scale)


@cache
def whole_grid(scale: str | None = None) -> PlanSet:
    plans: list[Plan] = []
    for experiment in MEMBERS:
        spec = spec_at(experiment, scale)
        plans.append(plan(spec, resolver(experiment, scale), Records(), available_selectors(), CostModel()))
    return combine(plans)


@cache
def composer() -> Composer:
    return Composer(dropped=DROPPED)


@cache
def resolver(experiment: str, scale: str | None) -> Resolver:
    return Resolver([f"+experiment={experiment}", *([f"+scale={scale}"] if scale else [])], composer())


def device_hours(plans: PlanSet | Plan) -> float:
    """H100-hours of every run of some plans, each once, by the cost model."""
    configs: dict[str, Any] = {}
    for one in plans.plans.values() if isinstance(plans, PlanSet) else [plans]:
        for planned in one.cells:
            if planned.run_id is not None and planned.run_id not in configs:
                configs[planned.run_id] = resolver(one.spec.id, None)(planned.cell.overrides)[1]
    return CostModel().device_hours(configs.values())


def test_there_is_one_file_for_every_table_and_figure() -> None:
    assert sorted(p.stem for p in (CONF / "experiment").glob("*.yaml")) == sorted([*MEMBERS, "all"])
    assert sorted(spec_at("all").members) == sorted(MEMBERS)


@pytest.mark.parametrize("experiment", [*MEMBERS, "all"])
def test_every_file_has_its_header_and_its_name(experiment: str) -> None:
    text = (CONF / f"experiment/{experiment}.yaml").read_text(encoding="utf-8")
    assert text.startswith("# @package _global_\n# ")
    assert f"# Command:  python run.py +experiment={experiment} [+scale=laptop]\n" in text
    assert re.search(r"^# Cost:     about [\d,]+ H100-hours .*$|^# Cost:     none", text, flags=re.MULTILINE), "no cost line"
    assert re.search(r"^# Expected: \S", text, flags=re.MULTILINE)
    spec = spec_at(experiment)
    assert spec.id == experiment
    reported(spec.reported)


@pytest.mark.parametrize("experiment", MEMBERS)
def test_every_experiment_suits_every_scale(experiment: str) -> None:
    node = compose("config", overrides=[f"+experiment={experiment}", "+scale=laptop"]).experiment
    for scale in SCALES:
        spec = load_spec(node, scale)
        assert spec.kind == "generated" or expand(spec)


@pytest.mark.parametrize("scale", [None, *SCALES])
def test_a_re_selection_is_reached_at_every_scale(scale: str | None) -> None:
    found = 0
    for cell in expand(spec_at("beyond", scale)):
        config = resolver("beyond", scale)(cell.overrides)[1]
        epochs = config["sampler"]["reselect_every_epochs"]
        found += epochs is not None or config["sampler"]["reselect_every_steps"] is not None
        assert epochs is None or epochs < config["trainer"]["epochs"], cell.name
    assert found == 3


@pytest.mark.parametrize("scale", [None, *SCALES])
@pytest.mark.parametrize("experiment", ["signals", "beyond"])
def test_variants_stand_beside_the_paper_s_method_at_equal_budget(experiment: str, scale: str | None) -> None:
    """The clusters that set the number of rows are the paper's for every variant, whatever it clusters by itself."""
    budgets = set()
    for cell in expand(spec_at(experiment, scale)):
        config = resolver(experiment, scale)(cell.overrides)[1]
        budgets.add(str((config["clustering"], config["selector"]["budget"], config["selector"]["ratio"])))
    assert len(budgets) == 1


@pytest.mark.parametrize("scale", [None, *SCALES])
@pytest.mark.parametrize("experiment", ["signals", "beyond"])
def test_every_signal_can_be_computed_in_the_precision_of_its_scale(experiment: str, scale: str | None) -> None:
    """The gradient signals refuse autocast, which is what the trainer of small machines uses."""
    for cell in expand(spec_at(experiment, scale)):
        ProxyParams(**resolver(experiment, scale)(cell.overrides)[1]["clustering"]["proxy"])


def test_composing_once_for_many_cells_equals_hydra() -> None:
    quick, base = Composer(), ["+experiment=beyond", "+scale=smoke"]
    for cell in expand(spec_at("beyond", "smoke"))[::9]:
        assert OmegaConf.to_yaml(quick([*base, *cell.overrides])) == OmegaConf.to_yaml(
            compose("config", [*base, *cell.overrides])
        )
        assert quick.resolved([*base, *cell.overrides]) == OmegaConf.to_container(
            compose("config", [*base, *cell.overrides]), resolve=True
        )
    assert Composer(dropped={"experiment": None})(base).experiment is None
    with pytest.raises(ConfigAttributeError, match="epoch"):
        quick([*base, "trainer.epoch=3"])


def test_a_mapping_of_one_cell_does_not_stay_for_the_next() -> None:
    quick, base = Composer(), ["+scale=smoke"]
    first = quick.resolved([*base, "evaluators.humaneval.subset={n: 3, rule: content_hash}", "seed=1"])
    again = quick.resolved([*base, "seed=1"])
    assert (first["evaluators"]["humaneval"]["subset"]["n"], first["seed"]) == (3, 1)
    assert again == OmegaConf.to_container(compose("config", [*base, "seed=1"]), resolve=True)


def test_tables_that_differ_in_their_own_node_only_are_composed_through_one() -> None:
    assert stand_in("table2") == stand_in("table7") == stand_in("figure6")
    assert len({stand_in(name) for name in ("table2", "table3", "table6", "table12", "table16")}) == 5
    for name, scale in zip(MEMBERS, cycle((None, "smoke")), strict=False):  # in turns: composing is what takes the time
        over = [f"+experiment={name}", *([f"+scale={scale}"] if scale else [])]
        cells = expand(spec_at(name, scale))[-1:] if spec_at(name, scale).kind != "generated" else []
        for cell in cells:
            if not any(o.startswith("+experiment") for o in cell.overrides):
                assert Resolver(over)(cell.overrides)[0] == run_id(compose("config", overrides=[*over, *cell.overrides]))


@pytest.mark.parametrize("scale", [None, *SCALES])
def test_every_experiment_is_planned_by_the_real_driver(scale: str | None, tmp_path: Path) -> None:
    """As `python run.py +experiment=all plan=true` does it: nothing is refused, and a member's node is what Hydra composes."""
    over = ["+experiment=all", *([f"+scale={scale}"] if scale else []), f"runtime.runs_dir={tmp_path}"]
    every = drivers(compose("config", overrides=over), over)
    assert [one.spec.id for one in every] == spec_at("all").members
    planned = [one.plan(Records()) for one in every]
    jobs = wanted_of(every, planned, None)
    assert len({its.run_id for _, its in jobs}) == len(jobs) == combine(planned).unique_runs
    for one, its in zip(every, planned, strict=True):
        if scale == "laptop":  # one scale is enough for that, and composing every file takes seconds
            assert one.spec == spec_at(one.spec.id, scale)
        assert {c.state for c in its.cells} <= {"missing", "not built yet"}
        if one.spec.kind != "generated":
            config = one.resolve.config(its.of("missing")[0].cell.overrides)
            assert run_id(config) == its.of("missing")[0].run_id
            assert config.experiment is None and str(config.runtime.runs_dir) == str(tmp_path)
        one.table(Records())


def test_a_seed_on_the_command_line_narrows_every_table_that_has_it(tmp_path: Path) -> None:
    over = ["+experiment=all", "+scale=smoke", f"runtime.runs_dir={tmp_path}"]
    every = drivers(compose("config", overrides=over), [*over, "seed=1"])
    planned = [one.plan(Records()) for one in every]
    jobs = wanted_of(every, planned, None)
    assert {its.cell.seed for _, its in jobs} == {1}
    assert "variance" not in {one.spec.id for one, _ in jobs}  # it has seed 0 only
    with pytest.raises(ValueError, match="counts within one table"):
        wanted_of(every, planned, 3)


@pytest.mark.parametrize("experiment", ["table3", "table16"])
@pytest.mark.parametrize("scale", [None, *SCALES])
def test_medical_tables_show_what_the_evaluator_of_that_scale_gives(experiment: str, scale: str | None) -> None:
    from clusterft.records import Metric
    from eval.medical_scores import averages, names
    from eval.medical_sources import TASKS, QuestionSet

    over = [f"+experiment={experiment}", *([f"+scale={scale}"] if scale else [])]
    evaluator = compose("config", overrides=over).evaluators.medical
    questions = {task: QuestionSet(TASKS[task], ({}, {}), ("a", "b"), "hash") for task in evaluator.tasks}
    given = {"heldout/nll_micro", "heldout/nll_macro"}
    for mode in evaluator.modes:
        own = [Metric(task, name, 0.5, 2, 0.1) for task in questions for name in names(mode)]
        given |= {f"{m.task}/{m.name}" for m in [*own, *averages(own, questions)]}
    spec = spec_at(experiment, scale)
    assert spec.metrics and len(spec.average_of) == 1
    assert {*spec.metrics, *spec.average_of} <= given


@pytest.mark.slow
def test_the_whole_grid_at_paper_scale_is_counted() -> None:
    grid = whole_grid()
    assert not [c.cell.name for p in grid.plans.values() for c in p.of("not built yet") if c.cell.row not in p.spec.not_built]
    assert (grid.cells, grid.unique_runs, grid.shared_runs) == (CELLS, UNIQUE, SHARED)


@pytest.mark.slow
def test_full_data_is_one_run_for_every_ratio_and_table() -> None:
    plans = whole_grid().plans
    full = {c.run_id for c in plans["table2"].cells if c.cell.row == "Full data"}
    assert len(full) == 3
    assert full == {c.run_id for c in plans["table4"].cells if c.cell.row == "Full data"}
    assert {c.run_id for c in plans["table4"].cells} == {c.run_id for c in plans["table2"].cells}
    assert {c.run_id for c in plans["table13"].cells} == {c.run_id for c in plans["table7"].cells}
    first = plans["table11"].cells[0]
    assert first.run_id in {c.run_id for c in plans["table2"].cells if c.cell.row == "CluSTER"}


def test_table1_plans_passes_at_paper_scale() -> None:
    """LESS: 4 epochs over the pool after 4 on 5 % of it; S2L: 3 epochs of its proxy and 12 points."""
    table = make_table(spec_at("table1"), resolver("table1", None), Records(), available_selectors())
    assert [line.values["passes"].text for line in table.lines] == [
        "none (planned)",
        "4.2 N forward, 4.2 N backward (planned)",
        "15 N forward, 3 N backward, of the proxy pythia_70m (planned)",
        "2 N forward (planned)",
        "1 N forward (planned)",
    ]


@pytest.mark.slow
def test_an_axis_swept_by_hydra_gives_the_same_run_ids() -> None:
    wanted = {c.run_id for c in whole_grid().plans["figure4"].cells if c.cell.row in ("K=2", "K=8") and c.cell.seed == 1}
    swept = {run_id(compose("config", overrides=["selector=cluster", f"clustering.n_clusters={k}", "seed=1"])) for k in (2, 8)}
    assert swept == wanted


def write_costs() -> None:
    """Puts the cost model's hours into the header of every experiment file."""
    grid = whole_grid()
    for name, planned in [*grid.plans.items(), ("all", grid)]:
        path = CONF / f"experiment/{name}.yaml"
        hours = device_hours(planned)
        line = f"# Cost:     about {hours:,.0f} H100-hours by experiments/cost_model.py" if hours else "# Cost:     none"
        path.write_text(re.sub(r"^# Cost:.*$", line, path.read_text(encoding="utf-8"), flags=re.MULTILINE), encoding="utf-8")
    print(f"cells {grid.cells}, runs {grid.unique_runs}, shared {grid.shared_runs}, H100-hours {device_hours(grid):,.0f}")


if __name__ == "__main__":
    register_schema()
    with initialize_config_dir(str(CONF), version_base="1.3"):
        sys.exit(write_costs())
