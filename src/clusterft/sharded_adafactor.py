"""Adafactor (Shazeer and Stern 2018) on matrices that are cut by rows over ranks, with the result of one process.

In come this rank's rows of every tensor; the three quantities that need the others are summed over ranks: column sums of the squared gradient,
the mean of the row moments, and the mean square of the update. Each is one collective for all tensors together. Settings are those
of `optim.build_optimizer`: threshold 1, decay -0.8, no relative step, no parameter scaling, no first moment.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from clusterft.distributed import Dist

EPS, DECAY, CLIP = 1e-30, -0.8, 1.0
REPLICATED = ("step", "exp_avg_sq_col")
"""State that is the same on all ranks; everything else belongs to this rank's rows."""


class ShardedAdafactor(torch.optim.Optimizer):
    """One step like transformers' Adafactor on the whole tensors. Collective: all ranks step together.

    rows    parameters that hold this rank's rows, possibly none of them: (r, m) or (r,)
    shapes  the whole tensors' shapes, (n, m) or (n,)
    Raises ValueError for tensors of more than two axes.
    """

    def __init__(
        self, rows: Sequence[nn.Parameter], shapes: Sequence[torch.Size], dist: Dist, *, lr: float, weight_decay: float
    ) -> None:
        deep = [tuple(shape) for shape in shapes if len(shape) > 2]
        if deep:
            raise ValueError(
                f"trainer.engine=fsdp runs adafactor on vectors and matrices, the model has a tensor of shape {deep[0]}; use adamw"
            )
        super().__init__(rows, {"lr": lr, "weight_decay": weight_decay})
        self.dist, self.rows, self.shapes = dist, list(rows), [tuple(shape) for shape in shapes]
        self.matrices = [i for i, shape in enumerate(self.shapes) if len(shape) == 2]

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        """Raises ValueError for a closure: gradients are there already."""
        if closure is not None:
            raise ValueError("ShardedAdafactor.step takes no closure")
        group = self.param_groups[0]
        for i in range(len(self.rows)):
            self._start(i)
        beta2 = 1.0 - math.pow(self.state[self.rows[0]]["step"], DECAY)
        self._moments(beta2)
        means = self._row_means()
        squares = torch.stack([self._update(i, means).double().square().sum() for i in range(len(self.rows))])
        totals = self.dist.all_reduce_sum(squares).tolist()
        for i, parameter in enumerate(self.rows):
            rms = math.sqrt(totals[i] / math.prod(self.shapes[i]))
            update = self._update(i, means).div_(max(1.0, rms / CLIP)).mul_(group["lr"])
            wide = parameter.float()
            if group["weight_decay"] != 0:
                wide.add_(wide, alpha=-group["weight_decay"] * group["lr"])
            parameter.copy_(wide.sub_(update))

    def _start(self, i: int) -> None:
        parameter, state = self.rows[i], self.state[self.rows[i]]
        if not state:
            state["step"] = 0
            options = {"dtype": torch.float32, "device": parameter.device}
            if len(self.shapes[i]) == 2:
                state["exp_avg_sq_row"] = torch.zeros(parameter.shape[0], **options)
                state["exp_avg_sq_col"] = torch.zeros(self.shapes[i][1], **options)
            else:
                state["exp_avg_sq"] = torch.zeros(parameter.shape, **options)
        state["step"] += 1

    def _gradient(self, i: int) -> Tensor:
        gradient = self.rows[i].grad
        assert gradient is not None
        return gradient.float()

    def _moments(self, beta2: float) -> None:
        """Moving averages of the squared gradient: by rows and columns for matrices, by elements for vectors."""
        columns = []
        for i, parameter in enumerate(self.rows):
            square, state = self._gradient(i).square() + EPS, self.state[parameter]
            if len(self.shapes[i]) == 2:
                state["exp_avg_sq_row"].mul_(beta2).add_(square.mean(dim=1), alpha=1.0 - beta2)
                columns.append(square.sum(dim=0) / self.shapes[i][0])
            else:
                state["exp_avg_sq"].mul_(beta2).add_(square, alpha=1.0 - beta2)
        if not columns:
            return
        whole = self.dist.all_reduce_sum(torch.cat(columns))
        for i, mean in zip(self.matrices, whole.split([self.shapes[i][1] for i in self.matrices]), strict=True):
            self.state[self.rows[i]]["exp_avg_sq_col"].mul_(beta2).add_(mean, alpha=1.0 - beta2)

    def _row_means(self) -> dict[int, float]:
        """Matrix -> mean of its row moments over all rows."""
        if not self.matrices:
            return {}
        sums = torch.stack([self.state[self.rows[i]]["exp_avg_sq_row"].double().sum() for i in self.matrices])
        totals = self.dist.all_reduce_sum(sums).tolist()
        return {i: total / self.shapes[i][0] for i, total in zip(self.matrices, totals, strict=True)}

    def _update(self, i: int, means: dict[int, float]) -> Tensor:
        """This rank's rows of the update before clipping. Computed twice a step: keeping it would cost a gradient's memory."""
        state = self.state[self.rows[i]]
        if i not in means:
            return state["exp_avg_sq"].rsqrt().mul_(self._gradient(i))
        by_row = (state["exp_avg_sq_row"] / means[i]).rsqrt_().unsqueeze(1)
        return torch.mul(by_row, state["exp_avg_sq_col"].rsqrt().unsqueeze(0)).mul_(self._gradient(i))
