"""One optimiser step: this process's workers, their micro-batches, the exchange, the update.

In come the rows of a global step; out come the step's line for metrics.jsonl and the model changed in place. See trainer for the
loop around it and for why gradients are summed here instead of by DDP.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from clusterft.allocation import ClusterBatchSampler, ShuffledBatchSampler
from clusterft.distributed import Dist
from clusterft.engines import make_engine, trainable
from clusterft.heads import find_head
from clusterft.loss import step_denominator
from clusterft.records import IGNORE_INDEX, Encoded
from clusterft.seeding import seed_hash
from clusterft.stop_signals import StopSignals
from clusterft.train_setup import check_same_weights
from clusterft.train_state import TrainState

Sampler = ClusterBatchSampler | ShuffledBatchSampler


class Stepper:
    """Holds model and engine; `step` is collective."""

    def __init__(
        self,
        model: nn.Module,
        encoded: Sequence[Encoded],
        weights: np.ndarray,
        sampler: Sampler,
        cfg: Any,
        dist: Dist,
        *,
        seed: int,
        pad_id: int,
        carrier: str,
        logits: str,
    ) -> None:
        if logits not in ("targets", "full"):
            raise ValueError(f"logits={logits!r} is not one of targets, full")
        self.model, self.encoded, self.weights, self.sampler = model, encoded, weights, sampler
        self.cfg, self.dist, self.seed, self.pad_id = cfg, dist, seed, pad_id
        self.targets = np.array([row.n_target for row in encoded])
        with_target = np.flatnonzero(self.targets)
        self.shortest = int(min(with_target, key=lambda i: len(encoded[i])))
        self.head = self._prepare_model(logits)
        check_same_weights(trainable(model), dist)
        self.engine = make_engine(model, self.head, cfg, dist, first_worker=sampler.my_workers.start, carrier=carrier)

    def _prepare_model(self, logits: str) -> Any:
        if self.dist.device.type == "cuda":
            torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = bool(self.cfg.tf32)
        self.model.eval()
        head = find_head(self.model) if logits == "targets" else None
        if self.cfg.gradient_checkpointing:
            self.model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        self.model.train()
        return head

    def step(self, epoch: int, rows: list[int], state: TrainState, rate: float, stop: StopSignals) -> dict[str, Any]:
        """One global step on `rows` (positions in the selection). Advances `state`; returns the metrics line.

        Raises RankFailure on every rank if one of them met a loss that is not finite; the weights are then untouched.
        """
        started, step, cfg = time.perf_counter(), state.step, self.cfg
        denominator = step_denominator(self.weights[rows], self.targets[rows], cfg.loss_reduction)
        sums = torch.zeros(self.sampler.workers + 1, dtype=torch.float64)
        problem = self._forward_backward(step, rows, denominator, sums) if denominator > 0 else None
        sums[-1] = stop.requested is not None
        marks = [time.perf_counter()]
        # One small collective a step: losses, stop requests and, before any gradient is exchanged, whether a rank failed.
        numbers = torch.cat([sums, torch.tensor([float(problem is not None)], dtype=torch.float64)])
        self.dist.all_reduce_sum(numbers)
        if numbers[-1] > 0:
            self.dist.raise_together(problem)
        stop.seen_anywhere = bool(numbers[-2] > 0)
        norm = self._update(rate, marks) if denominator > 0 else None
        tokens, targets = sum(len(self.encoded[i]) for i in rows), int(self.targets[rows].sum())
        loss = None if denominator <= 0 else float(numbers[: self.sampler.workers].sum())
        seconds = time.perf_counter() - started
        state.advance(loss, tokens, targets, seconds, _phases(started, marks))
        line = {"step": step + 1, "epoch": epoch, "loss": loss, "lr": rate, "rows": len(rows), "tokens": tokens}
        line |= {"target_tokens": targets, "seconds": round(seconds, 4), "order": _digest([self.encoded[i].id for i in rows])}
        if norm is not None:
            line["grad_norm"] = norm
        return line if denominator > 0 else line | {"note": "no tokens"}

    def _forward_backward(self, step: int, rows: list[int], denominator: float, sums: Tensor) -> str | None:
        """Every worker of this process; `sums` (w,) gets its part of the loss. Returns a problem."""
        self.engine.begin_step()
        cuda = [self.dist.device] if self.dist.device.type == "cuda" else []
        run = self._in_lockstep if self.engine.lockstep else self._by_worker
        with torch.random.fork_rng(devices=cuda), self.engine.step_context():
            return run(step, rows, denominator, sums)

    def _by_worker(self, step: int, rows: list[int], denominator: float, sums: Tensor) -> str | None:
        """Each worker into its own gradient; stops at the first loss that is not finite."""
        for worker, batches in self.sampler.worker_batches(rows):
            useful = self._useful(batches)
            if useful:
                self.engine.begin_worker()
            for number, batch in enumerate(useful):
                loss = self._loss(step, worker, number, batch, denominator)
                if not torch.isfinite(loss):
                    return self._not_finite(loss, step, batch)
                self.engine.backward(loss)
                sums[worker] += loss.detach().double().cpu()
            self.engine.end_worker(idle=not useful)
        return None

    def _in_lockstep(self, step: int, rows: list[int], denominator: float, sums: Tensor) -> str | None:
        """All ranks run as many micro-batches as the busiest one, the rest with a row of weight 0; none leaves its peers waiting."""
        mine, problem = self._passes(self.sampler.worker_batches(rows)), None
        busiest = max(len(self._passes(self.sampler.for_rank(r).worker_batches(rows))) for r in range(self.dist.world))
        for worker, number, batch in mine:
            loss = self._loss(step, worker, number, batch, denominator)
            if problem is None and not torch.isfinite(loss):
                problem = self._not_finite(loss, step, batch)
            self.engine.backward(loss)
            sums[worker] += loss.detach().double().cpu()
        for _ in range(busiest - len(mine)):
            self.engine.backward(self._loss(step, 0, 0, [self.shortest], denominator, idle=True))
        return problem

    def _useful(self, batches: Sequence[list[int]]) -> list[list[int]]:
        return [b for b in batches if self.targets[b].any()]

    def _passes(self, workers: Sequence[tuple[int, list[list[int]]]]) -> list[tuple[int, int, list[int]]]:
        """(worker, number, micro-batch) of everything that has a target, in order."""
        return [(w, number, batch) for w, batches in workers for number, batch in enumerate(self._useful(batches))]

    def _not_finite(self, loss: Tensor, step: int, batch: list[int]) -> str:
        ids = ", ".join(self.encoded[i].id for i in batch[:4])
        return f"the loss is {float(loss)} in step {step + 1}, rows {ids}"

    def _loss(self, step: int, worker: int, number: int, batch: list[int], denominator: float, idle: bool = False) -> Tensor:
        torch.manual_seed(seed_hash(self.seed, "dropout", step, worker, number))
        ids, mask, labels = pad_rows([self.encoded[i] for i in batch], self.pad_id, self.dist.device)
        weights = torch.as_tensor(self.weights[batch] * (not idle))
        return self.engine.loss(ids, mask, labels, weights, denominator)

    def _update(self, rate: float, marks: list[float]) -> float | None:
        return self.engine.update(rate, lambda: marks.append(time.perf_counter()))


def pad_rows(rows: Sequence[Encoded], pad_id: int, device: torch.device) -> tuple[Tensor, Tensor | None, Tensor]:
    """(n, t) ids, mask and labels, padded on the right by length; the mask is None where nothing is padded."""
    longest = max(len(row) for row in rows)
    ids = np.full((len(rows), longest), pad_id, dtype=np.int64)
    labels = np.full((len(rows), longest), IGNORE_INDEX, dtype=np.int64)
    mask = np.zeros((len(rows), longest), dtype=np.int64)
    for i, row in enumerate(rows):
        ids[i, : len(row)], labels[i, : len(row)], mask[i, : len(row)] = row.input_ids, row.labels, 1
    padded = None if mask.all() else torch.from_numpy(mask).to(device)
    return torch.from_numpy(ids).to(device), padded, torch.from_numpy(labels).to(device)


def _digest(ids: Sequence[str]) -> str:
    return f"{seed_hash(0, *ids):016x}"


def _phases(started: float, marks: list[float]) -> dict[str, float]:
    """Seconds by phase from the ends of backward, exchange and optimiser; publishing counts as exchange."""
    now = time.perf_counter()
    if len(marks) == 1:
        return {"forward_backward": marks[0] - started, "exchange": now - marks[0], "optimizer": 0.0}
    backward, reduced, updated = marks
    return {
        "forward_backward": backward - started,
        "exchange": reduced - backward + now - updated,
        "optimizer": updated - reduced,
    }
