"""Figures from tables: SVG and PNG, with the data beside them in the table's own CSV.

`figure_files(table, name)` gives file name -> bytes. The same table gives the same bytes: matplotlib's hash salt and dates
are fixed. matplotlib is imported when the first figure is drawn, so that tables alone stay fast.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from experiments.table import Column, Line, Table

FORMATS = ("svg", "png")
SETTINGS = {
    "svg.hashsalt": "clusterft",
    "svg.fonttype": "none",
    "figure.dpi": 120,
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "legend.frameon": False,
}


def figure_files(table: Table, name: str) -> dict[str, bytes]:
    """File name -> content. Raises KeyError for an unknown figure; {} when the table has nothing to draw."""
    if name not in FIGURES:
        raise KeyError(f"figure {name!r} is unknown; known are {', '.join(FIGURES)}")
    import matplotlib

    matplotlib.use("Agg")
    with matplotlib.rc_context(SETTINGS):
        figure = FIGURES[name](table)
        if figure is None:
            return {}
        title = f"{table.title} (scale: {table.scale})" + ("" if table.final else ", not final")
        figure.suptitle(title, fontsize=9)
        return {f"{table.id}.{kind}": _bytes(figure, kind) for kind in FORMATS}


def write_figures(table: Table, name: str, folder: Path) -> list[Path]:
    """Writes both formats below `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    files = figure_files(table, name)
    for file_name, content in files.items():
        (folder / file_name).write_bytes(content)
    return [folder / file_name for file_name in files]


def _bytes(figure: Any, kind: str) -> bytes:
    stream = io.BytesIO()
    metadata: Mapping[str, Any] = {"Date": None} if kind == "svg" else {"Software": None}
    figure.savefig(stream, format=kind, metadata=metadata)
    return stream.getvalue()


def _panels(count: int, width: float = 3.2, height: float = 2.8) -> tuple[Any, list[Any]]:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width * count, height), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(1, count, squeeze=False)[0]
    return figure, list(axes)


def score_columns(table: Table) -> list[Column]:
    return [c for c in table.columns if c.better is not None and c.key != "average"]


def sensitivity(table: Table) -> Any:
    """Figure 4: one panel an axis (the word before "=" in a row's label), one line a score, with the seeds' intervals."""
    groups: dict[str, list[Line]] = {}
    for line in table.lines:
        groups.setdefault(line.row.split("=", 1)[0], []).append(line)
    columns = [c for c in score_columns(table) if any(x.values[c.key].has_mean for x in table.lines)]
    if not columns:
        return None
    figure, axes = _panels(len(groups) * len(columns))
    for panel, (column, (name, lines)) in zip(axes, [(c, g) for c in columns for g in groups.items()], strict=True):
        drawn = [x for x in lines if x.values[column.key].has_mean]
        xs = [float(x.row.split("=", 1)[1]) for x in drawn]
        values = [x.values[column.key] for x in drawn]
        means = [v.mean for v in values]
        errors = [(v.interval[1] - v.interval[0]) / 2 if v.interval else 0.0 for v in values]
        panel.errorbar(xs, means, yerr=errors, marker="o", markersize=4, linewidth=1, capsize=3, color="C0")
        panel.set_xlabel(name)
        panel.set_ylabel(f"{column.label} ({column.unit})")
    return figure


def similarity(table: Table) -> Any:
    """Figure 6: cosine between workers for each method, and cosine within and between clusters."""
    keys = ("worker_similarity.steps", "cluster_similarity.intra", "cluster_similarity.inter")
    bars = [
        (f"{line.row}\n{table.column(k).label.removeprefix('cosine ')}", line.values[k]) for k in keys for line in table.lines
    ]
    bars = [(label, value) for label, value in bars if value.has_mean]
    if not bars:
        return None
    figure, (panel,) = _panels(1, width=1.4 * len(bars) + 1)
    errors = [(v.interval[1] - v.interval[0]) / 2 if v.interval else 0.0 for _, v in bars]
    panel.bar(range(len(bars)), [v.mean for _, v in bars], yerr=errors, capsize=3, color="C0", width=0.6)
    panel.set_xticks(range(len(bars)), [label for label, _ in bars])
    panel.axhline(0, color="black", linewidth=0.6)
    panel.set_ylabel("cosine of gradients")
    return figure


def variance(table: Table) -> Any:
    """Variance against batch size: closed form as lines, drawing as points; one panel a population."""
    groups: dict[str, dict[str, list[Line]]] = {}
    for line in table.lines:
        population = line.column.rsplit(", B=", 1)[0]
        groups.setdefault(population, {}).setdefault(line.row, []).append(line)
    figure, axes = _panels(len(groups), width=3.6)
    for panel, (population, schemes) in zip(axes, groups.items(), strict=True):
        for at, (scheme, lines) in enumerate(schemes.items()):
            xs = [int(x.column.rsplit("=", 1)[1]) for x in lines]
            panel.plot(xs, [x.values["closed"].mean for x in lines], color=f"C{at}", linewidth=1, label=scheme)
            points = [x.values["simulated"].mean for x in lines]
            errors = [1.96 * x.values["stderr"].mean for x in lines]
            panel.errorbar(xs, points, yerr=errors, fmt="o", markersize=3, color=f"C{at}", capsize=2)
        panel.set(xscale="log", yscale="log", xlabel="batch size B", ylabel="squared error of the batch gradient")
        panel.set_title(population, fontsize=9)
        panel.set_xticks(xs, [str(x) for x in xs])
        panel.minorticks_off()
    axes[0].legend()
    return figure


FIGURES: dict[str, Callable[[Table], Any]] = {"sensitivity": sensitivity, "similarity": similarity, "variance": variance}
