"""Replicated data parallelism made exact: gradients are summed in one fixed order, and ranks share the optimiser's work.

In come a model's parameters and a `Dist`; a step then goes

    backward (a flat buffer a worker) ► sum in tree order ► optimiser on this rank's tensors ► parameters everywhere

Why not torch's DDP: its all-reduce adds in an order that depends on ranks and bucket boundaries, each rank repeats the whole
optimiser, and W virtual workers on fewer processes would add in yet another order. Here the W workers' gradients are added
along one binary tree whatever number of processes carries them, so 4 processes and 1 process that emulates 4 give the same
bits where the blocks of workers are whole subtrees (W / P a power of two); else the last bits may differ. Every tensor
belongs to one rank, which sums its gradient and updates it (ZeRO stage 1 by whole tensors): all optimisers here treat tensors
apart, so nothing changes.

Here are the layout, the tree and the exchange of one process with itself; `carriers` holds those between processes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from clusterft.distributed import Dist


@dataclass(frozen=True)
class Layout:
    """Where each parameter lies in the flat vector (n elements) and which rank owns it. Tensors of one owner are neighbours."""

    names: tuple[str, ...]
    shapes: tuple[torch.Size, ...]
    starts: tuple[int, ...]
    owners: tuple[int, ...]
    shards: tuple[tuple[int, int], ...]
    numel: int
    dtype: torch.dtype

    def views(self, flat: Tensor) -> list[Tensor]:
        """The flat vector as parameter-shaped views, in the order of `names`."""
        return [flat[s : s + shape.numel()].view(shape) for s, shape in zip(self.starts, self.shapes, strict=True)]


def plan_layout(named: Sequence[tuple[str, nn.Parameter]], world: int) -> Layout:
    """Shares tensors among ranks, largest first to the least loaded. Raises ValueError for none or mixed dtypes."""
    if not named:
        raise ValueError("the model has no trainable parameters")
    dtypes = sorted({str(p.dtype) for _, p in named})
    if len(dtypes) > 1:
        raise ValueError(f"trainable parameters have several dtypes ({', '.join(dtypes)}): cast the model to one")
    load = [0] * world
    owner: dict[str, int] = {}
    for name, parameter in sorted(named, key=lambda item: (-item[1].numel(), item[0])):
        owner[name] = min(range(world), key=lambda r: (load[r], r))
        load[owner[name]] += parameter.numel()
    starts, shards, offset = {}, [], 0
    for rank in range(world):
        begin = offset
        for name, parameter in named:
            if owner[name] == rank:
                starts[name] = offset
                offset += parameter.numel()
        shards.append((begin, offset))
    return Layout(
        names=tuple(name for name, _ in named),
        shapes=tuple(p.shape for _, p in named),
        starts=tuple(starts[name] for name, _ in named),
        owners=tuple(owner[name] for name, _ in named),
        shards=tuple(shards),
        numel=offset,
        dtype=named[0][1].dtype,
    )


class TreeSum:
    """Adds leaves 0, 1, 2, ... pairwise along a binary tree as they come; at most log2 + 1 partial sums are alive.

    `add(left, right)` returns their sum (it may reuse `left`). None is the empty sum. Leftovers are added left to right.
    """

    def __init__(self, add: Callable[[Tensor, Tensor], Tensor], first: int = 0) -> None:
        self._add, self._next, self._stack = add, first, []

    def push(self, leaf: Tensor | None) -> None:
        level, index = 0, self._next
        self._next += 1
        self._stack.append((level, index, leaf))
        while len(self._stack) > 1:
            (la, ia, a), (lb, ib, b) = self._stack[-2:]
            if la != lb or ia % 2 or ib != ia + 1:
                return
            self._stack[-2:] = [(la + 1, ia // 2, self._join(a, b))]

    def total(self) -> Tensor | None:
        result = None
        for _, _, part in self._stack:
            result = self._join(result, part)
        return result

    def _join(self, a: Tensor | None, b: Tensor | None) -> Tensor | None:
        return b if a is None else a if b is None else self._add(a, b)


class LocalExchange:
    """One process: it owns every tensor. Base class of the carriers.

    `ordered`: sum workers along the tree, each in a buffer of its own (needs log2(W/P) + 1 gradients of memory); otherwise all
    workers of this process accumulate into one buffer, which is equal up to rounding.
    """

    carrier = "none"

    def __init__(
        self, named: Sequence[tuple[str, nn.Parameter]], dist: Dist, *, first_worker: int = 0, ordered: bool = True
    ) -> None:
        self.dist, self.ordered, self.first_worker = dist, ordered, first_worker
        self.layout = plan_layout(named, dist.world)
        self.parameters = [p for _, p in named]
        self.flat = self._place_parameters()
        self._free: list[Tensor] = []
        self._tree: TreeSum | None = None
        self._current: Tensor | None = None

    # -- one worker after the other -----------------------------------------------------------------------------------

    def begin_step(self) -> None:
        self._tree = TreeSum(self._merge, self.first_worker)

    def begin_worker(self) -> None:
        """Points every `.grad` at an empty buffer."""
        if self._current is None:
            self._current = self._free.pop() if self._free else self._new_buffer()
            self._current.zero_()
            for parameter, view in zip(self.parameters, self.layout.views(self._current), strict=True):
                parameter.grad = view

    def end_worker(self, *, idle: bool = False) -> None:
        if not self.ordered:
            return
        self._tree.push(None if idle else self._current)
        self._current = None

    def _partial(self) -> Tensor | None:
        """The sum over this process's workers, or None if all were idle; clears every `.grad`."""
        total = self._tree.total() if self.ordered else self._current
        if not self.ordered:
            self._current = None
        for parameter in self.parameters:
            parameter.grad = None
        return total

    def _merge(self, left: Tensor, right: Tensor) -> Tensor:
        left.add_(right)
        self._free.append(right)
        return left

    # -- what differs between carriers ----------------------------------------------------------------------------------

    def _place_parameters(self) -> Tensor:
        """Moves all parameters into one flat vector that they become views of."""
        flat = torch.empty(self.layout.numel, dtype=self.layout.dtype, device=self.dist.device)
        self._adopt(flat, copy=True)
        return flat

    def _adopt(self, flat: Tensor, *, copy: bool) -> None:
        for parameter, view in zip(self.parameters, self.layout.views(flat), strict=True):
            if copy:
                view.copy_(parameter.detach())
            parameter.data = view

    def _new_buffer(self) -> Tensor:
        return torch.empty(self.layout.numel, dtype=self.layout.dtype, device=self.dist.device)

    def reduce(self) -> Tensor | None:
        """This rank's shard of the summed gradient."""
        total = self._partial()
        return torch.zeros_like(self.flat) if total is None else total

    def publish(self) -> None:
        """Makes every owner's new parameters visible to all ranks."""

    def release(self, shard: Tensor) -> None:
        """Gives the tensor of `reduce` back after the optimiser has read it."""
        self._free.append(shard)

    def close(self) -> None:
        """Gives the parameters memory of their own again."""
        for parameter in self.parameters:
            parameter.data = parameter.data.clone()
            parameter.grad = None
        self._free.clear()

    # -- the owner's view -----------------------------------------------------------------------------------------------

    @property
    def owned(self) -> list[int]:
        """Indices of the parameters that this rank updates."""
        return [i for i, owner in enumerate(self.layout.owners) if owner == self.dist.rank]

    def set_gradients(self, shard: Tensor) -> None:
        """Points `.grad` of the owned parameters into `shard`."""
        begin = self.layout.shards[self.dist.rank][0]
        for i in self.owned:
            start, shape = self.layout.starts[i] - begin, self.layout.shapes[i]
            self.parameters[i].grad = shard[start : start + shape.numel()].view(shape)
