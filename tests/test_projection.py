"""The sign projection: exact sums, hence the same bits for any chunk, batch, thread count and backend."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
import torch

from clusterft.projection import SignProjection, unit_rows


def gradients(b: int, p: int, seed: int = 0) -> torch.Tensor:
    """Long-tailed rows, as gradients are."""
    rng = np.random.default_rng(seed)
    return torch.from_numpy(rng.standard_t(3, size=(b, p)).astype(np.float32) * 1e-4)


def slow_sign(seed: int, row: int, column: int) -> int:
    """The definition, in Python integers."""
    import hashlib

    def mix(x):
        x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) % 2**64
        x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) % 2**64
        return x ^ (x >> 31)

    key = int.from_bytes(hashlib.sha256(f"sign-projection:{seed}".encode()).digest()[:8], "little")
    base = mix((key + row * 0x9E3779B97F4A7C15) % 2**64)
    word = mix((base + (column // 64) * 0xD1B54A32D192ED03) % 2**64)
    return -1 if (word >> (column % 64)) & 1 else 1


@pytest.mark.parametrize("backend", ["numba", "torch"])
def test_signs_are_the_definition(backend):
    signs = SignProjection(10**7, 130, seed=3, backend=backend).signs(9_999_990, 9_999_993)
    expected = [[slow_sign(3, row, column) for column in range(130)] for row in range(9_999_990, 9_999_993)]
    assert signs.tolist() == expected


def test_signs_are_balanced_and_columns_uncorrelated():
    signs = SignProjection(4096, 256, seed=0).signs(0, 4096).numpy()
    gram = signs.T @ signs / 4096 - np.eye(256)
    assert abs(signs.mean()) < 5 / (4096 * 256) ** 0.5
    assert np.abs(gram).max() < 6 / 4096**0.5
    assert np.abs(signs @ signs.T / 256 - np.eye(4096)).max() < 7 / 256**0.5


def test_equals_the_slow_product_in_float64():
    rows = gradients(3, 1000)
    projection = SignProjection(1000, 64, seed=0)
    slow = rows.double() @ projection.signs(0, 1000).double() / 8.0
    assert torch.allclose(projection.project(rows).double(), slow, rtol=0, atol=2e-7 * float(slow.abs().max()) * 10)


@pytest.mark.parametrize("products", ["float32", "int8"])
@pytest.mark.parametrize("backend", ["numba", "torch"])
@pytest.mark.parametrize("block", [7, 4096])
def test_bit_equal_for_any_block(backend, block, products):
    rows = gradients(2, 5000)
    whole = SignProjection(5000, 96, seed=1).project(rows)
    ours = SignProjection(5000, 96, seed=1, backend=backend, block_features=block, products=products)
    assert torch.equal(ours.project(rows), whole)


def test_bit_equal_for_blocks_of_one():
    rows = gradients(2, 300)
    whole = SignProjection(300, 96, seed=1).project(rows)
    for products in ("float32", "int8"):
        assert torch.equal(SignProjection(300, 96, seed=1, block_features=1, products=products).project(rows), whole)


def test_the_largest_entries_stay_exact():
    """Rows of one size: every entry at the end of the grid, in a whole block of 8,192."""
    rows = torch.ones(3, 8192) * torch.tensor([[1.0], [-1.0], [1.999999]])
    for products in ("float32", "int8"):
        projection = SignProjection(8192, 64, seed=0, block_features=8192, products=products)
        sums = projection.signs(0, 8192).double().sum(0)
        expected = torch.stack([sums, -sums, sums * round(1.999999 * 2**21) / 2**21]) / 8
        assert torch.equal(projection.project(rows), expected.float())


def test_bit_equal_alone_or_in_a_batch():
    rows = gradients(33, 3000)
    projection = SignProjection(3000, 64, seed=1)
    together = projection.project(rows)
    assert all(torch.equal(projection.project(rows[i : i + 1])[0], together[i]) for i in range(0, 33, 8))


def test_bit_equal_for_any_thread_count():
    script = (
        "import sys,torch; torch.set_num_threads(int(sys.argv[1]));"
        "from test_projection import gradients; from clusterft.projection import SignProjection;"
        "print(SignProjection(20000, 128, seed=2).project(gradients(5, 20000)).numpy().tobytes().hex()[:4000])"
    )
    from pathlib import Path

    here = str(Path(__file__).parent)
    out = [
        subprocess.run([sys.executable, "-c", script, str(t)], cwd=here, capture_output=True, text=True, check=True).stdout
        for t in (1, 8)
    ]
    assert out[0] == out[1]
    ours = SignProjection(20000, 128, seed=2).project(gradients(5, 20000)).numpy().tobytes().hex()[:4000]
    assert out[0].strip() == ours


def test_torch_keeps_its_number_of_threads():
    """numba's own threads would set OpenMP's number for the whole process, and every small operation of torch would wait for
    them."""
    before = torch.get_num_threads()
    for threads in (1, 2):
        torch.set_num_threads(threads)
        SignProjection(3000, 64, seed=1).project(gradients(2, 3000))
        assert torch.get_num_threads() == threads
    torch.set_num_threads(before)


def test_a_lower_matmul_precision_set_elsewhere_changes_nothing():
    rows = gradients(4, 3000)
    projection = SignProjection(3000, 64, seed=1)
    whole = projection.project(rows)
    torch.set_float32_matmul_precision("medium")
    try:
        assert torch.equal(projection.project(rows), whole)
        assert torch.get_float32_matmul_precision() == "medium"
    finally:
        torch.set_float32_matmul_precision("highest")


def test_keeps_inner_products():
    """Cosine error about 1/sqrt(d): true cosine 0.5, d = 2,048, twenty pairs, mean within 3 standard errors."""
    errors = []
    for seed in range(20):
        a, b = gradients(2, 2000, seed).unbind()
        b = b / b.norm()
        a = a / a.norm()
        mixed = 0.5 * a + (b - (a @ b) * a) * (0.75**0.5 / (b - (a @ b) * a).norm())
        pair = unit_rows(SignProjection(2000, 2048, seed=seed).project(torch.stack([a, mixed])))
        errors.append(float(pair[0] @ pair[1]) - 0.5)
    assert abs(np.mean(errors)) < 3 / (20 * 2048) ** 0.5
    assert np.std(errors) < 2 / 2048**0.5


def test_scaled_so_that_norms_stay():
    rows = gradients(8, 2000)
    ratio = SignProjection(2000, 4096, seed=0).project(rows).norm(dim=1) / rows.norm(dim=1)
    assert (ratio - 1).abs().max() < 5 / (2 * 4096) ** 0.5


def test_range_of_float32_zero_and_nonfinite_rows():
    base = gradients(1, 500)
    rows = torch.cat([base, base * 2.0**90, base * 2.0**-90, torch.zeros(1, 500), base])
    rows[4, 3] = torch.nan
    out = SignProjection(500, 32, seed=0).project(rows)
    assert torch.equal(out[1], out[0] * 2.0**90) and torch.equal(out[2], out[0] * 2.0**-90)
    assert torch.equal(out[3], torch.zeros(32)) and out[4].isnan().all()


def test_unit_rows_survive_what_overflows_float16():
    unit = unit_rows(torch.full((1, 8192), 60000.0))
    assert torch.isfinite(unit).all() and abs(float(unit.norm()) - 1) < 1e-6


def test_fingerprint_names_the_matrix_not_the_backend():
    one = SignProjection(100, 32, seed=0)
    assert one.fingerprint == SignProjection(100, 32, seed=0, backend="torch", block_features=7).fingerprint
    others = {
        SignProjection(101, 32, 0).fingerprint,
        SignProjection(100, 33, 0).fingerprint,
        SignProjection(100, 32, 1).fingerprint,
    }
    assert len(others | {one.fingerprint}) == 4


def test_refusals():
    with pytest.raises(ValueError, match="cuda"):
        SignProjection(10, 4, 0, backend="cuda")
    with pytest.raises(ValueError, match="8192"):
        SignProjection(10, 4, 0, block_features=10_000)
    with pytest.raises(ValueError, match="int8"):
        SignProjection(10, 4, 0, products="bf16")
    with pytest.raises(ValueError, match="11"):
        SignProjection(10, 4, 0).project(torch.zeros(1, 11))


MEMORY_SCRIPT = r"""
import re, sys, torch
from clusterft.projection import SignProjection
torch.set_num_threads(1)
out = SignProjection(10**7, int(sys.argv[1]), seed=0).project(torch.full((1, 10**7), 1e-3))
assert out.shape == (1, int(sys.argv[1])) and bool(torch.isfinite(out).all())
print(int(re.search(r"VmHWM:\s+(\d+)", open("/proc/self/status").read())[1]) / 1024**2)
"""


@pytest.mark.parametrize("d", [128, pytest.param(8192, marks=pytest.mark.slow)])
def test_ten_million_features_in_under_a_gigabyte(d):
    out = subprocess.run([sys.executable, "-c", MEMORY_SCRIPT, str(d)], capture_output=True, text=True, check=True)
    assert float(out.stdout) < 1.0
