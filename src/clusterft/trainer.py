"""The training loop (paper, section 4, "Allocation" and "Weighted update").

In come a model, the selected rows as tokens, the Selection and the `trainer` and `sampler` nodes of the configuration; out
come the trained model under `out_dir`/model, one JSON line a step in `out_dir`/metrics.jsonl, checkpoints, and a
`TrainResult`.

    sampler.plan(epoch) ► step ► this process's workers ► micro-batches ► backward ► exchange ► optimiser ► next step

The loop is small and its own instead of `accelerate`'s or the Trainer's: those average over ranks and accumulation steps, which
a weighted update undoes again at every micro-batch, and neither knows workers apart from processes. Weights and target counts
are known to every rank before a step, so its denominator needs no communication; the gradient is the plain sum (`exchange`).
Dropout is seeded by (step, worker, micro-batch): no generator state is carried, and a resumed or re-laid-out run draws the
same masks.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_model
from torch import Tensor, nn

from clusterft import checkpoint
from clusterft.allocation import ClusterBatchSampler, ShuffledBatchSampler
from clusterft.distributed import Dist, Preempted
from clusterft.exchange import LocalExchange, choose_exchange
from clusterft.heads import find_head
from clusterft.loss import check_reduction, combine, step_denominator, target_loss
from clusterft.metrics_log import MetricsLog
from clusterft.optim import build_optimizer, learning_rate
from clusterft.records import IGNORE_INDEX, Encoded, Selection
from clusterft.seeding import seed_hash
from clusterft.stop_signals import StopSignals
from clusterft.train_state import TrainState, load_state, save_state

log = logging.getLogger(__name__)

PRECISIONS = ("float32", "bf16_autocast", "bf16")
ENGINES_NOT_BUILT = {
    "fsdp": "sharded weights are not built yet, and flat-parameter FSDP cannot run Adafactor, which needs whole matrices",
    "deepspeed_zero2": "the DeepSpeed engines are not built yet",
    "deepspeed_zero3": "the DeepSpeed engines are not built yet",
}


@dataclass(frozen=True)
class TrainResult:
    """What training did and cost. Seconds and tokens count over all resumed parts; `tokens` without padding.

    losses  the logged loss of every step (the same weighted mean that is differentiated), None for a step without target tokens
    phases  seconds of rank 0 in forward_backward, exchange, optimizer, checkpoint
    """

    steps: int
    total_steps: int
    tokens: int
    target_tokens: int
    losses: tuple[float | None, ...]
    wall_seconds: float
    peak_memory_gib: float
    phases: dict[str, float] = field(default_factory=dict)
    carrier: str = ""
    resumed_from: tuple[int, ...] = ()
    rejected_checkpoints: dict[str, str] = field(default_factory=dict)

    def facts(self) -> dict[str, Any]:
        """JSON-able summary for the run's record: losses as first, last and mean."""
        facts = asdict(self)
        known = [x for x in facts.pop("losses") if x is not None]
        facts["resumed_from"] = list(self.resumed_from)
        return facts | {"first_loss": known[0], "last_loss": known[-1], "mean_loss": sum(known) / len(known)}


def read_result(out_dir: Path) -> TrainResult:
    """The result that `train` wrote last. Raises FileNotFoundError if training has not finished."""
    data = json.loads((out_dir / "result.json").read_text(encoding="utf-8"))
    return TrainResult(**data | {"losses": tuple(data["losses"]), "resumed_from": tuple(data["resumed_from"])})


