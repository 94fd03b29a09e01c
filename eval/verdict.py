"""The verdict: no worse, worse, or cannot tell, at a margin that was stated beforehand.

    interval of (candidate minus reference) + margin ► judge ► Verdict

The rule is non-inferiority with a two-sided 95 % interval: "no worse" if its lower end lies above -margin, "worse" if its
upper end lies below -margin, "cannot tell" otherwise. Apart from that an interval wholly on one side of zero is marked: a small
loss may be within the margin and real at once. Everything is in points (100 times a fraction), signed so that higher is better:
for losses the caller turns the sign. Without an interval there is no verdict.
"""

from __future__ import annotations

from dataclasses import dataclass

from eval.power import problems_to_settle, seeds_to_settle
from eval.statistics import Difference, Summary

NO_WORSE = "no worse"
WORSE = "worse"
CANNOT_TELL = "cannot tell"
NO_VERDICT = "no verdict"


@dataclass(frozen=True)
class Verdict:
    """kind is one of the four words above.

    measurably_lower, measurably_better
            the interval lies wholly below or above zero, where higher is better: lower is worse, for a loss too
    needed  how many seeds or problems (`needed_of`) would settle a "cannot tell" with 80 % power; None where nothing says so
    reason  why there is no verdict
    """

    kind: str
    margin: float
    measurably_lower: bool = False
    reason: str = ""
    needed: int | None = None
    needed_of: str = ""
    measurably_better: bool = False

    def label(self, reference: str) -> str:
        """The short form: "no worse than full (margin 1.0)", "worse than full", "cannot tell", "no verdict (n < 3)"."""
        if self.kind == NO_WORSE:
            return f"no worse than {reference} (margin {self.margin})"
        if self.kind == WORSE:
            return f"worse than {reference}"
        return f"{NO_VERDICT} ({self.reason})" if self.kind == NO_VERDICT else CANNOT_TELL

    def text(self, reference: str, lower: str = "lower") -> str:
        """The label, whether the difference is measurable, and what would settle it. lower: "worse" where the unit may be a loss."""
        text = self.label(reference)
        if self.measurably_lower:
            text += f": within the margin, but measurably {lower}" if self.kind == NO_WORSE else f", measurably {lower}"
        if self.kind == CANNOT_TELL and self.needed is not None:
            text += f"; about {self.needed:,} {self.needed_of} would settle it if the difference stays as seen"
        elif self.kind == CANNOT_TELL and self.needed_of:
            text += f"; no feasible number of {self.needed_of} would settle a difference this close to the margin"
        return text


def judge(low: float | None, high: float | None, margin: float, reason: str = "") -> Verdict:
    """The verdict on an interval. low, high, margin in one unit, higher is better; `reason` says why an interval is missing.

    Raises ValueError if the margin is not above 0 or the ends are in the wrong order.
    """
    if not margin > 0:
        raise ValueError(f"margin {margin!r} must be above 0: it is the largest loss that you would accept")
    if low is None or high is None:
        return Verdict(NO_VERDICT, margin, reason=reason or "no interval")
    if not low <= high:
        raise ValueError(f"[{low}, {high}] is not an interval")
    kind = NO_WORSE if low > -margin else WORSE if high < -margin else CANNOT_TELL
    return Verdict(kind, margin, measurably_lower=high < 0, measurably_better=low > 0)


def judge_seeds(paired: Summary | None, margin: float) -> Verdict:
    """The verdict on differences paired by seed, with the number of seeds that would settle it."""
    if paired is None:
        return Verdict(NO_VERDICT, judge(None, None, margin).margin, reason="no seed in common")
    verdict = judge(paired.low, paired.high, margin, paired.reason)
    if verdict.kind != CANNOT_TELL:
        return verdict
    needed = seeds_to_settle(paired.mean, paired.sd, margin, confidence=paired.confidence)
    return _open(verdict, needed, paired.n, "seeds")


def judge_problems(difference: Difference, margin: float) -> Verdict:
    """The verdict on a bootstrap over problems; `difference` and `margin` in one unit."""
    verdict = judge(difference.low, difference.high, margin)
    if verdict.kind != CANNOT_TELL:
        return verdict
    return _open(verdict, problems_to_settle(difference, margin), difference.n, "problems")


def _open(verdict: Verdict, needed: int | None, have: int, unit: str) -> Verdict:
    """An open verdict never asks for fewer than one more than there are: at 80 % power one may simply have been unlucky."""
    needed = None if needed is None else max(needed, have + 1)
    return Verdict(verdict.kind, verdict.margin, verdict.measurably_lower, needed=needed, needed_of=unit)
