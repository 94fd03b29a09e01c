"""Random choice: the floor that every method has to beat.

In comes a pool and a generator; out come `budget` rows, uniformly and without replacement. They are the first rows of one
permutation of the ids, so for one seed a smaller budget lies within a larger one: comparing ratios then has less noise.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from clusterft.interfaces import Feature, FeatureSpec
from clusterft.ranking import ranked_selection
from clusterft.records import Pool, Selection


class RandomSelector:
    """Uniform without replacement."""

    name = "random"

    def feature_specs(self) -> list[FeatureSpec]:
        return []

    def choose(self, pool: Pool, features: Mapping[str, Feature], budget: int, rng: np.random.Generator) -> Selection:
        """The score of a row is minus its place in the permutation. Drawn over sorted ids, never over positions."""
        place = dict(zip(sorted(pool.ids), rng.permutation(len(pool)).tolist(), strict=True))
        return ranked_selection(self.name, pool, np.array([-place[one] for one in pool.ids], dtype=np.float64), budget)
