"""The baselines' features on two gloo ranks are, bit for bit, those of one process; a kill is survived the same way."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from test_ifd import OPTIONS, SETTINGS
from test_less import GRADIENTS, less_context
from test_s2l import selector as s2l_selector

from baselines.ifd import IfdSelector
from baselines.less import LessSelector
from clusterft.distributed import Dist, join_group, leave_group, single_process
from clusterft.features import FeatureStore, compute


def all_specs():
    ifd = IfdSelector(**{**OPTIONS, "pre_experience": dict(vars(SETTINGS))})
    return [*ifd.feature_specs(), *s2l_selector().feature_specs(), *LessSelector(gradients=GRADIENTS).feature_specs()]


def work(dist: Dist, folder: Path) -> None:
    torch.set_num_threads(1)
    context = less_context(10, dist=dist, token_budget=500)
    features = compute(all_specs(), context, FeatureStore(folder / "store"))
    if dist.is_main:
        arrays = {f"{name}/rows": np.asarray(f.rows) for name, f in features.items()}
        arrays["validation"] = features["lora_gradients"].extra["validation"]
        np.savez(folder / "result.npz", **arrays)


def ranked_work(rank: int, world: int, folder: str) -> None:
    dist = join_group("cpu", f"file://{folder}/meet", rank=rank, world=world, local_rank=rank, local_world=world)
    work(dist, Path(folder))
    leave_group()


@pytest.mark.slow
def test_two_ranks_give_the_bits_of_one_process(tmp_path):
    one, two = tmp_path / "one", tmp_path / "two"
    one.mkdir()
    two.mkdir()
    threads = torch.get_num_threads()
    work(single_process(), one)
    torch.set_num_threads(threads)
    torch.multiprocessing.spawn(ranked_work, args=(2, str(two)), nprocs=2)
    with np.load(one / "result.npz") as expected, np.load(two / "result.npz") as found:
        assert set(found.files) == set(expected.files) and len(found.files) == 4
        for name in expected.files:
            np.testing.assert_array_equal(found[name], expected[name], err_msg=name)
