"""The variance propositions: numbers by hand, then enumeration = closed form = simulation."""

from __future__ import annotations

import numpy as np
import pytest

from clusterft.seeding import generator
from experiments.theory import (
    SCHEMES,
    allocate,
    bias_sq,
    closed_form,
    enumerated,
    equal_allocation_excess,
    finite_excess,
    measure,
    population,
    simulated,
)

# Two clusters {0, 2} and {10, 12}: means 1 and 11, mean 6. Around the cluster means 1 each, between 25, all 26 (divisor n).
EQUAL, EQUAL_LABELS = np.array([0.0, 2.0, 10.0, 12.0]), np.array([0, 0, 1, 1])
UNEQUAL, UNEQUAL_LABELS = np.array([0.0, 2.0, 4.0, 6.0, 10.0, 12.0]), np.array([0, 0, 0, 0, 1, 1])


def test_a_population_by_hand() -> None:
    pop = population(EQUAL, EQUAL_LABELS)
    assert (pop.intra, pop.inter) == (1.0, 25.0)
    assert pop.s_sq.tolist() == [2.0, 2.0]
    assert pop.total_sq == pytest.approx(104 / 3)


def test_the_proposition_for_equal_clusters_by_hand() -> None:
    """b = 2 of n = 4. Random: (1 - 1/2) / 2 * 104/3 = 26/3. Stratified: 1/4 * 2 * (1 - 1/2) * 2 = 1/2.

    The six random batches have means 1, 5, 6, 6, 7, 11 and squared errors 25, 1, 0, 0, 1, 25: 52/6.
    The four stratified ones 5, 6, 6, 7: 1, 0, 0, 1: 1/2.
    """
    pop = population(EQUAL, EQUAL_LABELS)
    assert closed_form("random", pop, 2) == pytest.approx(26 / 3)
    assert enumerated("random", EQUAL, EQUAL_LABELS, 2)[1] == pytest.approx(52 / 6)
    for scheme in ("uniform", "weighted", "proportional", "neyman"):
        assert closed_form(scheme, pop, 2) == pytest.approx(0.5)
        assert enumerated(scheme, EQUAL, EQUAL_LABELS, 2)[1] == pytest.approx(0.5)


def test_random_minus_stratified_is_the_part_between_clusters() -> None:
    """With divisors n instead of n - 1, the difference is exactly (1 - f) / b * sigma_inter^2 in a large population."""
    rng = generator(0, "test")
    means = rng.normal(size=(4, 3)) * 2
    labels = np.repeat(np.arange(4), 5000)
    pop = population(means[labels] + rng.normal(size=(20000, 3)), labels)
    difference = closed_form("random", pop, 64) - closed_form("uniform", pop, 64)
    assert difference == pytest.approx((1 - 64 / 20000) / 64 * pop.inter, rel=1e-3)
    assert difference > 0


def test_no_spread_between_clusters_means_no_gain() -> None:
    """Clusters with one mean: stratifying saves nothing but the n/(n-1) corrections."""
    values, labels = np.array([-1.0, 1.0, -1.0, 1.0]), np.array([0, 0, 1, 1])
    pop = population(values, labels)
    assert pop.inter == 0.0
    assert closed_form("uniform", pop, 2) == pytest.approx(0.5)  # 2 * 1/4 * 1/2 * 2
    assert closed_form("random", pop, 2) == pytest.approx(1 / 3)  # 1/2 / 2 * 4/3


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("batch", [2, 4])
def test_enumeration_equals_the_closed_form(scheme: str, batch: int) -> None:
    values = np.stack([UNEQUAL, np.array([1.0, -1.0, 3.0, 0.0, 2.0, -4.0])], axis=1)
    pop = population(values, UNEQUAL_LABELS)
    mean, error = enumerated(scheme, values, UNEQUAL_LABELS, batch)
    assert error == pytest.approx(closed_form(scheme, pop, batch), rel=1e-12)
    gap = mean - values.mean(axis=0)
    assert float(gap @ gap) == pytest.approx(bias_sq(scheme, pop), abs=1e-12)
    assert (bias_sq(scheme, pop) > 0) == (scheme == "uniform")  # only unweighted draws from unequal clusters are biased


