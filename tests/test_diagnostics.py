"""Diagnostics by hand on three vectors, then against slow twins."""

from __future__ import annotations

import itertools
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from clusterft.diagnostics import (
    centroid_preservation,
    cosine_fidelity,
    cosines,
    gradient_diversity,
    inter_worker_similarity,
    intra_inter_similarity,
    permutation_test,
    worker_gradients,
)
from clusterft.records import Encoded
from clusterft.true_gradients import FoldedSketch, per_sample_gradients

THREE = np.array([[3.0, 4.0], [4.0, 3.0], [0.0, 2.0]])  # cosines: 24/25, 4/5, 3/5
RNG = np.random.default_rng(11)


def cosine(a, b) -> float:
    return float(a @ b / np.linalg.norm(a) / np.linalg.norm(b))


# -- by hand -------------------------------------------------------------------------------------------------------------------


def test_diversity_by_hand():
    assert gradient_diversity(THREE) == pytest.approx((25 + 25 + 4) / (7**2 + 9**2))
    assert gradient_diversity(np.ones((4, 3))) == pytest.approx(1 / 4)
    assert gradient_diversity(np.eye(3)) == pytest.approx(1)
    assert gradient_diversity(np.array([[1.0, 0], [-1, 0]])) == math.inf


def test_centroid_preservation_by_hand():
    rows = np.vstack([THREE, [[1.0, 0.0]]])
    found = centroid_preservation(rows, np.array([0, 1, 3]), np.array([0, 0, 0, 7]))
    # cluster 0: mean (7/3, 3) before, (3.5, 3.5) after
    assert found == pytest.approx({0: (7 / 3 + 3) / math.sqrt(2) / math.hypot(7 / 3, 3), 7: 1.0})
    assert centroid_preservation(rows, np.ones(4, bool), np.zeros(4, int)) == pytest.approx({0: 1.0})
    with pytest.raises(ValueError, match=r"clusters \[7\] keep no row"):
        centroid_preservation(rows, np.array([0]), np.array([0, 0, 0, 7]))


def test_worker_similarity_by_hand():
    assert inter_worker_similarity(THREE) == pytest.approx((24 / 25 + 4 / 5 + 3 / 5) / 3)
    means = worker_gradients(THREE, np.array([1, 0, 1]))
    np.testing.assert_allclose(means, [[4, 3], [1.5, 3]])
    with pytest.raises(ValueError, match="at least two"):
        inter_worker_similarity(THREE[:1])


def test_intra_and_inter_by_hand():
    found = intra_inter_similarity(THREE, np.array([5, 5, 2]))
    assert found.intra == pytest.approx(24 / 25)
    assert found.inter == pytest.approx((4 / 5 + 3 / 5) / 2)
    assert found.gap == pytest.approx(0.26)


def test_permutation_test_by_hand():
    """Three labellings of sizes 2 and 1: the observed one has the largest gap, so p tends to 1/3."""
    found = permutation_test(THREE, np.array([0, 0, 1]), np.random.default_rng(0), permutations=6000)
    assert found.observed.gap == pytest.approx(0.26)
    hand = sorted([24 / 25 - 0.7, 4 / 5 - (24 / 25 + 3 / 5) / 2, 3 / 5 - (24 / 25 + 4 / 5) / 2])
    np.testing.assert_allclose(sorted(set(found.gaps.round(9))), hand, atol=1e-9)
    assert found.p_value == (1 + (found.gaps > 0.25).sum()) / 6001
    assert found.p_value == pytest.approx(1 / 3, abs=0.03)


def test_what_is_not_defined_is_refused():
    with pytest.raises(ValueError, match="diversity is not defined"):
        gradient_diversity(np.zeros((2, 2)))
    with pytest.raises(ValueError, match="1 of 3 gradients are zero or not finite"):
        intra_inter_similarity(np.array([[0.0, 0.0], [1.0, 0.0], [0.0, 1.0]]), np.array([0, 0, 1]))
    with pytest.raises(ValueError, match="0 across"):
        intra_inter_similarity(THREE, np.zeros(3, int))
    with pytest.raises(ValueError, match="0 pairs inside"):
        intra_inter_similarity(THREE, np.arange(3))
    with pytest.raises(ValueError, match="labels of shape"):
        intra_inter_similarity(THREE, np.zeros(2, int))


# -- slow twins ----------------------------------------------------------------------------------------------------------------


def slow_intra_inter(rows, labels) -> tuple[float, float]:
    inside, across = [], []
    for i, j in itertools.combinations(range(len(rows)), 2):
        (inside if labels[i] == labels[j] else across).append(cosine(rows[i], rows[j]))
    return float(np.mean(inside)), float(np.mean(across))


