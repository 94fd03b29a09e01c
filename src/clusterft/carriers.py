"""How gradients and weights travel between processes: two carriers with the same arithmetic and the same bits.

`MessageExchange`  all-to-all and broadcast; gloo or nccl, any number of nodes
`SharedExchange`   processes of one host on CPU: gradients and weights lie in memory that all of them map, nothing is sent

`choose_exchange` picks by where the ranks are. See `exchange` for what is exchanged and in which order it is added.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

import torch
import torch.distributed as td
from torch import Tensor, nn

from clusterft.distributed import Dist
from clusterft.exchange import LocalExchange, TreeSum

MESSAGE_BYTES = 128 * 2**20
"""Largest buffer that a rank sends at once, and receives at once."""


class MessageExchange(LocalExchange):
    """Several processes anywhere: every rank sends each owner its part of the gradient, owners add along the tree."""

    carrier = "messages"

    def reduce(self) -> Tensor:
        """Sums piece by piece: two buffers of at most MESSAGE_BYTES beside the gradient, however large the model. The bits do not depend on it."""
        partial = self._partial()
        if partial is None:
            partial = self._free.pop() if self._free else self._new_buffer()
            partial.zero_()
        self._whole = partial
        begin, end = self.layout.shards[self.dist.rank]
        longest = max(stop - start for start, stop in self.layout.shards)
        piece = max(1, MESSAGE_BYTES // (self.dist.world * partial.element_size()))
        for offset in range(0, longest, piece):
            total = self._piece(partial, offset, piece)
            # What was sent from here is on its way already: the sum takes its place.
            partial[begin + offset : begin + offset + len(total)] = total
        return partial[begin:end]

    def _piece(self, partial: Tensor, offset: int, piece: int) -> Tensor:
        """The sum of `piece` elements of this rank's shard from `offset` on, or of what is left of it."""
        spans = [(min(a + offset, b), min(a + offset + piece, b)) for a, b in self.layout.shards]
        lengths = [stop - start for start, stop in spans]
        mine = lengths[self.dist.rank]
        whole = offset == 0 and lengths == [stop - start for start, stop in self.layout.shards]
        sent = partial if whole else torch.cat([partial[start:stop] for start, stop in spans])
        parts = torch.empty(self.dist.world * mine, dtype=partial.dtype, device=partial.device)
        td.all_to_all_single(parts, sent, output_split_sizes=[mine] * self.dist.world, input_split_sizes=lengths)
        tree = TreeSum(lambda a, b: a.add_(b))
        for part in parts.view(self.dist.world, mine).unbind(0):
            tree.push(part)
        return tree.total()

    def publish(self) -> None:
        pending = [
            td.broadcast(self.flat[begin:end], src=rank, async_op=True)
            for rank, (begin, end) in enumerate(self.layout.shards)
            if end > begin
        ]
        for work in pending:
            work.wait()

    def release(self, shard: Tensor) -> None:
        """The shard is a part of the gradient buffer, which is free again."""
        self._free.append(self._whole)


class SharedExchange(LocalExchange):
    """Processes of one host on CPU: one copy of the weights and one gradient buffer a rank lie in memory that all of them map.

    The barriers in `reduce` (all gradients written) and `publish` (all shards updated) keep readers and writers apart.
    """

    carrier = "shared memory"

    def __init__(
        self, named: Sequence[tuple[str, nn.Parameter]], dist: Dist, *, first_worker: int = 0, ordered: bool = True
    ) -> None:
        super().__init__(named, dist, first_worker=first_worker, ordered=ordered)
        self._outboxes = [self._shared(rank) for rank in range(dist.world)]
        self._free.append(self._outboxes[dist.rank])

    def _shared(self, src: int) -> Tensor:
        """A vector in anonymous shared memory made by rank `src`. Opened through /proc: no name, no size limit, no leak."""
        n_bytes = self.layout.numel * self.layout.dtype.itemsize
        where = None
        if self.dist.rank == src:
            handle = os.memfd_create("clusterft")
            os.ftruncate(handle, n_bytes)
            where = f"/proc/{os.getpid()}/fd/{handle}"
        where = self.dist.broadcast_object(where, src=src)
        storage = torch.UntypedStorage.from_file(where, shared=True, nbytes=n_bytes)
        self.dist.barrier()
        if self.dist.rank == src:
            os.close(handle)
        return torch.tensor([], dtype=self.layout.dtype).set_(storage)

    def _place_parameters(self) -> Tensor:
        flat = self._shared(0)
        self._adopt(flat, copy=self.dist.rank == 0)
        self.dist.barrier()
        return flat

    def reduce(self) -> Tensor:
        # The first worker takes the buffer that was freed last, the outbox, and sums stay in their left operand: no copy here.
        outbox, partial = self._outboxes[self.dist.rank], self._partial()
        if partial is None:
            outbox.zero_()
        elif partial.data_ptr() != outbox.data_ptr():
            raise AssertionError("the summed gradient did not end in the shared buffer")
        else:
            self._free.append(outbox)
        self.dist.barrier()
        begin, end = self.layout.shards[self.dist.rank]
        tree = TreeSum(lambda a, b: a.add_(b))
        for gradient in self._outboxes:
            tree.push(gradient[begin:end])
        return tree.total()

    def publish(self) -> None:
        self.dist.barrier()

    def release(self, shard: Tensor) -> None:
        """The shard is a part of the shared buffers."""

    def close(self) -> None:
        super().close()
        self._outboxes = []


def choose_exchange(dist: Dist, carrier: str = "auto") -> type[LocalExchange]:
    """auto: shared memory where all ranks are CPU processes of one host, else messages. The results are the same bits.

    Raises ValueError for an unknown carrier or shared memory across hosts.
    """
    if carrier not in ("auto", "shared", "messages"):
        raise ValueError(f"carrier={carrier!r} is not one of auto, shared, messages")
    if dist.world == 1:
        return LocalExchange
    one_host = dist.device.type == "cpu" and dist.local_world == dist.world and hasattr(os, "memfd_create")
    if carrier == "shared" and not one_host:
        raise ValueError(
            f"carrier=shared needs CPU processes of one Linux host, found {dist.local_world} of {dist.world} on {dist.device}"
        )
    return SharedExchange if carrier != "messages" and one_host else MessageExchange