@pytest.mark.parametrize("scheme", SCHEMES)
def test_simulation_agrees_within_its_own_error(scheme: str) -> None:
    rng = generator(1, "test", scheme)
    labels = np.repeat([0, 1, 2], [120, 60, 20])
    values = rng.normal(size=(200, 4)) * np.array([1.0, 2.0, 0.5])[labels, None] + labels[:, None]
    error, stderr = simulated(scheme, values, labels, 12, 4000, rng)
    assert abs(error - closed_form(scheme, population(values, labels), 12)) < 4 * stderr


def test_neyman_is_the_best_of_all_allocations() -> None:
    rng = generator(2, "test")
    labels = np.repeat([0, 1, 2], [9, 5, 4])
    pop = population(rng.normal(size=18) * np.array([1.0, 3.0, 0.2])[labels], labels)
    best = min(
        float((pop.pi**2 * (1 - m / pop.sizes) * pop.s_sq / m).sum())
        for m in (np.array([a, b, 9 - a - b]) for a in range(1, 8) for b in range(1, 6))
        if 1 <= m[2] <= 4 and m[1] <= 5
    )
    assert closed_form("neyman", pop, 9) == pytest.approx(best, rel=1e-12)
    assert allocate("neyman", pop, 9).sum() == 9
    assert closed_form("neyman", pop, 9) <= closed_form("proportional", pop, 9)


def test_allocations_by_hand() -> None:
    pop = population(UNEQUAL, UNEQUAL_LABELS)
    assert allocate("weighted", pop, 4).tolist() == [2, 2]
    assert allocate("proportional", pop, 3).tolist() == [2, 1]
    # spreads n_c s_c: 4 * sqrt(20/3) = 10.3 and 2 * sqrt(2) = 2.8: the third and fourth row go to the first cluster
    assert allocate("neyman", pop, 4).tolist() == [3, 1]
    with pytest.raises(ValueError, match="does not divide among 2"):
        allocate("weighted", pop, 3)
    with pytest.raises(ValueError, match="3 rows asked of cluster 1, which has 2"):
        allocate("weighted", pop, 6)


def test_when_equal_allocation_raises_the_variance() -> None:
    """pi = (3/4, 1/4), sigma = 1: K sum pi^2 - 1 = 2 * 10/16 - 1 = 1/4, so it pays up to sigma_inter^2 = 1/4."""
    pi, sigma = np.array([0.75, 0.25]), np.array([1.0, 1.0])
    assert equal_allocation_excess(pi, sigma, inter=0.0) == pytest.approx(0.25)
    assert equal_allocation_excess(pi, sigma, inter=0.25) == pytest.approx(0.0)
    # wide small cluster: .75 * .5 * 0 + .25 * (-.5) * 4 = -.5: better than random even with nothing between
    assert equal_allocation_excess(pi, np.array([0.0, 4.0]), inter=0.0) == pytest.approx(-0.5)
    # equal clusters never pay
    assert equal_allocation_excess(np.full(4, 0.25), np.array([1.0, 2.0, 3.0, 4.0]), inter=0.1) == pytest.approx(-0.1)
    with pytest.raises(ValueError, match="sums to"):
        equal_allocation_excess(np.array([0.5, 0.4]), sigma, 0.0)


def test_the_excess_of_a_finite_population_tends_to_the_formula() -> None:
    rng = generator(3, "test")
    labels = np.repeat([0, 1], [30000, 10000])
    pop = population(rng.normal(size=40000) + 0.2 * labels, labels)
    assert 8 * finite_excess(pop, 8) == pytest.approx(equal_allocation_excess(pop.pi, pop.s_sq, pop.inter), abs=2e-3)
    assert finite_excess(pop, 8) > 0


def test_measure_fits_the_artifact_schema() -> None:
    from experiments.artifacts import check_values

    rng = generator(4, "test")
    labels = np.repeat([0, 1], [30, 20])
    values = measure(rng.normal(size=(50, 3)), labels, [4, 8, 7, 64], 50, rng)
    assert values["batch_sizes"] == [4, 8]
    check_values("variance", {**values, "gradient": "made up"})
    with pytest.raises(ValueError, match="none of the batch sizes"):
        measure(rng.normal(size=(50, 3)), labels, [7], 50, rng)


def test_an_empty_cluster_is_refused() -> None:
    with pytest.raises(ValueError, match="cluster 1 is empty"):
        population(EQUAL, np.array([0, 0, 2, 2]))
