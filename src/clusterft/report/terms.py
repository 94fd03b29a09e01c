"""Words that set a cluster apart from the others.

In: texts and the cluster of each. Out: a few terms a cluster. A word counts once a row, so that a long row does not outvote many; the
score is the log-odds ratio of the cluster against the rest with the pool's own frequencies as prior, in standard errors (Monroe,
Colaresi and Quinn, "Fightin' Words", 2008). Unlike tf-idf by cluster it needs no list of stop words, hence no language: a word that
is common everywhere scores about zero.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence

import numpy as np

_WORD = re.compile(r"[^\W\d_][\w'-]{2,24}")
TEXT_CHARS = 2000
"""Characters read of each row."""
PRIOR_ROWS = 10.0
"""Weight of the prior, in rows."""
LEAST_Z = 2.0
"""Standard errors that a term must lie above the other clusters."""


def distinctive_terms(texts: Sequence[str], clusters: np.ndarray, k: int, top: int = 8) -> list[tuple[str, ...]]:
    """For each of k clusters up to `top` terms, the most distinctive first; ties by alphabet. clusters (n,) int.

    A cluster whose words are no different has none, and so has the only cluster.
    """
    counts = [Counter() for _ in range(k)]
    rows = np.bincount(clusters, minlength=k)
    for text, cluster in zip(texts, clusters.tolist(), strict=True):
        counts[cluster].update(set(_WORD.findall(text[:TEXT_CHARS].lower())))
    total = sum(counts, Counter())
    words = sorted(word for word, count in total.items() if count > 1)
    if k < 2 or not words:
        return [()] * k
    seen = np.array([[c[w] for w in words] for c in counts], dtype=np.float64)
    scores = log_odds_z(seen, rows.astype(np.float64))
    return [tuple(words[i] for i in np.lexsort((np.arange(len(words)), -z))[:top] if z[i] >= LEAST_Z) for z in scores]


def log_odds_z(seen: np.ndarray, rows: np.ndarray) -> np.ndarray:
    """(k, v) standard errors by which a word's odds in a cluster exceed its odds in all other clusters.

    seen (k, v) rows of the cluster with the word; rows (k,) rows of the cluster.
    """
    prior = PRIOR_ROWS * seen.sum(0) / rows.sum()
    other, other_rows = seen.sum(0) - seen, (rows.sum() - rows)[:, None]
    here = (seen + prior) / (rows[:, None] - seen + PRIOR_ROWS - prior + 0.5)
    there = (other + prior) / (other_rows - other + PRIOR_ROWS - prior + 0.5)
    return np.log(here / there) / np.sqrt(1 / (seen + prior) + 1 / (other + prior))
