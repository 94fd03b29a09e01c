"""The pictures: cluster sizes, the map of the proxies, histograms of kept against dropped rows.

In: `facts`. Out: `Chart`s of themed SVG with an alternative text that carries the numbers. Kept and dropped always differ in shape, fill
or line as well as in colour.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import matplotlib
import numpy as np
from markupsafe import Markup
from matplotlib.ticker import FixedLocator, FuncFormatter, MaxNLocator, NullLocator

from clusterft.report.facts import ClusterFacts, Histogram, MapFacts
from clusterft.report.svg import CLUSTERS, DROPPED, INK, KEPT, PALETTE, PAPER, RC, markup, new_figure

MOST_BARS = 32
WIDTH = 4.4


@dataclass(frozen=True)
class Chart:
    """svg: markup of the picture; caption: what a reader should see in it."""

    svg: Markup
    caption: str


def colour(cluster: int) -> str:
    """Stand-in colour of a cluster; they repeat after PALETTE, which is why clusters are also named on the map."""
    return INK if cluster < 0 else CLUSTERS[cluster % PALETTE]


def sizes_chart(clusters: Sequence[ClusterFacts]) -> Chart | None:
    """Bars of kept (solid) and dropped (hatched) rows; None for more than MOST_BARS clusters, where the table is clearer."""
    if len(clusters) > MOST_BARS:
        return None
    with matplotlib.rc_context(RC):
        figure = new_figure(WIDTH, 0.9 + 0.3 * len(clusters))
        axes = figure.subplots()
        names = ["all" if c.number is None else str(c.number) for c in clusters]
        kept = np.array([c.kept for c in clusters])
        dropped = np.array([c.before - c.kept for c in clusters])
        axes.barh(names, kept, color=KEPT, edgecolor=KEPT, linewidth=0.8, height=0.66)
        axes.barh(names, dropped, left=kept, color="none", edgecolor=DROPPED, linewidth=0.8, hatch="////", height=0.66)
        axes.invert_yaxis()
        axes.grid(axis="x")
        axes.tick_params(axis="y", length=0)
        axes.xaxis.set_major_locator(MaxNLocator(5, integer=True))
        axes.xaxis.set_major_formatter(FuncFormatter(lambda v, _: f"{v:,.0f}"))
        axes.set_xlabel("rows")
        axes.set_ylabel("cluster")
        text = "; ".join(f"{c.name}: {c.kept:,} of {c.before:,} rows kept" for c in clusters)
        svg = markup(figure, "sizes", "Kept and dropped rows of each cluster", text)
    return Chart(svg, "Rows of each cluster: kept (solid) and dropped (hatched).")


def map_chart(facts: MapFacts) -> Chart:
    """Points of the map: kept are discs, dropped are crosses; each cluster's number stands at its middle."""
    with matplotlib.rc_context(RC):
        figure = new_figure(WIDTH, WIDTH * 0.92)
        axes = figure.subplots()
        found = np.unique(facts.clusters).tolist()
        size = float(np.interp(len(facts.points), (50, 1000, 5000), (4.6, 3.0, 1.8)))
        rim = 0.4 if len(facts.points) <= 500 else 0.0
        for dropped in (True, False):
            for cluster in found:
                x, y = facts.points[(facts.clusters == cluster) & (facts.kept != dropped)].T
                if dropped:
                    axes.plot(x, y, "x", color=colour(cluster), markersize=size, markeredgewidth=0.7, alpha=0.75)
                else:
                    axes.plot(x, y, "o", color=colour(cluster), markersize=size, markeredgewidth=rim, markeredgecolor=PAPER)
        named = [c for c in found if c >= 0]
        middles = np.array([np.median(facts.points[facts.clusters == c], axis=0) for c in named]).reshape(-1, 2)
        span = float(np.ptp(facts.points, axis=0).max()) or 1.0
        for cluster, middle, place in zip(named, middles, spread_labels(middles, 0.065 * span), strict=True):
            if (middle != place).any():
                axes.plot(*np.stack([middle, place]).T, color=INK, linewidth=0.7)
            axes.text(
                *place, str(cluster), gid=f"label{cluster}", ha="center", va="center", fontsize=11, fontweight="bold", color=INK
            )
        axes.set_aspect("equal", adjustable="datalim")
        for axis, share, name in ((axes.xaxis, facts.explained[0], "first"), (axes.yaxis, facts.explained[1], "second")):
            axis.set_major_locator(MaxNLocator(5))
            axis.set_label_text(f"{name} component ({100 * share:.1f} % of the variance)")
        axes.grid()
        each = "; ".join(f"cluster {c} has {int((facts.clusters == c).sum()):,} points" for c in named)
        text = f"{len(facts.points):,} rows, {int(facts.kept.sum()):,} of them kept (discs), the others dropped (crosses). {each}"
        svg = markup(figure, "map", "Map of the gradient proxies", text)
    return Chart(svg, map_caption(facts))


