"""The training loop (paper, section 4, "Allocation" and "Weighted update").

In come a model, the selected rows as tokens, the Selection and the `trainer` and `sampler` nodes of the configuration; out
come the trained model under `out_dir`/model, one JSON line a step in `out_dir`/metrics.jsonl, checkpoints, and a
`TrainResult`.

    sampler.plan(epoch) ► step ► this process's workers ► micro-batches ► backward ► engine: sum, optimiser ► next step

The loop is small and its own, on `accelerate` for device, precision and backward (`accelerated`). Its `prepare`, like the Trainer,
would average over ranks and accumulation steps, which a weighted update undoes again at every micro-batch, and neither knows
workers apart from processes. Weights and target counts are known to every rank before a step, so its denominator needs no
communication; the gradient is the plain sum (`engines`).
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

from safetensors.torch import load_model
from torch import nn

from clusterft import checkpoint
from clusterft.atomic import write_atomic
from clusterft.distributed import Dist, Preempted
from clusterft.engine_names import deviations
from clusterft.metrics_log import MetricsLog
from clusterft.optim import learning_rate
from clusterft.records import Encoded, Selection
from clusterft.segments import period
from clusterft.stop_signals import StopSignals
from clusterft.train_setup import check_settings, make_sampler, peak_memory_gib, row_weights
from clusterft.train_state import TrainState, load_state, save_state
from clusterft.train_step import Stepper

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class TrainResult:
    """What training did and cost. Seconds and tokens count over all resumed parts; `tokens` without padding.

    losses  the logged loss of every step (the same weighted mean that is differentiated), None for a step without target tokens
    phases  seconds of rank 0 in forward_backward, exchange, optimizer, checkpoint
    deviations  where the optimiser left the paper's, see engine_names
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
    engine: str = ""
    deviations: tuple[str, ...] = ()
    resumed_from: tuple[int, ...] = ()
    rejected_checkpoints: dict[str, str] = field(default_factory=dict)
    cpu_seconds: float | None = None  # processor time of all ranks; None when the run was resumed and its first part not counted

    def facts(self) -> dict[str, Any]:
        """JSON-able summary for the run's record: losses as first, last and mean."""
        facts = asdict(self)
        known = [x for x in facts.pop("losses") if x is not None]
        facts |= {"resumed_from": list(self.resumed_from), "deviations": list(self.deviations)}
        return facts | {"first_loss": known[0], "last_loss": known[-1], "mean_loss": sum(known) / len(known)}


