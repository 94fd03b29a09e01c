"""Every selector with made-up features: what the contract test runs over. A new selector adds one entry."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from baselines.full_data import FullSelector
from baselines.ifd import IfdSelector
from baselines.less import LessSelector
from baselines.random_choice import RandomSelector
from baselines.s2l import S2LSelector
from clusterft.cluster import ClusterSelector
from clusterft.interfaces import Feature, Selector
from clusterft.records import Example, Pool
from clusterft.seeding import generator

Features = Callable[[Sequence[str]], Mapping[str, Feature]]


@dataclass(frozen=True)
class Case:
    """make() a selector; features(ids) its features, each row a function of its id; ranking: smaller budgets nest in larger ones;
    only_all: the one budget it takes is the whole pool."""

    make: Callable[[], Selector]
    features: Features
    ranking: bool = True
    only_all: bool = False


def make_pool(n: int = 40) -> Pool:
    return Pool("toy", tuple(Example(f"{i:04x}", f"instruction {i}", f"answer {i}") for i in range(n)))


def permuted(pool: Pool, seed: int = 1) -> Pool:
    order = generator(seed, "permute").permutation(len(pool))
    return Pool(pool.name, tuple(pool.examples[i] for i in order))


def rows_by_id(ids: Sequence[str], width: int, purpose: str) -> np.ndarray:
    """(n, width) float32 normal rows; a row depends on its id and nothing else."""
    return np.stack([generator(0, purpose, one).normal(size=width) for one in ids]).astype(np.float32)


def no_features(ids: Sequence[str]) -> Mapping[str, Feature]:
    return {}


def ifd_features(ids: Sequence[str]) -> Mapping[str, Feature]:
    """Conditional losses around the direct ones, so that some rows lie above 1."""
    draws = rows_by_id(ids, 2, "ifd")
    direct = 1 + np.abs(draws[:, 0])
    rows = np.stack([direct * (0.9 + 0.05 * draws[:, 1]), direct, np.full(len(ids), 9), np.zeros(len(ids))], axis=1)
    return {"ifd_losses": Feature(rows.astype(np.float32))}


def ifd_selector() -> IfdSelector:
    return IfdSelector(form="loss", precision="float32", score_eos=False, pre_experience=None, shortfall="take_unhelped")


def s2l_features(ids: Sequence[str]) -> Mapping[str, Feature]:
    return {"loss_trajectories": Feature(np.hstack([rows_by_id(ids, 4, "s2l"), np.ones((len(ids), 4), np.float32)]))}


def s2l_selector() -> S2LSelector:
    return S2LSelector(clusters=6, rule="paper", n_init=3, proxy={})


def cluster_selector() -> ClusterSelector:
    return ClusterSelector(
        n_clusters=4,
        capacity_factor=1.5,
        solver="exact",
        n_init=3,
        within="peripheral",
        allocation="equal",
        weights="balanced",
        proxy={},
    )


def cluster_features(ids: Sequence[str]) -> Mapping[str, Feature]:
    return {"gradient_proxy": Feature(rows_by_id(ids, 8, "cluster"))}


def less_features(ids: Sequence[str]) -> Mapping[str, Feature]:
    """Two checkpoints of four columns, three validation rows in two subtasks."""
    extra = {
        "validation": rows_by_id(["v1", "v2", "v3"], 8, "less-validation"),
        "subtask": np.array([0, 1, 0]),
        "subtask_names": np.array(["a", "b"]),
        "rates": np.array([2e-5, 1e-5]),
        "projection": np.array("made up"),
    }
    rows = np.hstack([rows_by_id(ids, 8, "less"), np.zeros((len(ids), 1), np.float32)])
    return {"lora_gradients": Feature(rows, extra)}


def less_selector() -> LessSelector:
    return LessSelector(gradients={})


CASES: dict[str, Case] = {
    "random": Case(RandomSelector, no_features),
    "cluster": Case(cluster_selector, cluster_features, ranking=False),
    "less": Case(less_selector, less_features),
    "s2l": Case(s2l_selector, s2l_features, ranking=False),
    "ifd": Case(ifd_selector, ifd_features),
    "full": Case(FullSelector, no_features, only_all=True),
}