def spread_labels(middles: np.ndarray, gap: float) -> np.ndarray:
    """(k, 2) places of labels, each at least `gap` from the earlier ones: its middle (k, 2) if free, else the first free place around it."""
    placed: list[np.ndarray] = []
    for middle in middles:
        rings = [middle] + [
            middle + gap * ring * np.array([np.cos(turn), np.sin(turn)])
            for ring in range(1, 4 + len(middles))
            for turn in np.linspace(np.pi / 2, 5 * np.pi / 2, 12, endpoint=False)
        ]
        placed.append(next(spot for spot in rings if all(np.hypot(*(spot - other)) >= gap for other in placed)))
    return np.array(placed).reshape(-1, 2)


def map_caption(facts: MapFacts) -> str:
    shown = (
        ""
        if len(facts.points) == facts.total
        else f" {len(facts.points):,} of {facts.total:,} rows are drawn, chosen by a hash of their ids."
    )
    numbers = " Colours and numbers are clusters." if facts.clusters.max() >= 0 else ""
    return f"Gradient proxies on their first two principal components. Discs are kept, crosses dropped.{numbers}{shown}"


def histogram_chart(facts: Histogram) -> Chart:
    """Share of the kept and of the dropped rows in each bin: kept filled, dropped a dashed outline."""
    with matplotlib.rc_context(RC):
        figure = new_figure(WIDTH, 2.3)
        axes = figure.subplots()
        axes.stairs(100 * facts.kept / max(1, facts.kept.sum()), facts.edges, fill=True, color=KEPT, alpha=0.55)
        if facts.dropped.sum():
            axes.stairs(
                100 * facts.dropped / facts.dropped.sum(), facts.edges, color=DROPPED, linewidth=1.6, linestyle=(0, (3, 1.5))
            )
        if facts.log_scale:
            axes.set_xscale("log")
            axes.set_xlim(facts.edges[0], facts.edges[-1])
            axes.xaxis.set_major_locator(nice_log_ticks(facts.edges))
            axes.xaxis.set_minor_locator(NullLocator())
            axes.xaxis.set_major_formatter(FuncFormatter(lambda v, _: f"{v:,.0f}"))
        axes.yaxis.set_major_locator(MaxNLocator(4))
        axes.yaxis.set_major_formatter(FuncFormatter(lambda v, _: f"{v:g} %"))
        axes.grid(axis="y")
        axes.set_xlabel(facts.unit)
        axes.set_ylabel("share of rows")
        svg = markup(figure, f"hist{facts.key}", f"{facts.title}, kept against dropped rows", medians(facts))
    return Chart(svg, f"{medians(facts)} Kept rows filled, dropped rows dashed; each adds up to 100 %.")


def nice_log_ticks(edges: np.ndarray) -> FixedLocator | MaxNLocator:
    """Ticks at 1, 2, 5 times powers of ten, thinned to powers of ten where the range is wide; even ones where it is narrow."""
    low, high = max(float(edges[0]), 0.5), float(edges[-1])
    decades = np.log10(high / low)
    steps = (1, 2, 5) if decades < 2 else (1, 3) if decades < 3 else (1,)
    ticks = [s * 10.0**p for p in range(8) for s in steps]
    inside = [t for t in ticks if low <= t <= high]
    return FixedLocator(inside) if len(inside) > 2 else MaxNLocator(5, integer=True)


def medians(facts: Histogram) -> str:
    def shown(value: float | None) -> str:
        return "none" if value is None else f"{value:,.4g}"

    return f"{facts.title}: median {shown(facts.kept_median)} in kept rows, {shown(facts.dropped_median)} in dropped rows."