def train(
    model: nn.Module,
    encoded: Sequence[Encoded],
    selection: Selection,
    cfg: Any,
    sampler_cfg: Any,
    *,
    dist: Dist,
    out_dir: Path,
    seed: int,
    tokenizer: Any = None,
    pad_id: int = 0,
    stop_after: int | None = None,
    on_step: Callable[[dict[str, Any]], None] | None = None,
    carrier: str = "auto",
    logits: str = "targets",
) -> TrainResult:
    """Fine-tunes `model` in place on `encoded` (m rows aligned with selection.ids). Collective; resumes from `out_dir` by itself.

    cfg, sampler_cfg  TrainerConfig and SamplerConfig nodes
    tokenizer         saved beside the model when given
    pad_id            any id of the vocabulary: padding is masked and carries no loss
    stop_after        return after this global step with a checkpoint; the same call without it goes on
    on_step           called on rank 0 with each step's metrics line
    carrier           auto | shared | messages, see `exchange.choose_exchange`
    logits            targets (only where there is a target) | full
    Raises ValueError for settings that do not fit, RankFailure on every rank when one of them meets a loss that is not finite,
    Preempted after a checkpoint on SIGTERM or SIGUSR1.
    """
    if dist.broadcast_object((out_dir / "result.json").exists()):
        log.info("%s is already finished, nothing is computed anew", out_dir)
        return _finished(model, out_dir)
    run = _Run(model, encoded, selection, cfg, sampler_cfg, dist, out_dir, seed, pad_id, carrier, logits)
    with StopSignals() as stop:
        try:
            run.go(stop, stop_after, on_step)
        finally:
            run.exchange.close()
    result = run.result()
    if run.done:
        run.finish(tokenizer, result)
    return result


