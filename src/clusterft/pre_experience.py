"""Cherry's first step (Li et al. 2024, section 2.1): a little varied training before the model is asked what it finds hard.

In come the pool's encoded rows and a model; out comes a copy of the model, trained for an epoch on at most `clusters` x
`per_cluster` rows.

    instruction ► mean of its last hidden states, and its perplexity
    k-means on the means ► in each cluster the rows of middling perplexity ► every (len // per_cluster)-th of them
    one epoch on those

Needs whole replicas with AdamW moments: meant for models that fit a device so. The released recipe for Llama-2 leaves this step
out.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from clusterft.batching import TokenRow, plan_batches, row_of_labels
from clusterft.feature_context import FeatureContext
from clusterft.feature_writer import RowWriter
from clusterft.records import IGNORE_INDEX, Encoded
from clusterft.row_losses import LossPass
from clusterft.warmup import Recipe, train_rows


@dataclass(frozen=True)
class PreExperience:
    """Settings, with the released script's values: 100 clusters, 10 rows of each, perplexity within the 25th ... 75th percentile,
    one epoch at 2e-5, cosine, warm-up 0.03. `precision` is that of both (`proxy_pass.PRECISIONS`)."""

    clusters: int
    per_cluster: int
    low_percentile: float
    high_percentile: float
    epochs: int
    batch_rows: int
    learning_rate: float
    schedule: str
    warmup_ratio: float
    precision: str
    seed: int


def instruction_row(encoded: Encoded) -> TokenRow:
    """The tokens before the first answer, all of them predicted except the first."""
    targets = np.flatnonzero(encoded.labels != IGNORE_INDEX)
    stop = int(targets[0]) if len(targets) else len(encoded)
    return row_of_labels(encoded.input_ids[:stop], encoded.input_ids[:stop])


class InstructionPass(LossPass):
    """Mean last hidden state and mean loss of each instruction."""

    @torch.inference_mode()
    def rows(self, batch: Sequence[TokenRow]) -> np.ndarray:
        """(b, h + 1) float32: mean of the states that predict an instruction token, then the mean loss."""
        hidden = self._hidden_at_places(batch)
        counts = [len(r.targets) for r in batch]
        targets = torch.as_tensor(np.concatenate([r.targets for r in batch]), device=self.device)
        losses = [self._nll(h, y).mean() for h, y in zip(hidden.split(counts), targets.split(counts), strict=True)]
        means = torch.stack([h.float().mean(0) for h in hidden.split(counts)])
        return torch.cat([means, torch.stack(losses)[:, None]], 1).cpu().numpy()


def varied_rows(ids: Sequence[str], means: np.ndarray, losses: np.ndarray, settings: PreExperience) -> list[int]:
    """Numbers of the rows to train on: means (n, h), losses (n,) of the instructions. The same whatever the order of the rows.

    A cluster of fewer than `per_cluster` rows is taken whole, as in the released code.
    """
    from sklearn.cluster import KMeans

    order = sorted(range(len(ids)), key=ids.__getitem__)
    clusters = min(settings.clusters, len(np.unique(means, axis=0)))
    labels = KMeans(clusters, random_state=0, n_init=1).fit_predict(means[order])
    chosen: list[int] = []
    for cluster in range(clusters):
        members = [order[i] for i in np.flatnonzero(labels == cluster)]
        if len(members) < settings.per_cluster:
            chosen += members
            continue
        low, high = np.percentile(losses[members], [settings.low_percentile, settings.high_percentile])
        middling = [i for i in members if low <= losses[i] <= high]
        chosen += middling[:: max(1, len(middling) // settings.per_cluster)][: settings.per_cluster]
    return sorted(chosen, key=ids.__getitem__)


def experienced_model(context: FeatureContext, settings: PreExperience, writer: RowWriter) -> Any:
    """A trained copy of the context's model; the context's own is not touched. All ranks call it alike."""
    model = context.load_model()
    rows = [instruction_row(e) for e in context.encoded]
    usable = [i for i, (r, e) in enumerate(zip(rows, context.encoded, strict=True)) if len(r) and e.n_target]
    lengths = [len(rows[i]) for i in usable]
    ready = InstructionPass.of(model, settings.precision)
    states = np.empty((len(usable), ready.head.weight.shape[1] + 1), np.float32)
    for batch in plan_batches(lengths, [context.pool.ids[i] for i in usable], context.token_budget):
        states[batch] = ready.rows([rows[usable[i]] for i in batch])
    ready.restore()
    ids = [context.pool.ids[i] for i in usable]
    chosen = [context.encoded[usable[i]] for i in varied_rows(ids, states[:, :-1], states[:, -1], settings)]
    recipe = Recipe(
        epochs=settings.epochs,
        batch_rows=settings.batch_rows,
        learning_rate=settings.learning_rate,
        schedule=settings.schedule,
        warmup_ratio=settings.warmup_ratio,
        weight_decay=0.0,
        precision=settings.precision,
        seed=settings.seed,
    )
    trained = copy.deepcopy(model)
    train_rows(trained, chosen, recipe, dist=context.dist, token_budget=context.token_budget)
    if context.dist.rank == 0:
        writer.note(pre_experience_rows=len(chosen))
        writer.add_cost(forward_passes=len(usable) + settings.epochs * len(chosen), backward_passes=settings.epochs * len(chosen))
    return trained