@pytest.mark.parametrize("d", [3, 60])  # fewer and more dimensions than rows
def test_similarities_agree_with_pairs_one_by_one(d):
    rows, labels = RNG.normal(size=(30, d)) + 0.3, RNG.integers(0, 4, 30)
    found = intra_inter_similarity(rows, labels)
    assert (found.intra, found.inter) == pytest.approx(slow_intra_inter(rows, labels))
    pairs = [cosine(a, b) for a, b in itertools.combinations(rows, 2)]
    np.testing.assert_allclose(cosines(rows), pairs, atol=1e-12)
    assert inter_worker_similarity(rows) == pytest.approx(np.mean(pairs))


@pytest.mark.parametrize("d", [3, 60])
def test_permutation_test_agrees_with_a_loop(d):
    rows, labels = RNG.normal(size=(20, d)), np.repeat([0, 1, 2], [10, 6, 4])
    rows[:10] += 0.4
    found = permutation_test(rows, labels, np.random.default_rng(3), permutations=50)
    same_draws = np.random.default_rng(3).permuted(np.tile(labels, (50, 1)), axis=1)
    gaps = [np.subtract(*slow_intra_inter(rows, one)) for one in same_draws]
    np.testing.assert_allclose(found.gaps, gaps, atol=1e-10)
    observed = np.subtract(*slow_intra_inter(rows, labels))
    assert found.p_value == (1 + sum(g >= observed - 1e-12 for g in gaps)) / 51


def test_permutations_keep_sizes_and_chunks_do_not_matter(monkeypatch):
    rows, labels = RNG.normal(size=(12, 5)), np.repeat([0, 1], [9, 3])
    whole = permutation_test(rows, labels, np.random.default_rng(1), permutations=40)
    monkeypatch.setattr("clusterft.diagnostics.PERMUTATION_BYTES", 12 * 2 * 8 * 7)
    parts = permutation_test(rows, labels, np.random.default_rng(1), permutations=40)
    np.testing.assert_allclose(parts.gaps, whole.gaps, atol=1e-12)


def test_random_labels_give_p_values_that_are_uniform():
    rng = np.random.default_rng(8)
    values = [permutation_test(rng.normal(size=(16, 4)), np.repeat([0, 1], 8), rng, permutations=99).p_value for _ in range(200)]
    assert np.mean(np.array(values) <= 0.1) == pytest.approx(0.1, abs=0.06)
    assert min(values) >= 1 / 100


def test_blocks_do_not_matter(monkeypatch):
    rows, labels = RNG.normal(size=(25, 6)), RNG.integers(0, 3, 25)
    kept = np.arange(0, 25, 2)
    before = gradient_diversity(rows), centroid_preservation(rows, kept, labels)
    monkeypatch.setattr("clusterft.diagnostics.BLOCK_ROWS", 4)
    assert gradient_diversity(rows) == pytest.approx(before[0])
    assert centroid_preservation(rows, kept, labels) == pytest.approx(before[1])
    slow = {c: cosine(rows[labels == c].mean(0), rows[[i for i in kept if labels[i] == c]].mean(0)) for c in range(3)}
    assert before[1] == pytest.approx(slow)


def test_fidelity_of_the_truth_is_one_and_of_noise_near_zero():
    truth = RNG.normal(size=(24, 40))
    rotation = np.linalg.qr(RNG.normal(size=(40, 40)))[0]
    same = cosine_fidelity(truth @ rotation * 3, truth, np.random.default_rng(0), resamples=50)
    assert same.value == pytest.approx(1) and same.low == pytest.approx(1)
    noise = cosine_fidelity(RNG.normal(size=(24, 40)), truth, np.random.default_rng(0), resamples=200)
    assert noise.low < 0 < noise.high and abs(noise.value) < 0.3


# -- true gradients ------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def model():
    return AutoModelForCausalLM.from_pretrained(Path(__file__).parent / "golden" / "tiny_llama", dtype=torch.float32)


@pytest.fixture(scope="module")
def rows() -> list[Encoded]:
    rng = np.random.default_rng(2)
    out = []
    for i, (prompt, response) in enumerate([(3, 5), (1, 9), (6, 2), (4, 4), (0, 6)]):
        ids = rng.integers(0, 97, prompt + response).astype(np.int32)
        labels = ids.copy()
        labels[:prompt] = -100
        out.append(Encoded(str(i), ids, labels))
    return out


