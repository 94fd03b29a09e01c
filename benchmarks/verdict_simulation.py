"""Does the verdict keep its promises? Simulated benchmarks with a known truth, scored by `eval.statistics` and `eval.verdict`.

    python benchmarks/verdict_simulation.py [--draws 2000] [--json]

coverage     how often the 95 % interval holds the true difference: 93 to 97 % in 2,000 draws
false        how often "no worse" is said when the true loss is exactly the margin: at most 5 %
Three worlds: scores over seeds drawn from a normal distribution; scores that are counts of solved problems (coarse steps, as in
HumanEval); and two single runs compared problem by problem. Where fewer than some 20 problems are discordant the interval over
problems is wider than it need be (it must not be blind when no problem differs), so only its error rate is held to a bound there.
Exits with 1 if a bound is broken.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict, dataclass

import numpy as np

from clusterft.seeding import generator
from eval.statistics import paired_bootstrap, paired_by_seed
from eval.verdict import NO_WORSE, judge

MARGIN = 1.0  # points
STATED_DRAWS = 2000
SEEDS = (3, 5, 10)
SPREADS = (0.3, 1.0, 3.0)  # sd of a paired difference, points
COUNTS = ((164, 0.43), (378, 0.50), (1273, 0.41))  # problems, accuracy
PROBLEMS = ((50, 0.10), (164, 0.01), (164, 0.12), (250, 0.01), (300, 0.02), (378, 0.10), (500, 0.01), (1089, 0.02), (1273, 0.15))


@dataclass(frozen=True)
class Row:
    """One simulated world. `bounded` says whether the coverage has to lie within 93 to 97 %."""

    world: str
    coverage: float
    false_no_worse: float
    bounded: bool
    draws: int = STATED_DRAWS

    @property
    def kept(self) -> bool:
        """Whether the bounds hold. Fewer draws than STATED_DRAWS are noisier: there they are widened to three standard errors."""
        noise = 3 * (0.95 * 0.05 / self.draws) ** 0.5 if self.draws < STATED_DRAWS else 0.0
        return self.false_no_worse <= 0.05 + noise and (not self.bounded or abs(self.coverage - 0.95) <= max(0.02, noise) + 1e-12)


def _tally(world: str, intervals: list[tuple[float | None, float | None]], bounded: bool, draws: int) -> Row:
    covered = sum(low is not None and high is not None and low <= -MARGIN <= high for low, high in intervals)
    false = sum(judge(low, high, MARGIN).kind == NO_WORSE for low, high in intervals)
    given = sum(low is not None for low, _ in intervals)
    return Row(world, covered / max(given, 1), false / draws, bounded, draws)


def _seed_interval(candidate: np.ndarray, reference: np.ndarray) -> tuple[float | None, float | None]:
    summary = paired_by_seed(dict(enumerate(candidate)), dict(enumerate(reference)))
    assert summary is not None
    return summary.low, summary.high


def normal_seeds(seeds: int, sd: float, draws: int, rng: np.random.Generator) -> Row:
    """The candidate is `MARGIN` points worse; paired differences are normal with deviation `sd`."""
    reference = rng.normal(50, 2, size=(draws, seeds))
    candidate = reference - MARGIN + rng.normal(0, sd, size=(draws, seeds))
    found = [_seed_interval(c, r) for c, r in zip(candidate, reference, strict=True)]
    return _tally(f"normal, {seeds} seeds, sd {sd}", found, True, draws)


def count_seeds(seeds: int, problems: int, accuracy: float, draws: int, rng: np.random.Generator) -> Row:
    """Every run solves a binomial number of `problems`: steps of 100 / problems points, equal differences now and then."""
    reference = rng.binomial(problems, accuracy, size=(draws, seeds)) / problems * 100
    candidate = rng.binomial(problems, accuracy - MARGIN / 100, size=(draws, seeds)) / problems * 100
    found = [_seed_interval(c, r) for c, r in zip(candidate, reference, strict=True)]
    return _tally(f"counts of {problems}, {seeds} seeds", found, True, draws)


def paired_problems(problems: int, discordant: float, draws: int, rng: np.random.Generator, resamples: int = 2000) -> Row:
    """Two runs: a share `discordant` of the problems differs, and the candidate loses MARGIN points in truth."""
    lost, gained = (discordant + MARGIN / 100) / 2, (discordant - MARGIN / 100) / 2
    found: list[tuple[float | None, float | None]] = []
    for outcome in rng.choice([-1, 1, 0], p=[lost, gained, 1 - lost - gained], size=(draws, problems)):
        difference = paired_bootstrap(outcome == 1, outcome == -1, rng, resamples=resamples)
        found.append((difference.low * 100, difference.high * 100))
    return _tally(f"{problems} problems, {discordant:.0%} discordant", found, problems * discordant >= 20, draws)


def simulate(draws: int, seed: int = 0) -> list[Row]:
    """All worlds, each with its own stream of random numbers."""
    rows = [normal_seeds(n, sd, draws, generator(seed, "normal", n, str(sd))) for n in SEEDS for sd in SPREADS]
    rows += [count_seeds(n, t, p, draws, generator(seed, "counts", n, t)) for n in SEEDS for t, p in COUNTS]
    rows += [paired_problems(t, d, draws, generator(seed, "problems", t, str(d))) for t, d in PROBLEMS]
    return rows


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Simulate the verdict's error rates.")
    parser.add_argument("--draws", type=int, default=STATED_DRAWS)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args(argv)
    rows = simulate(args.draws, args.seed)
    if args.json:
        print(json.dumps([{**asdict(r), "kept": r.kept} for r in rows], indent=1))
    else:
        print(f"{args.draws} draws a world, true loss = margin = {MARGIN} point\n{'world':38} coverage  false 'no worse'")
        for r in rows:
            print(f"{r.world:38} {r.coverage:8.2%}  {r.false_no_worse:8.2%}{'' if r.kept else '   BROKEN'}")
    return 0 if all(r.kept for r in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
