"""Decimal ratios survive binary fractions."""

import pytest

from clusterft.exact import floor_product


@pytest.mark.parametrize(
    ("ratio", "count", "expected"),
    [
        ("0.29", 100, 29),
        (0.29, 100, 29),
        ("0.07", 1000, 70),
        ("0.25", 10, 2),
        ("0.05", 7, 0),
        ("1.0", 3, 3),
        (1, 3, 3),
        ("0.05", 52002, 2600),
    ],
)
def test_floor_of_the_decimal_product(ratio, count, expected):
    assert floor_product(ratio, count) == expected


def test_the_trap_is_real():
    assert int(0.29 * 100) == 28


@pytest.mark.parametrize("ratio", [0, 2, -0.5, "1.0001", "nan", "inf", "half", ""])
def test_ratios_outside_the_interval_are_refused_by_value(ratio):
    with pytest.raises(ValueError, match="ratio"):
        floor_product(ratio, 100)
