"""Artifact values from small gradients, by hand, and through the schema."""

from __future__ import annotations

import numpy as np
import pytest

from clusterft.records import Encoded, Example, Pool, Rejection
from clusterft.seeding import generator
from experiments.artifacts import check_values
from experiments.measures import (
    category_values,
    centroid_values,
    diversity_values,
    length_summary,
    pool_values,
    similarity_values,
    variance_values,
    worker_values,
)


def test_diversity_by_hand() -> None:
    """(3, 0) and (0, 4): 9 + 16 over |(3, 4)|^2 = 25."""
    values = diversity_values(np.array([[3.0, 0.0], [0.0, 4.0]]), "g")
    check_values("gradient_diversity", values)
    assert values["diversity"] == pytest.approx(1.0) and values["n"] == 2


def test_centroids_by_hand() -> None:
    """Cluster 0: mean of (1, 0) and (0, 1) against the kept (1, 0): cos 45 degrees. Cluster 1 keeps everything."""
    gradients, clusters = np.array([[1.0, 0.0], [0.0, 1.0], [2.0, 1.0]]), np.array([0, 0, 1])
    values = centroid_values(gradients, clusters, np.array([0, 2]), "g")
    check_values("centroid_cosine", values)
    assert [(c["rows"], c["kept"]) for c in values["clusters"]] == [(2, 1), (1, 1)]
    assert [c["cosine"] for c in values["clusters"]] == pytest.approx([2**-0.5, 1.0])


def test_workers_by_hand() -> None:
    """Step 1: workers hold (1, 0) and (0, 1): cosine 0. Step 2: means (1/2, 1/2) and (1, 0): cosine of 45 degrees."""
    gradients = np.array([[1.0, 0.0], [0.0, 1.0], [1.0, 0.0]])
    values = worker_values(gradients, [[[0], [1]], [[0, 1], [2]]], "g")
    check_values("worker_similarity", values)
    assert values["steps"] == pytest.approx([0.0, 2**-0.5]) and values["workers"] == 2
    assert worker_values(gradients, [[[0], [1]], [[2], []]], "g")["steps"] == pytest.approx([0.0])  # a short last step
    with pytest.raises(ValueError, match=r"steps have \[1, 2\] workers"):
        worker_values(gradients, [[[0]], [[0], [1]]], "g")
    with pytest.raises(ValueError, match="no workers"):
        worker_values(gradients, [], "g")


def test_similarity_fits_the_schema_and_finds_clusters_that_are_there() -> None:
    rng = generator(0, "test")
    clusters = np.repeat([0, 1], [12, 6])
    gradients = rng.normal(size=(18, 5)) + 3 * np.eye(5)[clusters]
    values = similarity_values(gradients, clusters, "g", rng, permutations=400)
    check_values("cluster_similarity", values)
    assert values["intra"] > values["inter"] and values["p_value"] == pytest.approx(1 / 401)
    assert sum(values["null_counts"]) == 400 and len(values["null_edges"]) == len(values["null_counts"]) + 1


def test_variance_fits_the_schema() -> None:
    rng = generator(1, "test")
    values = variance_values(rng.normal(size=(40, 2)), np.repeat([0, 1], 20), "g", rng)
    check_values("variance", values)
    assert values["batch_sizes"] == [4, 8, 16, 32]


def test_categories_must_be_aligned() -> None:
    check_values("categories", category_values(["a"], np.array([1], dtype=np.int32), ["x"], "a person"))
    with pytest.raises(ValueError, match="2 ids, 1 clusters, 1 categories"):
        category_values(["a", "b"], [1], ["x"], "a person")


def test_pool_statistics_by_hand() -> None:
    examples = tuple(Example(f"{i:016d}", "p", "r", meta={"group": g}) for i, g in enumerate("aab"))
    pool = Pool("small", examples, (Rejection("f", 1, "empty"), Rejection("f", 2, "empty"), Rejection("f", 3, "long")))
    encoded = [
        Encoded(e.id, np.zeros(n, np.int32), np.r_[np.full(2, -100), np.zeros(n - 2)].astype(np.int32), n == 8)
        for e, n in zip(examples, (4, 6, 8), strict=True)
    ]
    values = pool_values(pool, encoded, "group", [1, 2])
    check_values("pool_statistics", values)
    assert values["rejected"] == {"empty": 2, "long": 1} and (values["groups"], values["truncated"]) == (2, 1)
    assert values["tokens"] == {"mean": 6.0, "median": 6.0, "p95": pytest.approx(7.8), "max": 8.0}
    assert values["target_tokens"]["mean"] == 4.0
    assert length_summary([5])["p95"] == 5.0
