"""The lines and remarks of the experiment `variance`: schemes by population and batch size.

Two made-up populations are simulated each time that the table is made (a second); true gradients come from the artifact of a run.
Everything random is seeded; simulated numbers are kept to six digits, so that the files are the same on every machine.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

import numpy as np

from clusterft.seeding import generator
from experiments.table import Line, Value
from experiments.theory import SCHEMES, equal_allocation_excess, measure

DRAWS = 1000
BATCHES = [8, 16, 32, 64]
MADE_UP: dict[str, tuple[tuple[int, ...], tuple[float, ...], float]] = {
    "equal clusters": ((75, 75, 75, 75), (1.0, 1.0, 1.0, 1.0), 1.0),
    "unequal clusters": ((180, 60, 40, 20), (1.5, 1.0, 0.7, 0.5), 0.5),
}
"""Name -> (cluster sizes, deviation within each cluster, deviation of the cluster means), in three dimensions."""

Measured = Sequence[tuple[str, Mapping[str, Any], str]]


def made_up(name: str) -> tuple[np.ndarray, np.ndarray]:
    """(values (n, 3), labels (n,)) of a made-up population; the same on every call."""
    sizes, within, between = MADE_UP[name]
    rng = generator(0, "variance", name)
    labels = np.repeat(np.arange(len(sizes)), sizes)
    means = rng.normal(size=(len(sizes), 3)) * between
    return means[labels] + rng.normal(size=(len(labels), 3)) * np.array(within)[labels, None], labels


@cache
def made_up_measurements() -> list[tuple[str, Mapping[str, Any], str]]:
    found = []
    for name in MADE_UP:
        values, labels = made_up(name)
        found.append((name, measure(values, labels, BATCHES, DRAWS, generator(0, "variance draws", name)), ""))
    return found


def variance_lines(measured: Measured) -> list[Line]:
    """One line a population, batch size and scheme: closed form, by drawing, its error, relative to random sampling."""
    lines = []
    for population, values, run_id in [*made_up_measurements(), *measured]:
        for at, batch in enumerate(values["batch_sizes"]):
            for scheme in SCHEMES:
                closed, base = values["closed"][scheme][at], values["closed"]["random"][at]
                numbers = {
                    "closed": closed,
                    "simulated": values["measured"][scheme][at],
                    "stderr": values["stderr"][scheme][at],
                    "against_random": 100 * closed / base,
                }
                cells = {k: Value(1, {0: float(f"{v:.6g}")}, {0: run_id} if run_id else {}) for k, v in numbers.items()}
                lines.append(Line(scheme, f"{population}, B={batch}", cells))
    return lines


def variance_notes(measured: Measured) -> list[str]:
    """For every population: does equal allocation raise the variance, by how much, and what Neyman's gains over proportional."""
    notes = [
        "equal allocation with weights raises the variance against random sampling where "
        "Σ π_c (K π_c − 1) σ_c² > σ²_inter (large population)"
    ]
    for population, values, _ in [*made_up_measurements(), *measured]:
        pi, sigma_sq = np.array(values["pi"]), np.array(values["sigma_sq"])
        within = equal_allocation_excess(pi, sigma_sq, 0.0)
        raised = "raises" if within > values["inter"] else "lowers"
        proportional = float(pi @ sigma_sq)
        gain = 100 * (1 - float(pi @ np.sqrt(sigma_sq)) ** 2 / proportional)
        worst = _largest_gap(values)
        notes.append(
            f"{population}: Σ π_c (K π_c − 1) σ_c² = {within:.4g}, σ²_inter = {values['inter']:.4g}, so equal allocation "
            f"{raised} the variance; Neyman allocation takes {gain:.1f} % off the proportional one; closed form and drawing "
            f"differ by at most {worst:.1f} standard errors"
        )
    return notes


def _largest_gap(values: Mapping[str, Any]) -> float:
    """Largest |closed - measured| in standard errors; a batch that is the whole population has neither error nor gap."""
    gaps = [
        abs(closed - drawn) / error
        for scheme in SCHEMES
        for closed, drawn, error in zip(
            values["closed"][scheme], values["measured"][scheme], values["stderr"][scheme], strict=True
        )
        if error > 0
    ]
    return max(gaps, default=0.0)