def read_result(out_dir: Path) -> TrainResult:
    """The result that `train` wrote last. Raises FileNotFoundError if training has not finished."""
    data = json.loads((out_dir / "result.json").read_text(encoding="utf-8"))
    tuples = {key: tuple(data[key]) for key in ("losses", "resumed_from", "deviations") if key in data}
    return TrainResult(**data | tuples)


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
    begin_step: int = 0,
    stop_after: int | None = None,
    on_step: Callable[[dict[str, Any]], None] | None = None,
    carrier: str = "auto",
    logits: str = "targets",
) -> TrainResult:
    """Fine-tunes `model` in place on `encoded` (m rows aligned with selection.ids). Collective; resumes from `out_dir` by itself.

    cfg, sampler_cfg  TrainerConfig and SamplerConfig nodes
    tokenizer         saved beside the model when given
    pad_id            any id of the vocabulary: padding is masked and carries no loss
    begin_step        the global step from which on this selection is in force; before it another one of as many rows was
    stop_after        return after this global step with a checkpoint; the same call without it goes on
    on_step           called on rank 0 with each step's metrics line
    carrier           auto | shared | messages, see `carriers.choose_exchange`
    logits            targets (only where there is a target) | full
    Raises ValueError for settings that do not fit, RankFailure on every rank when one of them meets a loss that is not finite,
    Preempted after a checkpoint on SIGTERM or SIGUSR1.
    """
    if dist.broadcast_object(is_finished(out_dir) if dist.is_main else None):
        log.info("%s is already finished, nothing is computed anew", out_dir)
        return _finished(model, out_dir)
    if period(sampler_cfg) is not None and stop_after is None:
        raise ValueError(
            "sampler.reselect_every_*: train() keeps one selection; train each segment up to stop_after, see adaptive"
        )
    run = _Run(model, encoded, selection, cfg, sampler_cfg, dist, out_dir, seed, pad_id, carrier, logits, begin_step)
    with StopSignals() as stop:
        try:
            run.go(stop, stop_after, on_step)
            run.engine.finish()
        finally:
            run.engine.close()
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
        begin_step: int,
    ) -> None:
        check_settings(model, encoded, selection, cfg, sampler_cfg, dist)
        self.model, self.cfg, self.dist, self.out_dir = model, cfg, dist, out_dir
        self.sampler = make_sampler(selection, encoded, cfg, sampler_cfg, dist, seed)
        self.total_steps = cfg.epochs * self.sampler.steps_per_epoch
        self.rate = learning_rate(cfg.schedule, lr=cfg.learning_rate, warmup_steps=cfg.warmup_steps, total_steps=self.total_steps)
        weights = row_weights(selection, sampler_cfg.weights)
        options = {"seed": seed, "pad_id": pad_id, "carrier": carrier, "logits": logits}
        self.stepper = Stepper(model, encoded, weights, self.sampler, cfg, dist, **options)
        self.engine = self.stepper.engine
        self.state, self.begin_step = TrainState(), begin_step
        self.rejected: dict[str, str] = {}
        self.cpu_before = time.process_time()

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
                    line = self.stepper.step(epoch, rows, self.state, self.rate(self.state.step), stop)
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
        if found.step < self.begin_step:
            raise ValueError(
                f"{self.out_dir}: this selection takes over at step {self.begin_step}, but the newest whole checkpoint is of step "
                f"{found.step}; train the selection before it up to there"
            )
        if found.path is not None:
            new = found.step == self.begin_step > 0
            self.state = load_state(found.path, self.engine, self.sampler, new_selection=new)
            if self.dist.is_main:
                log.info("resuming at step %d of %d from %s", self.state.step, self.total_steps, found.path.name)

    def _maybe_checkpoint(self, stop: StopSignals, last: int) -> None:
        every, step = self.cfg.checkpoint_every_steps, self.state.step
        due = every is not None and step % every == 0 and step < self.total_steps
        leaving = stop.seen_anywhere and step < self.total_steps
        if due or leaving or (step == last and step < self.total_steps):
            started = time.perf_counter()
            self.state.checkpoint_seconds += save_state(self.out_dir, self.state, self.engine, self.sampler, self.dist)
            if self.dist.is_main:
                checkpoint.prune(self.out_dir, self.cfg.keep_last)
            self.state.wall_seconds += time.perf_counter() - started
        if leaving:
            raise Preempted(f"stopped by a signal after step {step} of {self.total_steps}, checkpoint written")

    def result(self) -> TrainResult:
        peaks = self.dist.gather_objects(peak_memory_gib(self.dist.device))
        cpu = self.dist.gather_objects(time.process_time() - self.cpu_before)
        return TrainResult(
            steps=self.state.step,
            total_steps=self.total_steps,
            tokens=self.state.tokens,
            target_tokens=self.state.target_tokens,
            losses=tuple(self.state.losses),
            wall_seconds=self.state.wall_seconds,
            peak_memory_gib=max(peaks),
            phases=self.state.phases | {"checkpoint": self.state.checkpoint_seconds},
            carrier=self.engine.carrier,
            engine=self.engine.name,
            deviations=deviations(self.cfg),
            resumed_from=tuple(self.state.resumed_from),
            rejected_checkpoints=self.rejected,
            cpu_seconds=None if self.state.resumed_from or self.begin_step else sum(cpu),
        )

    def finish(self, tokenizer: Any, result: TrainResult) -> None:
        """Rank 0 writes model, tokenizer and, last, result.json: what a finished run is known by."""
        problem = None
        if self.dist.is_main:
            try:
                self.model.save_pretrained(self.out_dir / "model")
                if tokenizer is not None:
                    tokenizer.save_pretrained(self.out_dir / "model")
                write_atomic(self.out_dir / "result.json", json.dumps(asdict(result), indent=1))
            except OSError as error:
                problem = f"the trained model could not be written: {error}"
        self.dist.raise_together(problem)


def is_finished(out_dir: Path) -> bool:
    """Whether a result and its weights are there. Without the weights, which a complete run gives up, the result is removed: train anew."""
    result = out_dir / "result.json"
    if result.exists() and not any((out_dir / "model").glob("*.safetensors")):
        log.warning("%s was trained, but its weights were removed since; it is trained again", out_dir)
        result.unlink()
    return result.exists()


def _finished(model: nn.Module, out_dir: Path) -> TrainResult:
    """Puts the weights that training left under `out_dir` into `model`."""
    load_model(model, out_dir / "model" / "model.safetensors", strict=False)
    return read_result(out_dir)
