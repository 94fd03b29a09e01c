"""Balanced steps and the weighted loss inside other people's loops: plain torch, accelerate, the HF Trainer, TRL's SFTTrainer.

In come a data set whose rows are those of a Selection, in its order, and their clusters and weights; out come loaders whose
batches carry `row_weights`, and a mixin for trainers. What those libraries would break is kept: batches stay as allocated
after `prepare`, an epoch has its own order, a resume in epoch 1 goes on with epoch 1's, and the denominator is that of the
whole step over ranks and accumulation.

    class Mine(ClusterTrainerMixin, Trainer): ...        # or SFTTrainer
    trainer = Mine(model=model, args=args, train_dataset=rows, data_collator=collate)
    trainer.balance(clusters, weights, loss_reduction="sample")
    trainer.train()

    loader = accelerator.prepare(DataLoader(WeightedRows(rows, weights), batch_sampler=sampler.interleaved(),
                                            collate_fn=WeightedCollator(collate)))
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from clusterft.allocation import ClusterBatchSampler, ShuffledBatchSampler
from clusterft.loss import check_reduction, weighted_loss
from clusterft.records import IGNORE_INDEX

WEIGHTS_KEY = "row_weights"


class WeightedRows(Dataset):
    """(m) rows with their weights; an empty list of positions (an idle rank) gives one row that WeightedCollator silences."""

    def __init__(self, rows: Any, weights: Sequence[float] | np.ndarray | None = None) -> None:
        self.rows = rows
        self.weights = np.ones(len(rows)) if weights is None else np.asarray(weights, dtype=np.float64)
        if len(self.weights) != len(rows):
            raise ValueError(f"{len(rows)} rows with {len(self.weights)} weights: did the trainer drop or pack rows?")

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, position: int) -> tuple[Any, float]:
        return self.rows[int(position)], float(self.weights[position])

    def __getitems__(self, positions: Sequence[int]) -> list[tuple[Any, float | None]]:
        if not len(positions):
            return [(self.rows[0], None)]
        return [self[p] for p in positions]


class WeightedCollator:
    """Collates rows as `collate` does and adds `row_weights` (n,) float64; rows without a weight lose their labels."""

    def __init__(self, collate: Callable[[list[Any]], dict[str, Tensor]]) -> None:
        self.collate = collate

    def __call__(self, pairs: list[tuple[Any, float | None]]) -> dict[str, Tensor]:
        batch = dict(self.collate([row for row, _ in pairs]))
        silent = torch.tensor([weight is None for _, weight in pairs])
        batch["labels"] = batch["labels"].masked_fill(silent[:, None], IGNORE_INDEX)
        batch[WEIGHTS_KEY] = torch.tensor([0.0 if weight is None else weight for _, weight in pairs], dtype=torch.float64)
        return batch


def batch_denominator(batches: Sequence[dict[str, Tensor]], reduction: str) -> Tensor:
    """() float64: this rank's part of a step's divisor (see loss.step_denominator) from its collated micro-batches."""
    check_reduction(reduction)
    total = torch.zeros((), dtype=torch.float64)
    for batch in batches:
        tokens = (batch["labels"][:, 1:] != IGNORE_INDEX).sum(1)
        total += (batch[WEIGHTS_KEY] * (tokens if reduction == "token" else tokens > 0)).sum().cpu()
    return total


class ClusterTrainerMixin:
    """Put before `transformers.Trainer` or `trl.SFTTrainer` in a class's bases; call `balance` before `train`."""

    _sampler: ClusterBatchSampler | ShuffledBatchSampler | None = None

    def balance(
        self,
        clusters: Sequence[int] | np.ndarray | None,
        weights: Sequence[float] | np.ndarray | None = None,
        *,
        loss_reduction: str = "sample",
    ) -> None:
        """clusters, weights (m,) of the training rows; clusters=None: shuffled steps. Batch sizes and seed are the arguments'
        own.

        Raises ValueError if the rows do not align, or if a step cannot give every rank equally many micro-batches, which the
        Trainer's accumulation needs.
        """
        from transformers import TrainerCallback

        args, rows = self.args, len(self.train_dataset)
        if clusters is not None and len(clusters) != rows:
            raise ValueError(f"{rows} training rows with {len(clusters)} clusters: did the trainer drop or pack rows?")
        layout = {
            "global_batch": args.per_device_train_batch_size * args.world_size * args.gradient_accumulation_steps,
            "micro_batch": args.per_device_train_batch_size,
            "rank": args.process_index,
            "world": args.world_size,
            "seed": args.seed if args.data_seed is None else args.data_seed,
            "idle": "empty",
        }
        sampler = ShuffledBatchSampler(rows, **layout) if clusters is None else ClusterBatchSampler(clusters, **layout)
        epochs = math.ceil(args.num_train_epochs if args.max_steps <= 0 else args.max_steps / sampler.steps_per_epoch)
        uneven = [len(sampler.step_batches(step)) for epoch in range(epochs) for step in sampler.plan(epoch)[:-1]]
        if set(uneven) - {args.gradient_accumulation_steps}:
            raise ValueError(
                f"steps of these {epochs} epochs need {sorted(set(uneven))} micro-batches a rank, gradient_accumulation_steps is "
                f"{args.gradient_accumulation_steps}: clusters of unequal size cannot be one a rank here; use clusterft.trainer"
            )
        self._sampler, self._row_weights, self._reduction = sampler, weights, check_reduction(loss_reduction)
        self.loss_is_scaled_for_ga = True

        class EpochSync(TrainerCallback):
            """Trainer's set_epoch does not reach a batch sampler behind `skip_first_batches`: a resume would replay epoch 0."""

            def on_epoch_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
                sampler.set_epoch(state.global_step // sampler.steps_per_epoch)

        self.add_callback(EpochSync())

    def get_train_dataloader(self) -> DataLoader:
        if self._sampler is None:
            raise ValueError("call balance(clusters, weights) before train()")
        rows = self.train_dataset
        if hasattr(rows, "column_names"):
            rows = self._remove_unused_columns(rows, description="training")
        loader = DataLoader(
            WeightedRows(rows, self._row_weights),
            batch_sampler=self._sampler,
            collate_fn=WeightedCollator(self.data_collator),
            num_workers=self.args.dataloader_num_workers,
            pin_memory=self.args.dataloader_pin_memory,
        )
        prepared = self.accelerator.prepare(loader)
        shard = prepared.batch_sampler
        if getattr(shard, "batch_sampler", None) is self._sampler:
            # The sampler already is this rank's: the wrapper must not deal its batches out a second time.
            shard.num_processes, shard.process_index = 1, 0
        return prepared

    def _get_num_items_in_batch(self, batch_samples: list, device: torch.device) -> Tensor | None:
        if not batch_samples or WEIGHTS_KEY not in batch_samples[0]:
            return super()._get_num_items_in_batch(batch_samples, device)
        part = batch_denominator(batch_samples, self._reduction).to(device)
        return self.accelerator.gather(part).sum()

    def compute_loss(
        self, model: Any, inputs: dict[str, Any], return_outputs: bool = False, num_items_in_batch: Tensor | None = None
    ) -> Any:
        if WEIGHTS_KEY not in inputs:
            return super().compute_loss(model, inputs, return_outputs=return_outputs, num_items_in_batch=num_items_in_batch)
        inputs = dict(inputs)
        weights, labels = inputs.pop(WEIGHTS_KEY), inputs.pop("labels")
        outputs = model(**inputs, use_cache=False)
        scale = float(self.accelerator.num_processes)  # DDP averages over ranks
        loss = weighted_loss(outputs, labels, weights, reduction=self._reduction, denominator=num_items_in_batch, scale=scale)
        return (loss, outputs) if return_outputs else loss
