"""LESS (Xia et al. 2024): rows whose gradient points where the gradients of the target tasks point.

In come projected gradients (see `clusterft.lora_gradients`) of pool and validation rows; out come the rows of largest influence.

    at every checkpoint t of the warm-up    cos(feature of row i, gradient of validation row j)
    S_ij     sum over t of w_t cos_t        w_t: mean learning rate of the epoch, normalised to sum 1
    score_i  max over subtasks of the mean of S_ij over the subtask's rows

A subtask is a label of validation rows: their order does not matter and their numbers may differ (the released code wants equal
counts in one run).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from clusterft.budget import require_rows
from clusterft.feature_columns import LESS_REASONS, PROJECTION_VERSION
from clusterft.interfaces import Feature, FeatureSpec
from clusterft.ranking import ranked_selection
from clusterft.records import Pool, Selection

BLOCK_ROWS = 4096


def checkpoint_weights(rates: np.ndarray) -> np.ndarray:
    """(t,) weights that sum to 1 from mean learning rates (t,). Raises ValueError if none is positive or one is negative."""
    rates = np.asarray(rates, np.float64)
    if (rates < 0).any() or not rates.sum() > 0:
        raise ValueError(f"learning rates of the checkpoints are {rates.tolist()}; they must not be negative, nor all zero")
    return rates / rates.sum()


def influence(train: np.ndarray, validation: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """(n, v) float64 weighted sums of dot products: train (n, t d) and validation (v, t d) unit vectors, weights (t,).

    Raises ValueError if the widths differ or are not divisible by t.
    """
    if train.shape[1] != validation.shape[1] or train.shape[1] % len(weights):
        raise ValueError(f"features of {train.shape[1]} and {validation.shape[1]} columns for {len(weights)} checkpoints")
    scaled = validation.astype(np.float64) * np.repeat(weights, train.shape[1] // len(weights))
    out = np.empty((len(train), len(validation)))
    for start in range(0, len(train), BLOCK_ROWS):
        out[start : start + BLOCK_ROWS] = train[start : start + BLOCK_ROWS].astype(np.float64) @ scaled.T
    return out


def best_subtask(scores: np.ndarray, subtask: np.ndarray) -> np.ndarray:
    """(n,) max over subtasks of the mean over a subtask's columns: scores (n, v), subtask (v,) labels in any order."""
    labels = np.unique(subtask)
    return np.stack([scores[:, subtask == label].mean(axis=1) for label in labels], axis=1).max(axis=1)


class LessSelector:
    """Ranks rows by influence on the validation subtasks.

    gradients  parameters of the features (`clusterft.lora_gradients.LessParams`)
    """

    name = "less"

    def __init__(self, *, gradients: Mapping[str, Any]) -> None:
        self.gradients = {**gradients, "uses_validation": True}

    def feature_specs(self) -> list[FeatureSpec]:
        extractor = "clusterft.lora_gradients:extract_lora_gradients"
        return [FeatureSpec("lora_gradients", extractor, self.gradients, version=PROJECTION_VERSION)]

    def choose(self, pool: Pool, features: Mapping[str, Feature], budget: int, rng: np.random.Generator) -> Selection:
        """The score of a row is its influence. Raises ValueError if the features are not of this pool's size."""
        require_rows(self.name, budget, len(pool))
        feature = features["lora_gradients"]
        if len(feature.rows) != len(pool):
            raise ValueError(f"less: {len(feature.rows)} feature rows for a pool of {len(pool)}; compute the feature again")
        order = np.argsort(np.array(pool.ids))  # the product is then the same to the last bit for a permuted pool
        rows, extra = feature.rows, feature.extra
        weights = checkpoint_weights(extra["rates"])
        scores = np.empty(len(pool))
        for start in range(0, len(pool), BLOCK_ROWS):
            part = order[start : start + BLOCK_ROWS]
            scores[part] = best_subtask(influence(np.asarray(rows[part, :-1]), extra["validation"], weights), extra["subtask"])
        reasons = {one: LESS_REASONS[int(r)] for one, r in zip(pool.ids, rows[:, -1], strict=True) if r}
        info = {
            "checkpoint_weights": weights.tolist(),
            "subtasks": {str(n): int((extra["subtask"] == i).sum()) for i, n in enumerate(extra["subtask_names"])},
            "projection": str(extra["projection"]),
        }
        return ranked_selection(self.name, pool, scores, budget, reasons=reasons, info=info)