class _Run:
    """Everything that one call of `train` holds; methods in the order in which they run."""

    def __init__(
        self,
        model: nn.Module,
        encoded: Sequence[Encoded],
        selection: Selection,
        cfg: Any,
        sampler_cfg: Any,
        dist: Dist,
        out_dir: Path,
        seed: int,
        pad_id: int,
        carrier: str,
        logits: str,
    ) -> None:
        _check(model, encoded, selection, cfg, sampler_cfg, dist)
        self.model, self.encoded, self.cfg, self.dist, self.out_dir = model, encoded, cfg, dist, out_dir
        self.seed, self.pad_id = seed, pad_id
        self.weights = row_weights(selection, sampler_cfg.weights)
        self.targets = np.array([row.n_target for row in encoded])
        self.sampler = make_sampler(selection, encoded, cfg, sampler_cfg, dist, seed)
        self.total_steps = cfg.epochs * self.sampler.steps_per_epoch
        self.rate = learning_rate(cfg.schedule, lr=cfg.learning_rate, warmup_steps=cfg.warmup_steps, total_steps=self.total_steps)
        if dist.device.type == "cuda":
            torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = bool(cfg.tf32)
        model.eval()
        self.head = find_head(model) if logits == "targets" else None
        if cfg.gradient_checkpointing:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        model.train()
        named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
        _check_same_weights(named, dist)
        self.exchange = self._make_exchange(named, carrier)
        mine = [self.exchange.parameters[i] for i in self.exchange.owned]
        self.optimizer = (
            build_optimizer(cfg.optimizer, mine, lr=cfg.learning_rate, weight_decay=cfg.weight_decay) if mine else None
        )
        self.state = TrainState()
        self.rejected: dict[str, str] = {}
        self.started = time.perf_counter()

    def _make_exchange(self, named: list[tuple[str, nn.Parameter]], carrier: str) -> LocalExchange:
        # On a GPU each virtual worker's own gradient buffer would cost a model's worth of memory: sum as they come there.
        ordered = self.dist.device.type == "cpu"
        kind = choose_exchange(self.dist, carrier)
        return kind(named, self.dist, first_worker=self.sampler.my_workers.start, ordered=ordered)

    @property
    def done(self) -> bool:
        return self.state.step >= self.total_steps

    def go(self, stop: StopSignals, stop_after: int | None, on_step: Callable[[dict[str, Any]], None] | None) -> None:
        self._resume()
        last = self.total_steps if stop_after is None else min(stop_after, self.total_steps)
        with MetricsLog(self.out_dir, self.dist, keep_steps=self.state.step) as metrics:
            while self.state.step < last:
                epoch, within = divmod(self.state.step, self.sampler.steps_per_epoch)
                plan = self.sampler.plan(epoch)
                for rows in plan[within : within + last - self.state.step]:
                    line = self._step(epoch, rows, stop)
                    metrics.write(line)
                    if on_step is not None and self.dist.is_main:
                        on_step(line)
                    self._maybe_checkpoint(stop, last)

    def _resume(self) -> None:
        found = checkpoint.find_latest(self.out_dir) if self.dist.is_main else None
        found = self.dist.broadcast_object(found)
        self.rejected = dict(found.rejected)
        for name, reason in found.rejected.items():
            if self.dist.is_main:
                log.warning("%s is passed over: %s", name, reason)
        if found.path is not None:
            self.state = load_state(found.path, self.exchange, self.optimizer, self.sampler)
            if self.dist.is_main:
                log.info("resuming at step %d of %d from %s", self.state.step, self.total_steps, found.path.name)

    # -- one step -------------------------------------------------------------------------------------------------------

    def _step(self, epoch: int, rows: list[int], stop: StopSignals) -> dict[str, Any]:
        started, step, cfg = time.perf_counter(), self.state.step, self.cfg
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
        rate = self.rate(step)
        norm = self._update(rate, marks) if denominator > 0 else None
        tokens, targets = sum(len(self.encoded[i]) for i in rows), int(self.targets[rows].sum())
        loss = None if denominator <= 0 else float(numbers[: self.sampler.workers].sum())
        seconds = time.perf_counter() - started
        self.state.advance(loss, tokens, targets, seconds, _phases(started, marks))
        line = {"step": step + 1, "epoch": epoch, "loss": loss, "lr": rate, "rows": len(rows), "tokens": tokens}
        line |= {"target_tokens": targets, "seconds": round(seconds, 4), "order": _digest([self.encoded[i].id for i in rows])}
        if norm is not None:
            line["grad_norm"] = norm
        return line if denominator > 0 else line | {"note": "no tokens"}

    def _forward_backward(self, step: int, rows: list[int], denominator: float, sums: Tensor) -> str | None:
        """Every worker of this process, each into its own gradient; `sums` (w,) gets its part of the loss. Returns a problem."""
        self.exchange.begin_step()
        cuda = [self.dist.device] if self.dist.device.type == "cuda" else []
        # One autocast region for all micro-batches: weights are cast once a step. Backward runs outside of it, as torch asks.
        with torch.random.fork_rng(devices=cuda), self._autocast():
            for worker, batches in self.sampler.worker_batches(rows):
                useful = [b for b in batches if self.targets[b].any()]
                if useful:
                    self.exchange.begin_worker()
                for number, batch in enumerate(useful):
                    torch.manual_seed(seed_hash(self.seed, "dropout", step, worker, number))
                    loss = self._loss(batch, denominator)
                    if not torch.isfinite(loss):
                        ids = ", ".join(self.encoded[i].id for i in batch[:4])
                        return f"the loss is {float(loss)} in step {step + 1}, rows {ids}"
                    with torch.autocast(self.dist.device.type, enabled=False):
                        loss.backward()
                    sums[worker] += loss.detach().double().cpu()
                self.exchange.end_worker(idle=not useful)
        return None

    def _loss(self, batch: list[int], denominator: float) -> Tensor:
        ids, mask, labels = pad_rows([self.encoded[i] for i in batch], self.pad_id, self.dist.device)
        weights = torch.as_tensor(self.weights[batch])
        reduction = self.cfg.loss_reduction
        losses, tokens = target_loss(self.model, self.head, ids, mask, labels, reduction)
        return combine(losses, tokens, weights, reduction=reduction, denominator=denominator)

    def _autocast(self) -> torch.autocast:
        return torch.autocast(self.dist.device.type, dtype=torch.bfloat16, enabled=self.cfg.precision == "bf16_autocast")

    def _update(self, rate: float, marks: list[float]) -> float | None:
        shard = self.exchange.reduce()
        self.exchange.set_gradients(shard)
        norm = self._clip() if self.cfg.max_grad_norm is not None else None
        marks.append(time.perf_counter())
        if self.optimizer is not None:
            for group in self.optimizer.param_groups:
                group["lr"] = rate
            self.optimizer.step()
        for i in self.exchange.owned:
            self.exchange.parameters[i].grad = None
        marks.append(time.perf_counter())
        self.exchange.release(shard)
        self.exchange.publish()
        return norm

    def _clip(self) -> float:
        """Scales the owned gradients to a global norm of max_grad_norm. Squares are added in the model's order everywhere."""
        squares = torch.zeros(len(self.exchange.parameters), dtype=torch.float64)
        for i in self.exchange.owned:
            squares[i] = float(self.exchange.parameters[i].grad.double().square().sum())
        norm = float(self.dist.all_reduce_sum(squares).sum().sqrt())
        factor = min(1.0, self.cfg.max_grad_norm / (norm + 1e-6))
        if factor < 1.0:
            for i in self.exchange.owned:
                self.exchange.parameters[i].grad.mul_(factor)
        return norm

    # -- around the steps -------------------------------------------------------------------------------------------------

    def _maybe_checkpoint(self, stop: StopSignals, last: int) -> None:
        every, step = self.cfg.checkpoint_every_steps, self.state.step
        due = every is not None and step % every == 0 and step < self.total_steps
        leaving = stop.seen_anywhere and step < self.total_steps
        if due or leaving or (step == last and step < self.total_steps):
            started = time.perf_counter()
            self.state.checkpoint_seconds += save_state(
                self.out_dir, self.state, self.model, self.exchange, self.optimizer, self.sampler, self.dist
            )
            if self.dist.is_main:
                checkpoint.prune(self.out_dir, self.cfg.keep_last)
            self.state.wall_seconds += time.perf_counter() - started
        if leaving:
            raise Preempted(f"stopped by a signal after step {step} of {self.total_steps}, checkpoint written")

    def result(self) -> TrainResult:
        peaks = self.dist.gather_objects(peak_memory_gib(self.dist.device))
        return TrainResult(
            steps=self.state.step,
            total_steps=self.total_steps,
            tokens=self.state.tokens,
            target_tokens=self.state.target_tokens,
            losses=tuple(self.state.losses),
            wall_seconds=self.state.wall_seconds,
            peak_memory_gib=max(peaks),
            phases=self.state.phases | {"checkpoint": self.state.checkpoint_seconds},
            carrier=self.exchange.carrier,
            resumed_from=tuple(self.state.resumed_from),
            rejected_checkpoints=self.rejected,
        )

    def finish(self, tokenizer: Any, result: TrainResult) -> None:
        """Rank 0 writes model, tokenizer and, last, result.json; then the checkpoints are no longer needed."""
        problem = None
        if self.dist.is_main:
            try:
                self.model.save_pretrained(self.out_dir / "model")
                if tokenizer is not None:
                    tokenizer.save_pretrained(self.out_dir / "model")
                checkpoint.write_atomically(self.out_dir / "result.json", json.dumps(asdict(result), indent=1))
            except OSError as error:
                problem = f"the trained model could not be written: {error}"
        self.dist.raise_together(problem)


