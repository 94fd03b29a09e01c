"""IFD, instruction-following difficulty (Li et al. 2024, "Cherry LLM"; the perplexity form: Li et al. 2024, "Superfiltering").

In come two losses a row (see `clusterft.ifd_losses`); out come the rows whose answer the instruction helps least.

    s(A | Q)  mean loss of the answer's tokens after the instruction
    s(A)      mean loss of the same tokens without it
    IFD       s(A | Q) / s(A)            form: loss (Cherry)
              exp(s(A | Q) - s(A))       form: ppl  (Superfiltering)

IFD of 1 or more means that the instruction does not help at all: such rows are set aside. Of the others the highest are kept.
Both forms have the same border and another order.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from clusterft.budget import require_rows
from clusterft.feature_columns import IFD_COLUMNS, IFD_REASONS
from clusterft.interfaces import Feature, FeatureSpec
from clusterft.ranking import best_first, ranked_selection, set_aside_nonfinite
from clusterft.records import Pool, Selection

FORMS = ("loss", "ppl")
SHORTFALLS = ("error", "take_unhelped")
UNHELPED = "ifd_ge_1"


def ifd(conditional: np.ndarray, direct: np.ndarray, form: str) -> np.ndarray:
    """(n,) IFD from the two mean losses (n,) in nats a token, float64."""
    conditional, direct = conditional.astype(np.float64), direct.astype(np.float64)
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        return conditional / direct if form == "loss" else np.exp(conditional - direct)


class IfdSelector:
    """Keeps the rows of highest IFD below 1.

    form            loss | ppl
    precision       float32 | bfloat16, of the scoring passes
    score_eos       whether the EOS after an answer counts; the released code has none
    pre_experience  None, or settings of the short training before scoring (`clusterft.pre_experience.PreExperience`)
    shortfall       error | take_unhelped: what to do when fewer rows lie below 1 than the budget asks for. take_unhelped goes on
                    along the same ranking, from the smallest IFD at or above 1 upwards, and says so in `info`

    Raises ValueError for an unknown option, with the known ones.
    """

    name = "ifd"

    def __init__(
        self, *, form: str, precision: str, score_eos: bool, pre_experience: Mapping[str, Any] | None, shortfall: str
    ) -> None:
        for label, value, known in (("form", form, FORMS), ("shortfall", shortfall, SHORTFALLS)):
            if value not in known:
                raise ValueError(f"{label} {value!r} is unknown; known are {', '.join(known)}")
        self.form, self.shortfall = form, shortfall
        self.params = {
            "precision": precision,
            "score_eos": score_eos,
            "pre_experience": None if pre_experience is None else dict(pre_experience),
        }

    def feature_specs(self) -> list[FeatureSpec]:
        return [FeatureSpec("ifd_losses", "clusterft.ifd_losses:extract_ifd_losses", self.params)]

    def choose(self, pool: Pool, features: Mapping[str, Feature], budget: int, rng: np.random.Generator) -> Selection:
        """The score of a row is its IFD; that of a row at or above 1 which the budget forces in is minus its IFD."""
        require_rows(self.name, budget, len(pool))
        table = dict(zip(IFD_COLUMNS, np.asarray(features["ifd_losses"].rows).T, strict=True))
        values = ifd(table["conditional_loss"], table["direct_loss"], self.form)
        reasons = {one: IFD_REASONS[int(r)] for one, r in zip(pool.ids, table["reason"], strict=True) if r}
        reasons = set_aside_nonfinite(pool.ids, values, reasons)
        scores = np.where(values < 1, values, -values)
        unhelped = best_first(pool.ids, scores, {**reasons, **{o: "" for o, v in zip(pool.ids, values, strict=True) if v < 1}})
        below = len(pool) - len(reasons) - len(unhelped)
        forced = max(0, budget - below) if self.shortfall == "take_unhelped" else 0
        reasons |= dict.fromkeys(unhelped[forced:], UNHELPED)
        chosen = ranked_selection(self.name, pool, scores, budget, reasons=reasons)
        return replace(
            chosen, info={**chosen.info, **self.describe(pool, chosen, table["answer_tokens"], values, len(unhelped[:forced]))}
        )

    def describe(self, pool: Pool, chosen: Selection, tokens: np.ndarray, values: np.ndarray, forced: int) -> dict[str, Any]:
        """What a report shows: answer lengths of what was chosen beside the pool's (IFD should favour long answers), and its
        IFD."""
        rows = np.isin(np.array(pool.ids), chosen.ids)
        return {
            "form": self.form,
            "mean_answer_tokens_selected": float(tokens[rows].mean()),
            "mean_answer_tokens_pool": float(tokens.mean()),
            "mean_ifd_selected": float(values[rows].mean()),
            "taken_at_or_above_1": forced,
        }