def backward_twin(model, rows) -> np.ndarray:
    out = []
    for row in rows:
        model.zero_grad()
        ids = torch.tensor(row.input_ids[None].astype(np.int64))
        model(input_ids=ids, labels=torch.tensor(row.labels[None].astype(np.int64))).loss.backward()
        out.append(torch.cat([p.grad.flatten() for p in model.parameters()]).numpy())
    model.zero_grad()
    return np.stack(out)


@pytest.mark.parametrize("chunk_size", [1, 2, 5])
def test_per_sample_gradients_are_those_of_backward(model, rows, chunk_size):
    found = per_sample_gradients(model, rows, chunk_size=chunk_size)
    np.testing.assert_allclose(found, backward_twin(model, rows), rtol=1e-5, atol=1e-5)


def test_parameters_can_be_chosen_by_name(model, rows):
    found = per_sample_gradients(model, rows[:2], parameters=lambda name: "q_proj" in name)
    start, parts = 0, []
    whole = backward_twin(model, rows[:2])
    for name, p in model.named_parameters():
        if "q_proj" in name:
            parts.append(whole[:, start : start + p.numel()])
        start += p.numel()
    np.testing.assert_allclose(found, np.hstack(parts), rtol=1e-5, atol=1e-5)
    with pytest.raises(ValueError, match="no parameter"):
        per_sample_gradients(model, rows, parameters=lambda name: False)


def test_a_row_without_response_has_a_zero_gradient(model, rows):
    silent = Encoded("x", rows[0].input_ids, np.full(len(rows[0]), -100, np.int32))
    assert not per_sample_gradients(model, [silent]).any()


def test_sketches_keep_inner_products_and_stream(model, rows):
    full = per_sample_gradients(model, rows)
    sketched = per_sample_gradients(model, rows, projection=FoldedSketch(4096, 1), chunk_size=2)
    assert sketched.shape == (5, 4096)
    again = FoldedSketch(4096, 1).project(torch.from_numpy(full)).numpy()
    np.testing.assert_allclose(sketched, again, rtol=1e-5, atol=1e-5)
    unit = full / np.linalg.norm(full, axis=1, keepdims=True)
    small = sketched / np.linalg.norm(full, axis=1, keepdims=True)
    assert np.abs(small @ small.T - unit @ unit.T).max() < 6 / math.sqrt(4096)


def test_one_row_by_autograd_is_one_of_several_by_vmap(model, rows):
    """Chosen parameters or all, with and without a known head; what wanted gradients before does so afterwards."""
    chosen = lambda name: "mlp" in name  # noqa: E731
    model.get_parameter("model.norm.weight").requires_grad_(False)
    for parameters in (None, chosen):
        one = per_sample_gradients(model, rows, parameters=parameters)
        several = per_sample_gradients(model, rows, parameters=parameters, chunk_size=2)
        np.testing.assert_allclose(one, several, rtol=1e-5, atol=1e-5)
    assert [n for n, p in model.named_parameters() if not p.requires_grad] == ["model.norm.weight"]
    model.get_parameter("model.norm.weight").requires_grad_(True)


@pytest.mark.parametrize("p, dim", [(1, 4), (4, 4), (21, 8), (1000, 7), (1000, 1000), (1000, 1024)])
def test_a_sketch_in_parts_has_the_bits_of_the_whole_by_torch(p, dim):
    sketch, row = FoldedSketch(dim, 5), torch.from_numpy(RNG.normal(size=(1, p)).astype(np.float32))
    whole = sketch._in_blocks(row)
    assert torch.equal(sketch.project(row), whole)
    for cut in sorted({0, 1, p // 3, dim % (p + 1), p - 1, p}):
        assert torch.equal(sketch.project_parts([row[0, :cut], row[0, cut:]]), whole[0])


def test_sketch_against_its_matrix():
    """The sketch is linear with one entry of size 1 a column, and unbiased over seeds."""
    matrix = FoldedSketch(8, 3).project(torch.eye(21)).numpy()
    assert (np.abs(matrix).sum(1) == 1).all()
    assert (np.abs(matrix[:8]).sum(0) == 1).all()  # entries of one block never meet
    a, b = RNG.normal(size=(2, 21)).astype(np.float32)
    products = []
    for seed in range(2000):
        sa, sb = FoldedSketch(8, seed).project(torch.from_numpy(np.stack([a, b])))
        products.append(float(sa @ sb))
    assert np.mean(products) == pytest.approx(float(a @ b), abs=4 * np.std(products) / math.sqrt(2000))


def test_the_interval_of_few_rows_is_a_number() -> None:
    rng = np.random.default_rng(0)
    found = cosine_fidelity(rng.normal(size=(4, 3)), rng.normal(size=(4, 5)), rng)
    assert -1 <= found.low <= found.value <= found.high <= 1
