"""The Accelerator of a rank: precision and place are the run's, whatever the shell has left for accelerate."""

import os

import pytest
import torch

from clusterft import launch
from clusterft.accelerated import make_accelerator
from clusterft.distributed import Dist, single_process

LEFT_BY_A_SHELL = {
    "ACCELERATE_MIXED_PRECISION": "fp16",
    "ACCELERATE_USE_FSDP": "true",
    "ACCELERATE_USE_DEEPSPEED": "true",
    "ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "4",
    "ACCELERATE_TORCH_DEVICE": "meta",
    "PMI_SIZE": "3",
    "RANK": "2",
    "WORLD_SIZE": "3",
    "LOCAL_RANK": "2",
}


@pytest.mark.parametrize(
    ("precision", "product"), [("float32", torch.float32), ("bf16_autocast", torch.bfloat16), ("bf16", torch.float32)]
)
def test_products_have_the_number_format_that_was_asked_for(precision, product, monkeypatch):
    for name, value in LEFT_BY_A_SHELL.items():
        monkeypatch.setenv(name, value)
    before = dict(os.environ)
    one = make_accelerator(precision, single_process())
    assert dict(os.environ) == before
    with one.autocast():
        assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype == product
    assert (one.device, one.num_processes, one.distributed_type.value) == (torch.device("cpu"), 1, "NO")


def test_backward_neither_averages_nor_scales(monkeypatch):
    monkeypatch.setenv("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "4")
    one = make_accelerator("float32", single_process())
    x = torch.tensor([1 / 3, 7.0], requires_grad=True)
    one.backward((x * x).sum())
    assert torch.equal(x.grad, 2 * x.detach())


def place_of(*, dist: Dist, out: str) -> None:
    made = make_accelerator("bf16_autocast", dist)
    with open(f"{out}/{dist.rank}", "w") as f:
        f.write(f"{made.process_index} {made.num_processes} {made.local_process_index} {torch.get_num_threads()}")


def test_every_rank_finds_its_place_and_keeps_its_threads(tmp_path, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "7")
    launch.run("test_accelerated:place_of", {"out": str(tmp_path)}, processes=2, threads=1)
    assert {p.name: p.read_text() for p in tmp_path.iterdir()} == {"0": "0 2 0 1", "1": "1 2 1 1"}


def test_a_run_that_accelerate_sees_otherwise_is_stopped():
    with pytest.raises(RuntimeError, match=r"accelerate sees .*\(1, 0, 'cpu'\), the run has \(1, 0, 'meta'\)"):
        make_accelerator("float32", Dist(rank=0, world=1, device=torch.device("meta")))
