"""The budget rule against case 11's table, and the refusals."""

import json
from pathlib import Path

import pytest

from clusterft.budget import require_rows, rows_for

CASE = Path(__file__).parent / "golden" / "cases" / "11-one-selection-for-all-ranks"
TABLE = json.loads((CASE / "expected.json").read_text())["budget_table"]


@pytest.mark.parametrize("row", TABLE, ids=lambda r: f"{r['budget']} of {r['n']}")
def test_case_11_table(row):
    assert rows_for(row["n"], row["budget"]) == row["rows"]


def test_a_float_means_its_shortest_text():
    assert rows_for(100, 0.29) == 29
    assert rows_for(75197, 0.1) == 7519
    assert rows_for(5, 5) == 5
    assert rows_for(5, 1.0) == 5


@pytest.mark.parametrize("budget", ["0", "0.0", "-1", "-0.5", "1.5", "81", "nan", "inf", "half", "", True])
def test_refused(budget):
    with pytest.raises(ValueError, match="budget"):
        rows_for(80, budget)


@pytest.mark.parametrize("budget", [0, 11, -3, 2.5, "4", None, True])
def test_a_selector_refuses_with_both_numbers(budget):
    with pytest.raises(ValueError, match="10") as error:
        require_rows("ifd", budget, 10)
    assert str(budget) in str(error.value)
