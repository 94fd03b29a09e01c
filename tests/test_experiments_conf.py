"""Every experiment file composes at paper scale, and the whole grid is counted. Without conf/ these tests fail.

`python tests/test_experiments_conf.py` prints the counts and writes the cost lines of the headers again.
"""

from __future__ import annotations

import re
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf
from omegaconf.errors import ConfigAttributeError

from clusterft.app import register_schema
from experiments.composing import Composer
from experiments.cost_model import CostModel
from experiments.plan import Plan, PlanSet, combine, plan
from experiments.recordstore import Records
from experiments.reported import reported
from experiments.resolve import Resolver, available_selectors
from experiments.spec import ExperimentConfig, expand, load_spec

ROOT = Path(__file__).resolve().parents[1]
CONF = ROOT / "conf"
MEMBERS = [*(f"table{i}" for i in range(1, 18)), "figure4", "figure6", "variance", "beyond", "signals"]
SCALES = ("laptop", "overnight", "smoke")

CELLS, UNIQUE, SHARED = 452, 279, 75
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
def resolver(experiment: str, scale: str | None) -> Resolver:
    return Resolver([f"+experiment={experiment}", *([f"+scale={scale}"] if scale else [])])


def device_hours(plans: PlanSet | Plan) -> float:
    """H100-hours of every run of some plans, each once, by the cost model."""
    model = CostModel()
    hours: dict[str, float] = {}
    for one in plans.plans.values() if isinstance(plans, PlanSet) else [plans]:
        for planned in one.cells:
            if planned.run_id is not None and planned.run_id not in hours:
                hours[planned.run_id] = model.device_hours(resolver(one.spec.id, None)(planned.cell.overrides)[1])
    return sum(hours.values())


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


def test_composing_once_for_many_cells_equals_hydra() -> None:
    composer, base = Composer(), ["+experiment=beyond", "+scale=smoke"]
    for cell in expand(spec_at("beyond", "smoke"))[::9]:
        assert OmegaConf.to_yaml(composer([*base, *cell.overrides])) == OmegaConf.to_yaml(
            compose("config", [*base, *cell.overrides])
        )
    assert Composer(dropped={"experiment": None})(base).experiment is None
    with pytest.raises(ConfigAttributeError, match="epoch"):
        composer([*base, "trainer.epoch=3"])


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


@pytest.mark.slow
def test_an_axis_swept_by_hydra_gives_the_same_run_ids() -> None:
    from clusterft.store import run_id

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