def _finished(model: nn.Module, out_dir: Path) -> TrainResult:
    """Puts the weights that training left under `out_dir` into `model`. Raises FileNotFoundError if they were removed."""
    file = out_dir / "model" / "model.safetensors"
    if not file.exists():
        raise FileNotFoundError(f"{out_dir} holds a finished training, but {file} was removed; delete result.json to train again")
    load_model(model, file, strict=False)
    return read_result(out_dir)


# -- what a step is made of -----------------------------------------------------------------------------------------------


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


def _check(model: nn.Module, encoded: Sequence[Encoded], selection: Selection, cfg: Any, sampler_cfg: Any, dist: Dist) -> None:
    if cfg.engine in ENGINES_NOT_BUILT:
        raise ValueError(f"trainer.engine={cfg.engine}: {ENGINES_NOT_BUILT[cfg.engine]}; use trainer.engine=ddp")
    if cfg.engine != "ddp":
        raise ValueError(f"trainer.engine={cfg.engine!r} is not one of ddp, {', '.join(ENGINES_NOT_BUILT)}")
    if sampler_cfg.reselect_every_epochs is not None:
        raise ValueError("sampler.reselect_every_epochs: choosing anew during training is not built yet; set it to null")
    check_reduction(cfg.loss_reduction)
    if cfg.precision not in PRECISIONS:
        raise ValueError(f"trainer.precision={cfg.precision!r} is not one of {', '.join(PRECISIONS)}")
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


def _check_same_weights(named: list[tuple[str, nn.Parameter]], dist: Dist) -> None:
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
