"""Full data as a selector: every row, weight 1. The trainer therefore has no special case for it."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from clusterft.budget import require_rows
from clusterft.interfaces import Feature, FeatureSpec
from clusterft.ranking import ranked_selection
from clusterft.records import Pool, Selection


class FullSelector:
    """Keeps everything."""

    name = "full"

    def feature_specs(self) -> list[FeatureSpec]:
        return []

    def choose(self, pool: Pool, features: Mapping[str, Feature], budget: int, rng: np.random.Generator) -> Selection:
        """Raises ValueError, with both numbers, if the budget is not the whole pool: that would be another method."""
        require_rows(self.name, budget, len(pool))
        if budget != len(pool):
            raise ValueError(
                f"full: a budget of {budget} rows, but full data means all {len(pool)}; use selector=random for fewer"
            )
        return ranked_selection(self.name, pool, np.ones(len(pool)), budget)
