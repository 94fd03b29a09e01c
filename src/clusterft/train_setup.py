"""What training is given, checked before anything is built: settings, rows, weights, sampler.

In come configuration nodes and the Selection; out come row weights and the sampler, or one sentence that says what does not fit.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import nn

from clusterft.allocation import ClusterBatchSampler, ShuffledBatchSampler
from clusterft.arithmetic import check_arithmetic
from clusterft.distributed import Dist
from clusterft.engine_names import check_engine
from clusterft.loss import check_reduction
from clusterft.records import Encoded, Selection


def row_weights(selection: Selection, rule: str) -> np.ndarray:
    """(m,) loss weights, mean 1: the selection's own (w_c = K pi_c), none, or their square roots. Raises ValueError."""
    if rule not in ("selection", "none", "sqrt"):
        raise ValueError(f"sampler.weights={rule!r} is not one of selection, none, sqrt")
    if rule == "none" or selection.weights is None:
        return np.ones(len(selection.ids))
    if rule == "selection":
        return np.asarray(selection.weights, dtype=np.float64)
    roots = np.sqrt(selection.weights)
    return roots / roots.mean()


def make_sampler(
    selection: Selection, encoded: Sequence[Encoded], cfg: Any, sampler_cfg: Any, dist: Dist, seed: int
) -> ClusterBatchSampler | ShuffledBatchSampler:
    """The sampler that `sampler.kind` names; `auto` balances where the selection has clusters. Raises ValueError."""
    kind = sampler_cfg.kind
    if kind not in ("cluster_balanced", "shuffled", "auto"):
        raise ValueError(f"sampler.kind={kind!r} is not one of cluster_balanced, shuffled, auto")
    if kind == "cluster_balanced" and selection.clusters is None:
        raise ValueError(f"sampler.kind=cluster_balanced needs clusters, {selection.method} has none; use sampler.kind=auto")
    layout = {
        "global_batch": cfg.global_batch,
        "seed": seed,
        "rank": dist.rank,
        "world": dist.world,
        "micro_batch": cfg.per_device_batch,
        "workers": cfg.workers,
        "ids": selection.ids,
        "lengths": [len(row) for row in encoded],
    }
    if kind == "shuffled" or selection.clusters is None:
        return ShuffledBatchSampler(len(selection.ids), **layout)
    return ClusterBatchSampler(selection.clusters, **layout)


def peak_memory_gib(device: torch.device) -> float:
    """Largest memory that this process has held: on the GPU, else resident."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**30
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


def check_settings(
    model: nn.Module, encoded: Sequence[Encoded], selection: Selection, cfg: Any, sampler_cfg: Any, dist: Dist
) -> None:
    """Raises ValueError for the first setting that is unknown, not built, or does not fit the rows, the model or the ranks."""
    check_engine(cfg)
    check_arithmetic(cfg, dist.device)
    check_reduction(cfg.loss_reduction)
    if [row.id for row in encoded] != list(selection.ids):
        raise ValueError("the encoded rows are not those of the selection, in its order")
    too_long = [row.id for row in encoded if len(row) > cfg.max_length]
    if too_long:
        raise ValueError(f"{len(too_long)} rows have more than trainer.max_length={cfg.max_length} tokens, e.g. id {too_long[0]}")
    if not any(row.n_target for row in encoded):
        raise ValueError("no selected row has a token to learn from: every label is masked")
    wanted = torch.bfloat16 if cfg.precision == "bf16" else torch.float32
    wrong = {str(p.dtype) for p in model.parameters() if p.requires_grad and p.dtype != wanted}
    if wrong:
        raise ValueError(f"trainer.precision={cfg.precision} needs {wanted} weights, the model has {', '.join(sorted(wrong))}")
    if dist.world > cfg.workers:
        raise ValueError(f"runtime.processes={dist.world} for trainer.workers={cfg.workers}: at most one process a worker")


def check_same_weights(named: list[tuple[str, nn.Parameter]], dist: Dist) -> None:
    """All ranks must start from the same bits: compares a checksum instead of sending the weights."""
    if dist.world == 1:
        return
    integers = {2: torch.int16, 4: torch.int32, 8: torch.int64}
    total = sum(int(p.detach().reshape(-1).view(integers[p.element_size()]).sum(dtype=torch.int64)) for _, p in named)
    found = dist.gather_objects(total)
    if len(set(found)) > 1:
        raise ValueError(
            f"ranks start from different weights (checksums {found}): load the same model and revision on all of them"
        )
