"""Allocation: from selected rows to the batches of every rank (paper, section 4, "Allocation").

In come the cluster of each selected row, the global batch and a seed; out come, for every epoch, the same *global steps* on every
layout, and for one rank its micro-batches. Three layers, each on top of the other:

    plan(epoch)         global steps: which rows an optimiser step holds, B/K of every cluster     depends on seed, epoch, B
    runs(step)          W consecutive runs of a step: what each worker processes                   + workers
    batches(epoch)      this rank's micro-batches                                                  + rank, world, micro-batch

Positions are positions in the selection (0 ... m-1). Axis letters: m rows, k clusters, w workers.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from clusterft.seeding import generator, seed_hash

Steps = list[list[int]]


class _StepSampler:
    """Steps, runs and micro-batches for any order of rows; subclasses say which rows a step holds (`plan`).

    global_batch  rows an optimiser step, over all workers
    rank, world   this process among the processes that share the workers
    micro_batch   at most so many rows at once; None: a worker's whole run
    workers       W; None: as many as processes. Process p carries a consecutive block of the W runs
    ids           ids of the rows; with them the order depends on the set of rows, not on the order in which they are listed
    lengths       tokens of each row; with them a worker's rows go longest first, which saves padding and changes nothing else
    idle          "skip": a process without rows in a step yields nothing for it. "empty": every process yields equally many
                  micro-batches a step, some of them [] (loops that synchronise once a micro-batch need that)

    Usable as `DataLoader(batch_sampler=...)`. Each pass moves on to the next epoch by itself; `set_epoch` overrides. Raises
    ValueError for sizes that cannot be met.
    """

    def __init__(
        self,
        n_rows: int,
        *,
        global_batch: int,
        seed: int,
        rank: int = 0,
        world: int = 1,
        micro_batch: int | None = None,
        workers: int | None = None,
        ids: Sequence[str] | None = None,
        lengths: Sequence[int] | None = None,
        idle: str = "skip",
    ) -> None:
        self.n_rows, self.global_batch, self.seed = n_rows, global_batch, seed
        self.rank, self.world, self.micro_batch, self.idle = rank, world, micro_batch, idle
        self.workers = world if workers is None else workers
        self._check()
        # Canonical order of rows before any shuffle: a permuted selection trains in the same order.
        self.order = np.arange(n_rows) if ids is None else np.asarray(sorted(range(n_rows), key=lambda i: ids[i]))
        self.lengths = None if lengths is None else np.asarray(lengths)
        self.epoch = 0
        self._position = 0  # micro-batches of this epoch that were handed out
        self._start = 0  # where the next pass begins, after load_state_dict

    def _check(self) -> None:
        if self.n_rows < 1:
            raise ValueError("there are no rows to sample from")
        for name in ("global_batch", "workers", "world"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}, it must be at least 1")
        if self.micro_batch is not None and self.micro_batch < 1:
            raise ValueError(f"micro_batch is {self.micro_batch}, it must be at least 1")
        if not 0 <= self.rank < self.world:
            raise ValueError(f"rank {self.rank} is outside 0 ... {self.world - 1}")
        if self.world > self.workers:
            raise ValueError(f"{self.world} processes for {self.workers} workers: lower runtime.processes")
        if self.idle not in ("skip", "empty"):
            raise ValueError(f"idle={self.idle!r} is not one of skip, empty")

    # -- the three layers ---------------------------------------------------------------------------------------------

    def plan(self, epoch: int) -> Steps:
        """The global steps of `epoch`: lists of positions, each row once. The same for every rank, world, micro-batch and W."""
        raise NotImplementedError

    def runs(self, step: Sequence[int]) -> Steps:
        """W consecutive runs of a step, lengths differ by at most one; late ones are empty if there are fewer rows."""
        return [run.tolist() for run in np.array_split(np.asarray(step, dtype=np.int64), self.workers)]

    @property
    def my_workers(self) -> range:
        """The workers that this process carries: a consecutive block, sizes over processes differ by at most one."""
        return _block(self.workers, self.world, self.rank)

    @property
    def steps_per_epoch(self) -> int:
        return -(-self.n_rows // self.global_batch)

    def micro_batches(self, run: Sequence[int]) -> Steps:
        """A worker's run cut into ceil(n / micro_batch) pieces of near-equal size, longest rows first where lengths are known."""
        rows = np.asarray(run, dtype=np.int64)
        if not len(rows):
            return []
        if self.lengths is not None:
            rows = rows[np.argsort(-self.lengths[rows], kind="stable")]
        pieces = 1 if self.micro_batch is None else -(-len(rows) // self.micro_batch)
        return [piece.tolist() for piece in np.array_split(rows, pieces)]

    def worker_batches(self, step: Sequence[int]) -> list[tuple[int, Steps]]:
        """(worker, its micro-batches) for the workers of this process, in worker order."""
        runs = self.runs(step)
        return [(w, self.micro_batches(runs[w])) for w in self.my_workers]

    def step_batches(self, step: Sequence[int]) -> Steps:
        """This rank's micro-batches of one step."""
        mine = [rows for _, batches in self.worker_batches(step) for rows in batches]
        return mine + [[] for _ in range(self._batches_of_busiest(step) - len(mine))] if self.idle == "empty" else mine

    def _batches_of_busiest(self, step: Sequence[int]) -> int:
        per_worker = [len(self.micro_batches(run)) for run in self.runs(step)]
        return max(sum(per_worker[w] for w in _block(self.workers, self.world, r)) for r in range(self.world))

    def batches(self, epoch: int) -> Iterator[list[int]]:
        """This rank's micro-batches of `epoch`, in order."""
        for step in self.plan(epoch):
            yield from self.step_batches(step)

    # -- torch's batch_sampler protocol -------------------------------------------------------------------------------

    def __iter__(self) -> Iterator[list[int]]:
        epoch, skip, self._start = self.epoch, self._start, 0
        stream = enumerate(self.batches(epoch))
        current = next(stream, None)
        while current is not None:
            (done, rows), current = current, next(stream, None)
            # Loops that never ask for more than the last batch must find the next epoch too.
            self.epoch, self._position = (epoch, done + 1) if current is not None else (epoch + 1, 0)
            if done >= skip:
                yield rows

    def __len__(self) -> int:
        return sum(1 for _ in self.batches(self.epoch))

    def set_epoch(self, epoch: int) -> None:
        """The next pass gives this epoch's order. Keeps a position that was loaded for the very same epoch."""
        if epoch != self.epoch:
            self.epoch, self._position, self._start = epoch, 0, 0

    def interleaved(self) -> InterleavedBatches:
        """All ranks' micro-batches in turn, for wrappers that give batch j to rank j mod world (`accelerate.prepare`)."""
        return InterleavedBatches(self)

    def for_rank(self, rank: int) -> _StepSampler:
        """The same sampler as rank `rank` has it where no rank may go without a batch (idle="empty")."""
        twin = copy.copy(self)
        twin.rank, twin.idle = rank, "empty"
        return twin

    # -- resume -------------------------------------------------------------------------------------------------------

    def fingerprint(self) -> int:
        """A number that differs whenever the global steps could: a state only loads into a sampler with the same one."""
        return seed_hash(self.seed, type(self).__name__, self.n_rows, self.global_batch)

    def state_dict(self, *, batches_done: int | None = None) -> dict[str, Any]:
        """Epoch and position. A DataLoader with workers runs ahead of training: pass the micro-batches really consumed."""
        done = self._position if batches_done is None else batches_done
        layout = {
            "rank": self.rank,
            "world": self.world,
            "workers": self.workers,
            "micro_batch": self.micro_batch,
            "idle": self.idle,
        }
        return {"epoch": self.epoch, "batches_done": done, "fingerprint": self.fingerprint(), "layout": layout}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on where `state` stopped: inside epoch e with epoch e's order.

        Raises ValueError for a state of other rows, batch or seed, and in mid-epoch for another layout (it counts micro-batches).
        """
        if state["fingerprint"] != self.fingerprint():
            raise ValueError("the sampler's state belongs to other rows, another global batch or another seed")
        mine = self.state_dict()["layout"]
        if state["batches_done"] and state["layout"] != mine:
            raise ValueError(f"the sampler stopped inside an epoch with layout {dict(state['layout'])}, this one has {mine}")
        self.epoch, self._position = state["epoch"], state["batches_done"]
        self._start = self._position


class InterleavedBatches:
    """Rank 0's first micro-batch, rank 1's first, ..., rank 0's second, ...: equally many for all, [] where a rank idles.

    Has no `batch_size` on purpose: accelerate then takes batches as they are and repeats no row. `sampler` is where accelerate's
    `set_epoch` looks; behind `skip_first_batches` it does not look far enough: call `set_epoch` on the loader and here.
    """

    def __init__(self, steps: _StepSampler) -> None:
        self._ranks = [steps.for_rank(rank) for rank in range(steps.world)]
        self.sampler = self
        self.epoch = 0

    def __iter__(self) -> Iterator[list[int]]:
        epoch = self.epoch
        for step in self._ranks[0].plan(epoch):
            for together in zip(*(rank.step_batches(step) for rank in self._ranks), strict=True):
                yield from together
        self.epoch = epoch + 1

    def __len__(self) -> int:
        return len(self._ranks) * len(self._ranks[0])

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch
        for rank in self._ranks:
            rank.set_epoch(epoch)


class ShuffledBatchSampler(_StepSampler):
    """Selections without clusters (full data, random choice): one seeded permutation an epoch, cut into global batches."""

    def plan(self, epoch: int) -> Steps:
        rows = self.order[generator(self.seed, "shuffle", epoch).permutation(self.n_rows)]
        return [rows[i : i + self.global_batch].tolist() for i in range(0, self.n_rows, self.global_batch)]


class ClusterBatchSampler(_StepSampler):
    """Every global step holds B/K rows of each cluster (paper, section 4); where K = W worker c processes cluster c's.

    clusters  (m,) integers 0 ... k-1

    Equal clusters: counts in a step differ by at most one, and which cluster has one more rotates. Unequal clusters: each is
    spread in proportion to its size, at every step within one row of its share since the epoch's start. In both cases every
    row comes exactly once an epoch and a short last step is kept. Clusters are reshuffled inside every epoch.
    """

    def __init__(self, clusters: Sequence[int] | np.ndarray, *, global_batch: int, seed: int, **layout: Any) -> None:
        self.clusters = np.asarray(clusters)
        if self.clusters.ndim != 1 or (len(self.clusters) and not np.issubdtype(self.clusters.dtype, np.integer)):
            raise ValueError(f"clusters must be a vector of integers, got shape {self.clusters.shape} of {self.clusters.dtype}")
        if len(self.clusters) and self.clusters.min() < 0:
            raise ValueError(f"clusters must be 0 or more, found {int(self.clusters.min())}")
        super().__init__(len(self.clusters), global_batch=global_batch, seed=seed, **layout)
        self.n_clusters = int(self.clusters.max()) + 1

    def plan(self, epoch: int) -> Steps:
        members = [self._shuffled(c, epoch) for c in range(self.n_clusters)]
        first_served = generator(self.seed, "remainder", epoch).permutation(self.n_clusters)
        steps, before = [], np.zeros(self.n_clusters, dtype=np.int64)
        for upto in quota_schedule([len(rows) for rows in members], self.global_batch, first_served):
            steps.append([int(i) for c, rows in enumerate(members) for i in rows[before[c] : upto[c]]])
            before = upto
        return steps

    def runs(self, step: Sequence[int]) -> Steps:
        """K = W: run c is cluster c's rows. Else: the step, which is ordered by cluster, cut into W near-equal runs."""
        if self.n_clusters != self.workers:
            return super().runs(step)
        rows = np.asarray(step, dtype=np.int64)
        return [rows[self.clusters[rows] == c].tolist() for c in range(self.workers)]

    def fingerprint(self) -> int:
        return seed_hash(self.seed, type(self).__name__, self.global_batch, *self.clusters[self.order].tolist())

    def _shuffled(self, cluster: int, epoch: int) -> np.ndarray:
        rows = self.order[self.clusters[self.order] == cluster]
        return rows[generator(self.seed, "shuffle", epoch, cluster).permutation(len(rows))]


def quota_schedule(sizes: Sequence[int], batch: int, ties: Sequence[int] | np.ndarray) -> Iterator[np.ndarray]:
    """(k,) rows of each cluster used up to and with each step: whole numbers next to the exact share n_c R / m, summing to R.

    Earliest deadline first (Tijdeman's chairman assignment, by steps): a cluster's next row may come once its share passed the
    previous whole number and must come before the share reaches the next one. Such a schedule always exists, because the
    fractional one does and the windows are intervals. `ties` lists the clusters in the order in which equal deadlines are served;
    one fixed order makes equal clusters take turns, so that any step's counts differ by at most one.
    """
    n = np.asarray(sizes, dtype=np.int64)
    total = int(n.sum())
    priority = np.empty(len(n), dtype=np.int64)
    priority[np.asarray(ties)] = np.arange(len(n))
    used = np.zeros(len(n), dtype=np.int64)
    for done in (*range(batch, total, batch), total):
        due = np.maximum(used, n * done // total)
        optional = np.flatnonzero(due < -(-n * done // total))
        deadline = (due[optional] + 1) * total / n[optional]
        urgent = optional[np.lexsort((priority[optional], deadline))]
        due[urgent[: done - int(due.sum())]] += 1
        used = due
        yield used.copy()


def _block(items: int, parts: int, index: int) -> range:
    """The consecutive block of range(items) that part `index` of `parts` carries; the first blocks are the longer ones."""
    base, extra = divmod(items, parts)
    start = index * base + min(index, extra)
    return range(start, start + base + (index < extra))
