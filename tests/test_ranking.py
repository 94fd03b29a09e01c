"""Ranking: order, ties, and what is never ranked."""

import numpy as np
import pytest

from clusterft.ranking import ranked_selection
from clusterft.records import Example, Pool


def pool_of(*ids: str) -> Pool:
    return Pool("toy", tuple(Example(i, "p", "r") for i in ids))


def test_nan_is_rejected_not_ranked_first():
    """Scores [0.1, NaN, 0.3, -0.2], two rows: ids 2 and 0, and row 1 has a reason."""
    chosen = ranked_selection("toy", pool_of("0", "1", "2", "3"), np.array([0.1, np.nan, 0.3, -0.2]), 2)
    assert chosen.ids == ("2", "0")
    assert chosen.rejected == {"1": "nonfinite"}
    assert set(chosen.scores) == {"0", "2", "3"}


def test_ties_go_to_the_smaller_id_in_any_pool_order():
    assert ranked_selection("toy", pool_of("b", "c", "a"), np.array([1.0, 1.0, 1.0]), 2).ids == ("a", "b")


def test_a_given_reason_wins_over_nonfinite():
    chosen = ranked_selection("toy", pool_of("a", "b"), np.array([np.inf, 1.0]), 1, reasons={"a": "empty"})
    assert chosen.rejected == {"a": "empty"}


def test_too_few_ranked_rows_is_an_error_with_both_numbers():
    with pytest.raises(ValueError, match=r"budget of 2 rows, but only 1 can be chosen"):
        ranked_selection("toy", pool_of("a", "b"), np.array([np.nan, 1.0]), 2)


def test_scores_of_another_length_are_refused():
    with pytest.raises(ValueError, match="3"):
        ranked_selection("toy", pool_of("a", "b"), np.zeros(3), 1)
