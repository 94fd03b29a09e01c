"""What every selector must do, whatever its method: one test over all of them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from selector_cases import CASES, make_pool, permuted

from clusterft.interfaces import Selector
from clusterft.seeding import generator

HERE = Path(__file__).parent
SMALLER = {name: case for name, case in CASES.items() if not case.only_all}


def choose(name, pool, budget, seed=0):
    case = CASES[name]
    return case.make().choose(pool, case.features(pool.ids), budget, generator(seed, "choose"))


def budgets(name, n):
    return [n] if CASES[name].only_all else [max(8, n // 4), n // 2, n]


@pytest.mark.parametrize("name", CASES)
def test_is_a_selector_and_names_its_features(name):
    selector = CASES[name].make()
    assert isinstance(selector, Selector)
    assert {spec.name for spec in selector.feature_specs()} == set(CASES[name].features(make_pool().ids))
    json.dumps([dict(spec.params) for spec in selector.feature_specs()])


@pytest.mark.parametrize("name", CASES)
def test_exactly_the_budget_of_unique_ids_from_the_pool(name):
    pool = make_pool()
    for budget in budgets(name, len(pool)):
        chosen = choose(name, pool, budget)
        chosen.check_against(pool)
        assert chosen.budget == budget == len(set(chosen.ids))


@pytest.mark.parametrize("name", CASES)
def test_the_whole_pool_returns_all(name):
    pool = make_pool()
    assert set(choose(name, pool, len(pool)).ids) == set(pool.ids)


@pytest.mark.parametrize("name", CASES)
def test_every_id_has_a_score_or_a_reason(name):
    pool = make_pool()
    chosen = choose(name, pool, budgets(name, len(pool))[0])
    assert set(chosen.scores) | set(chosen.rejected) == set(pool.ids)
    assert not set(chosen.scores) & set(chosen.rejected)
    assert not set(chosen.ids) & set(chosen.rejected)


@pytest.mark.parametrize("name", CASES)
def test_a_permuted_pool_gives_the_same_ids(name):
    pool = make_pool()
    for budget in budgets(name, len(pool)):
        assert set(choose(name, permuted(pool), budget).ids) == set(choose(name, pool, budget).ids)


@pytest.mark.parametrize("name", CASES)
def test_same_seed_same_ids_whatever_ran_before(name):
    pool = make_pool()
    budget = budgets(name, len(pool))[0]
    first = choose(name, pool, budget)
    np.random.seed(5)
    np.random.rand(100)
    for other in SMALLER:
        choose(other, pool, 20, seed=9)
    assert choose(name, pool, budget).ids == first.ids


@pytest.mark.parametrize("name", [n for n, c in SMALLER.items() if c.ranking])
def test_smaller_budgets_nest(name):
    pool = make_pool()
    subsets = [set(choose(name, pool, budget).ids) for budget in (1, 5, 20, 39, 40)]
    assert all(small < large for small, large in pairwise(subsets))


@pytest.mark.parametrize("budget", [0, 41, -1, 2.5, "8", True])
@pytest.mark.parametrize("name", CASES)
def test_a_wrong_budget_is_refused_with_both_numbers(name, budget):
    with pytest.raises((ValueError, TypeError)) as error:
        choose(name, make_pool(), budget)
    assert str(budget) in str(error.value) and "40" in str(error.value)


def test_random_depends_on_the_seed_and_full_does_not():
    pool = make_pool()
    assert choose("random", pool, 20, seed=0).ids != choose("random", pool, 20, seed=1).ids
    assert choose("full", pool, 40, seed=0).ids == choose("full", pool, 40, seed=1).ids


def test_full_has_weight_one_and_refuses_less():
    pool = make_pool()
    assert choose("full", pool, 40).weights is None
    with pytest.raises(ValueError, match=r"39.*40"):
        choose("full", pool, 39)


def test_random_takes_each_row_equally_often():
    """Over 2,000 seeds, 10 of 40 rows: every row within 5 standard deviations of 500."""
    pool = make_pool()
    counts = dict.fromkeys(pool.ids, 0)
    for seed in range(2000):
        for one in choose("random", pool, 10, seed=seed).ids:
            counts[one] += 1
    assert max(abs(c - 500) for c in counts.values()) < 5 * (2000 * 0.25 * 0.75) ** 0.5


SCRIPT = """
import json
from test_selectors_contract import CASES, budgets, choose, make_pool
print(json.dumps({name: choose(name, make_pool(), budgets(name, 40)[0]).ids for name in CASES}))
"""


def test_independent_of_the_hash_seed_and_of_the_process():
    started = [
        subprocess.Popen(
            [sys.executable, "-c", SCRIPT],
            cwd=HERE,
            env={**os.environ, "PYTHONHASHSEED": seed},
            stdout=subprocess.PIPE,
            text=True,
        )
        for seed in ("1", "random")
    ]
    results = [json.loads(process.communicate()[0]) for process in started]
    assert results[0] == results[1]
    assert results[0] == {name: list(choose(name, make_pool(), budgets(name, 40)[0]).ids) for name in CASES}
