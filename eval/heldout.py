"""Held-out response loss: what the model thinks of answers it was not trained on, in nats a token.

In go encoded held-out rows with the family of each (module group, source, ...); out come two metrics and one line a row on disk:

    heldout/nll_micro   sum of the loss over all response tokens / number of response tokens: long families weigh more
    heldout/nll_macro   the same within each family, then the plain mean over families: each family weighs the same

It is a loss, not a skill: shown beside pass@1 because a small model solves too few problems to tell two selections apart.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from clusterft.interfaces import EvalContext
from clusterft.progress import PassProgress
from clusterft.records import IGNORE_INDEX, Encoded, Metric
from eval import loading
from eval.errors import EvaluationError


@dataclass(frozen=True)
class RowLoss:
    """Loss of one held-out row: `nats` summed over its `n_tokens` response tokens."""

    id: str
    family: str
    nats: float
    n_tokens: int


class HeldoutLoss:
    """Held-out response loss, macro over families and micro.

    precision     training (as the context says: float32, bf16 autocast over float32 weights, or bf16) | float32
    token_budget  tokens a batch, padding counted; changes the speed only

    evaluate raises EvaluationError without held-out rows, or when a loss is not finite.
    """

    def __init__(self, *, context: EvalContext, precision: str = "training", token_budget: int = 2048) -> None:
        if precision not in ("training", "float32"):
            raise EvaluationError(f"heldout: precision {precision!r} is neither training nor float32")
        self.context, self.token_budget = context, token_budget
        self.precision = context.precision if precision == "training" else precision

    def evaluate(self, checkpoint_dir: Path, out_dir: Path) -> list[Metric]:
        """Writes per_row.jsonl under `out_dir`: {"id", "family", "value" nats a token, "nats", "n_tokens"}."""
        rows, groups = self.context.heldout, self.context.heldout_groups
        if not rows:
            raise EvaluationError(
                "heldout: there are no held-out rows; set data.holdout_rows above 0 or leave this evaluator out"
            )
        if len(groups) != len(rows):
            raise EvaluationError(f"heldout: {len(rows)} rows but {len(groups)} families")
        with loading.threads(self.context.threads):
            dtype = torch.bfloat16 if self.precision == "bf16" else torch.float32
            model, _ = loading.load(checkpoint_dir, self.context, dtype)
            nats = row_losses(
                model, rows, self.token_budget, autocast=self.precision == "bf16_autocast", progress=self.context.progress
            )
        losses = [
            RowLoss(row.id, group, value, row.n_target)
            for row, group, value in zip(rows, groups, nats.tolist(), strict=True)
            if row.n_target
        ]
        _write(out_dir, losses)
        return summarise(losses, rows_hash(rows), f"response tokens only, {self.precision}")


@torch.inference_mode()
def row_losses(model: Any, rows: Sequence[Encoded], token_budget: int, *, autocast: bool, progress: bool = False) -> np.ndarray:
    """(n,) float64: summed negative log-likelihood of each row's response tokens, in the order of `rows`.

    Rows of like length share a batch, padded on the right; causal attention never sees that padding.
    """
    device = next(model.parameters()).device
    result = np.zeros(len(rows))
    cast_once = torch.autocast(device.type, torch.bfloat16, enabled=autocast)  # around all batches: it keeps the cast weights
    with cast_once, PassProgress("held-out loss", len(rows), sum(map(len, rows)), shown=progress) as bar:
        for batch in batches_by_length([len(r) for r in rows], token_budget):
            ids, labels = _right_padded([rows[i] for i in batch])
            result[batch] = _batch_losses(model, ids.to(device), labels.to(device))
            bar.advance(len(batch), sum(len(rows[i]) for i in batch))
    if not np.isfinite(result).all():
        bad = rows[int(np.flatnonzero(~np.isfinite(result))[0])].id
        raise EvaluationError(f"heldout: the loss of row {bad} is not finite; the model has diverged")
    return result


def _batch_losses(model: Any, ids: torch.Tensor, labels: torch.Tensor) -> np.ndarray:
    """ids, labels (b, t) -> (b,) sums. Logits are made only where some row has a target: the vocabulary is the large axis."""
    targets = labels[:, 1:]
    places = (targets != IGNORE_INDEX).any(0).nonzero()[:, 0]
    if not len(places):
        return np.zeros(len(ids))
    logits = model(input_ids=ids, use_cache=False, logits_to_keep=places).logits
    wanted = targets[:, places]
    loss = F.cross_entropy(logits.float().flatten(0, 1), wanted.flatten().long(), ignore_index=IGNORE_INDEX, reduction="none")
    return loss.view(wanted.shape).double().sum(1).cpu().numpy()


def batches_by_length(lengths: Sequence[int], token_budget: int) -> list[list[int]]:
    """Row numbers in batches, longest first; rows x longest stays within the budget, or the batch is one row."""
    order = sorted(range(len(lengths)), key=lambda i: (-lengths[i], i))
    batches: list[list[int]] = []
    for i in order:
        if batches and (len(batches[-1]) + 1) * lengths[batches[-1][0]] <= token_budget:
            batches[-1].append(i)
        else:
            batches.append([i])
    return batches


def _right_padded(rows: Sequence[Encoded]) -> tuple[torch.Tensor, torch.Tensor]:
    width = max(len(r) for r in rows)
    ids = torch.zeros((len(rows), width), dtype=torch.long)
    labels = torch.full((len(rows), width), IGNORE_INDEX, dtype=torch.long)
    for i, row in enumerate(rows):
        ids[i, : len(row)] = torch.from_numpy(np.asarray(row.input_ids, np.int64))
        labels[i, : len(row)] = torch.from_numpy(np.asarray(row.labels, np.int64))
    return ids, labels


def summarise(losses: Sequence[RowLoss], dataset_hash: str, note: str) -> list[Metric]:
    """Micro and macro loss with standard errors; macro where there are several families.

    Micro: sum l / sum t over rows, a ratio; its standard error by linearisation, rows being the sample:
    sqrt(n / (n - 1) sum (l_i - L t_i)^2) / sum t. Macro: mean over F families; its standard error is that of the mean of F family
    values, families being the sample. The micro error is None for one row; one family has no macro loss of its own.
    """
    if not losses:
        raise EvaluationError("heldout: no held-out row has a response token within the maximum length")
    nats, tokens = np.array([r.nats for r in losses]), np.array([r.n_tokens for r in losses], float)
    micro, n = float(nats.sum() / tokens.sum()), len(losses)
    error = math.sqrt(n / (n - 1) * float(((nats - micro * tokens) ** 2).sum())) / float(tokens.sum()) if n > 1 else None
    families = np.array([r.family for r in losses])
    values = np.array([nats[families == f].sum() / tokens[families == f].sum() for f in np.unique(families)])
    rows_note = f"{note}; {int(tokens.sum())} tokens; error over rows"
    found = [Metric("heldout", "nll_micro", micro, n, error, "nats", dataset_hash, rows_note)]
    if len(values) > 1:  # with one family it would be the micro loss under another name
        spread = float(values.std(ddof=1)) / math.sqrt(len(values))
        families_note = f"{note}; {len(values)} families; error over families"
        found.append(Metric("heldout", "nll_macro", float(values.mean()), n, spread, "nats", dataset_hash, families_note))
    return found


def rows_hash(rows: Sequence[Encoded]) -> str:
    """16 hex digits of every row's id, tokens and labels, in no order: the same text under another template is another data
    set.
    """
    parts = []
    for row in rows:
        content = np.asarray(row.input_ids, "<i4").tobytes() + b"\0" + np.asarray(row.labels, "<i4").tobytes()
        parts.append(hashlib.sha256(row.id.encode() + b"\0" + content).digest())
    return hashlib.sha256(b"".join(sorted(parts))).hexdigest()[:16]


def _write(out_dir: Path, losses: Sequence[RowLoss]) -> None:
    out_dir.mkdir(parents=True, exist_ok=True)
    part = out_dir / "per_row.jsonl.part"
    with open(part, "w", encoding="utf-8") as f:
        for r in losses:
            row = {"id": r.id, "family": r.family, "value": r.nats / r.n_tokens, "nats": r.nats, "n_tokens": r.n_tokens}
            f.write(json.dumps(row) + "\n")
    part.replace(out_dir / "per_row.jsonl")
