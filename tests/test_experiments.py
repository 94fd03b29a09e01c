"""Specs expand to the cells one would write by hand; plans count what is missing; case 18 by its own numbers."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
import yaml
from omegaconf.errors import ConfigKeyError

from experiments.grid import array_string, check_array, check_index, equal_configs, grid_config, grid_size, parse_array
from experiments.plan import combine, describe, plan
from experiments.recordstore import Records, load_records
from experiments.reported import reported
from experiments.spec import expand, load_spec, override_key
from experiments.statistics import mean_sd, t_interval, verdict, wilson_interval

ROOT = Path(__file__).resolve().parents[1]
GOLDEN = Path(__file__).parent / "golden"
CASE = GOLDEN / "cases/18-sweep-commas-array-index"
SMALL = {
    "id": "small",
    "title": "t",
    "kind": "grid",
    "rows": {"Full data": ["selector=full"], "Random": ["selector=random"], "LESS": ["selector=less"]},
    "columns": {"r=1": ["selector.ratio=1"], "r=.5": ["selector.ratio=.5"]},
    "once": ["Full data"],
    "seeds": [0, 1],
    "show": ["scores"],
}


def by_name(overrides: Sequence[str]) -> tuple[str, dict[str, str]]:
    given = dict(o.split("=", 1) for o in overrides)
    return " ".join(given[k] for k in sorted(given)), given


def test_cells_are_row_by_column_by_seed() -> None:
    cells = expand(load_spec(SMALL))
    assert [c.name for c in cells[:5]] == [
        "Full data seed=0",
        "Full data seed=1",
        "Random r=1 seed=0",
        "Random r=1 seed=1",
        "Random r=.5 seed=0",
    ]
    assert [c.index for c in cells] == list(range(10))
    assert cells[4].overrides == ("selector=random", "selector.ratio=.5", "seed=0")
    assert cells[0].overrides == ("selector=full", "seed=0")
    assert cells[-1].selector == "less"


def test_a_scale_replaces_what_it_names_and_nothing_else() -> None:
    node = {**SMALL, "by_scale": {"laptop": {"columns": {"r=1": ["selector.ratio=1"]}, "seeds": [3]}}}
    assert [c.name for c in expand(load_spec(node, "laptop"))] == ["Full data seed=3", "Random r=1 seed=3", "LESS r=1 seed=3"]
    assert len(expand(load_spec(node, "overnight"))) == 10


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"kind": "gird"}, "kind 'gird' is not one of grid"),
        ({"seeds": [1, 1]}, "seeds .* repeat"),
        ({"rows": {}}, "needs rows, columns and seeds"),
        ({"once": ["All"]}, "'All' is not a row; rows are Full data, Random, LESS"),
        ({"show": ["score"]}, "show 'score' is unknown"),
        ({"values": ["a.b"]}, "value 'a.b' is unknown"),
        ({"values": ["gradient_diversity.diversity"]}, "comes from no artifact"),
        ({"artifacts": {"nothing": []}}, "artifact 'nothing' is unknown; known are gradient_diversity"),
    ],
)
def test_a_spec_that_contradicts_itself_is_refused(change: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        load_spec({**SMALL, **change})


def test_an_unknown_key_is_refused_by_name() -> None:
    with pytest.raises(ConfigKeyError, match="colums"):
        load_spec({**SMALL, "colums": {}})


def test_a_cell_that_sets_a_key_twice_is_refused() -> None:
    node = {**SMALL, "common": ["selector.ratio=.3"]}
    with pytest.raises(ValueError, match=r"small.*selector\.ratio is set more than once"):
        expand(load_spec(node))


def test_override_keys() -> None:
    assert [override_key(o) for o in ("a.b=1=2", "+a=1", "++a=1", "~a", "~a=1")] == ["a.b", "a", "a", "a", "a"]
    with pytest.raises(ValueError, match="has no '='"):
        override_key("a")


def test_a_plan_counts_states_and_runs() -> None:
    records = load_records([GOLDEN / "tables/machine_a", GOLDEN / "tables/machine_b"])
    spec = load_spec(yaml.safe_load((GOLDEN / "tables/spec.yaml").read_text()))
    made = plan(spec, golden_resolve, records, available=("full", "random", "ifd", "cluster"))
    assert {s: len(made.of(s)) for s in ("complete", "missing", "failed", "conflict", "not built yet")} == {
        "complete": 18,
        "missing": 1,
        "failed": 1,
        "conflict": 1,
        "not built yet": 6,
    }
    assert [c.run_id for c in made.to_run] == ["random-0.50-2", "ifd-1.00-0"]
    assert made.missing_array == "8,15"
    assert "[8] Random r=0.50 seed=2: missing, never run" in describe(made)
    assert not made.complete


def golden_resolve(overrides: Sequence[str]) -> tuple[str, dict[str, str]]:
    given = dict(o.split("=", 1) for o in overrides)
    ratio = given.get("selector.ratio", "").strip("'")
    return "-".join(part for part in (given["selector"], ratio, given["seed"]) if part), given


def test_runs_that_two_tables_need_are_counted_once() -> None:
    one = load_spec(SMALL)
    other = load_spec({**SMALL, "id": "other", "rows": {"Full data": ["selector=full"]}, "columns": {"": []}, "once": []})
    both = combine([plan(one, by_name, Records()), plan(other, by_name, Records())])
    assert (both.cells, both.unique_runs, both.shared_runs) == (12, 10, 2)
    assert both.plans["small"].cells[0].shared_with == ("other",)
    assert both.plans["small"].cells[2].shared_with == ()


def test_equal_cells_are_one_run_and_one_warning() -> None:
    node = {
        **SMALL,
        "rows": {"A": ["selector=random"], "B": ["selector=random"]},
        "once": [],
        "columns": {"r": ["selector.ratio=1"]},
    }
    made = plan(load_spec(node), by_name, Records())
    assert len(made.to_run) == 2
    assert "warning: cells 0, 2 are the same run" in describe(made)


# Case 18


def test_case_18_index_to_config() -> None:
    grid, expected = yaml.safe_load((CASE / "grid.yaml").read_text()), json.loads((CASE / "expected.json").read_text())
    assert grid_size(grid) == expected["grid_size"]
    for index, config in expected["index_to_config"].items():
        made = grid_config(grid, int(index))
        assert made == config and list(made) == list(config)
    assert len({json.dumps(grid_config(grid, i)) for i in range(12)}) == 12


def test_case_18_arrays() -> None:
    expected = json.loads((CASE / "expected.json").read_text())
    assert [e["array"] for e in expected["arrays"]] == json.loads((CASE / "arrays.json").read_text())
    for entry in expected["arrays"]:
        assert check_array(entry["array"], expected["grid_size"]) == (entry["never_run"], entry["out_of_range"]), entry["array"]


@pytest.mark.parametrize("index", [12, 15, -1])
def test_case_18_an_index_out_of_range_names_the_range(index: int) -> None:
    with pytest.raises(IndexError, match=rf"index {index} is outside the valid range 0\.\.11"):
        check_index(index, 12)


def test_case_18_an_unset_index_is_refused() -> None:
    with pytest.raises(IndexError, match="SLURM_ARRAY_TASK_ID"):
        check_index(None, 12)


def test_case_18_equal_configs_are_found() -> None:
    assert equal_configs(["a", "b", "a"]) == {"a": [0, 2]}


def test_array_strings_read_back() -> None:
    assert array_string([5, 0, 2, 1, 7, 8]) == "0-2,5,7-8"
    assert array_string([]) == ""
    for indices in ([0], [0, 2, 4], [3, 4, 5, 11]):
        assert parse_array(array_string(indices)) == indices
    for wrong in ("", "a", "3-1", "0-4:0", "1-2-3"):
        with pytest.raises(ValueError, match="array"):
            parse_array(wrong)


# Statistics, reported values, start-up


def test_statistics_by_hand() -> None:
    assert mean_sd([1.0, 2.0, 3.0]) == (2.0, 1.0)
    assert mean_sd([4.0]) == (4.0, None)
    for value in (0.1, 9.99900009999e-05, 1 / 3, 56.5):  # equal values deviate by nothing, whatever their mean rounds to
        assert mean_sd([value] * 3) == (value, 0.0)
    assert t_interval([1.0, 2.0]) is None
    # t(0.975, 2) = 4.302653; 4.302653 / sqrt(3) = 2.484138
    assert t_interval([1.0, 2.0, 3.0]) == pytest.approx((2 - 2.484138, 2 + 2.484138), abs=1e-6)
    # 328 of 400: centre (.82 + .0048018) / 1.0096036 = .816956, half 1.959964 sqrt(.000369 + .0000060023) / 1.0096036 = .037594
    assert wilson_interval(328, 400) == pytest.approx((0.779362, 0.854550), abs=2e-6)


@pytest.mark.parametrize(
    ("interval", "said"),
    [
        ((-1.1221, 1.366), "cannot tell"),  # the numbers of case 20, margin of one point
        ((-0.33, 0.55), "no worse"),
        ((-4.65, -1.20), "worse"),
        ((-1.68, -1.05), "worse"),
        ((-0.27, 0.18), "no worse"),
        ((0.1, 0.5), "better"),
        ((0.0, 0.0), "cannot tell"),  # 4 of 16 problems in every seed: no spread is no certainty
        (None, "too few seeds"),
    ],
)
def test_verdicts(interval: tuple[float, float] | None, said: str) -> None:
    assert verdict(interval, 1.0) == said


def test_the_paper_says_only_what_is_known() -> None:
    table2 = reported("table2")
    assert table2 is not None
    assert table2.find("Full data", "", "average") == 57.6
    assert table2.find("CluSTER", "r=1.00", "average") is None  # the ratio behind 56.5 is not known
    assert [(v.row, v.value) for v in table2.apart] == [("CluSTER", 56.5)]
    assert reported(None) is None
    with pytest.raises(KeyError, match="table99"):
        reported("table99")


def test_a_table_needs_no_torch_and_starts_fast() -> None:
    code = (
        "import sys, time; t = time.perf_counter()\n"
        "import experiments.aggregate, experiments.render, experiments.plan\n"
        "print(time.perf_counter() - t, 'torch' in sys.modules, 'hydra' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    seconds, torch, hydra = done.stdout.split()
    assert (torch, hydra) == ("False", "False")
    assert float(seconds) < 10  # some 0.5 s on an idle machine
