"""A matplotlib figure as SVG that belongs to the page: its colours, its font, its light or dark scheme; small; accessible.

In: a figure drawn with the stand-in colours of `INK`, `PAPER`, ... Out: markup for the page. matplotlib writes fixed colours and many
attributes; here they become CSS variables, ids are kept only where something refers to them, coordinates get two decimals, and the
style of a marker stands once for all its points.
"""

from __future__ import annotations

import io
import re
import xml.etree.ElementTree as ET

import matplotlib
from markupsafe import Markup, escape
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure

PALETTE = 8
INK, PAPER, MUTED, GRID, KEPT, DROPPED = "#010101", "#010102", "#010103", "#010104", "#010105", "#010106"
CLUSTERS = tuple(f"#0102{i:02x}" for i in range(PALETTE))
_VARIABLES = {INK: "ink", PAPER: "paper", MUTED: "muted", GRID: "grid", KEPT: "kept", DROPPED: "dropped"} | {
    c: f"c{i}" for i, c in enumerate(CLUSTERS)
}
_SVG, _XLINK = "{http://www.w3.org/2000/svg}", "{http://www.w3.org/1999/xlink}"
_REFERENCE = re.compile(r"url\(#([^)]+)\)")

RC = {
    "svg.fonttype": "none",
    "font.size": 9.5,
    "text.color": INK,
    "axes.edgecolor": MUTED,
    "axes.labelcolor": INK,
    "axes.linewidth": 0.8,
    "axes.facecolor": "none",
    "figure.facecolor": "none",
    "xtick.color": MUTED,
    "ytick.color": MUTED,
    "xtick.labelcolor": INK,
    "ytick.labelcolor": INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "grid.color": GRID,
    "grid.linewidth": 0.6,
    "hatch.linewidth": 0.7,
    "path.simplify": False,
}


def new_figure(width: float, height: float) -> Figure:
    """A figure in inches, without pyplot: no global state, no display. Call inside `matplotlib.rc_context(RC)`."""
    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasSVG(figure)
    return figure


def markup(figure: Figure, name: str, title: str, description: str) -> Markup:
    """The figure as an `<svg>` element. name: a letter, then letters and digits, unique on the page; the same figure gives the same bytes."""
    out = io.BytesIO()
    with matplotlib.rc_context({"svg.hashsalt": name}):
        figure.savefig(out, format="svg", metadata=dict.fromkeys(("Creator", "Date", "Format", "Type")))
    root = ET.fromstring(out.getvalue())
    _drop(root, {"metadata", "style"})
    _slim(root)
    _name_ids(root, name)
    body = "".join(ET.tostring(child, encoding="unicode") for child in _plain(root))
    return Markup(
        f'<svg class="chart" role="img" aria-labelledby="{name}-t {name}-d" viewBox="{root.get("viewBox")}">'
        f'<title id="{name}-t">{escape(title)}</title><desc id="{name}-d">{escape(description)}</desc>{body}</svg>'
    )


def _drop(root: ET.Element, names: set[str]) -> None:
    for parent in list(root.iter()):
        for child in list(parent):
            if child.tag.removeprefix(_SVG) in names:
                parent.remove(child)


def _slim(root: ET.Element) -> None:
    """Colours to variables, shorter numbers, one style for all points of a marker."""
    for parent in root.iter():
        uses = [c for c in parent if c.tag == f"{_SVG}use"]
        styles = {c.get("style") for c in uses}
        if len(uses) > 1 and len(styles) == 1 and None not in styles:
            parent.set("style", _themed(styles.pop() or ""))
            for one in uses:
                del one.attrib["style"]
    for element in root.iter():
        for key, value in list(element.attrib.items()):
            if key == "style":
                element.set(key, _themed(value))
            elif key in ("x", "y", "d", "transform", "width", "height"):
                element.set(key, re.sub(r"-?\d+\.\d+", _short, " ".join(value.split())))


def _short(match: re.Match[str]) -> str:
    return f"{float(match.group()):.2f}".rstrip("0").rstrip(".")


def _themed(style: str) -> str:
    def swap(match: re.Match[str]) -> str:
        name = _VARIABLES.get(match.group().lower())
        return match.group() if name is None else f"var(--{name})"

    return re.sub(r"#[0-9a-fA-F]{6}\b", swap, style)


def _name_ids(root: ET.Element, name: str) -> None:
    """Ids that something refers to get the chart's name as prefix, so that charts of one page cannot take each other's; others go."""
    used = set()
    for element in root.iter():
        href = element.get(f"{_XLINK}href")
        if href is not None:
            used.add(href[1:])
            element.set("href", f"#{name}-{href[1:]}")
            del element.attrib[f"{_XLINK}href"]
        for key, value in list(element.attrib.items()):
            used |= set(_REFERENCE.findall(value))
            element.set(key, _REFERENCE.sub(rf"url(#{name}-\1)", value))
    for element in root.iter():
        own = element.attrib.pop("id", None)
        if own in used:
            element.set("id", f"{name}-{own}")
        elif own is not None and own.startswith("label"):
            element.set("class", "maplabel")


def _plain(root: ET.Element) -> ET.Element:
    """Without name spaces: inside a page an svg element needs none."""
    for element in root.iter():
        element.tag = element.tag.removeprefix(_SVG)
    return root
