"""`report.html`: one page without scripts and without anything from outside.

In: `ReportFacts`. Out: HTML text. Every value goes through `visible` and then through Jinja's escaping, both set on the environment, so that
no template can forget either; only the charts and the style sheet are markup. A content security policy forbids what should not be there
anyhow.
"""

from __future__ import annotations

from importlib import resources
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from clusterft.report.charts import histogram_chart, map_chart, sizes_chart
from clusterft.report.facts import ReportFacts
from clusterft.report.text import visible

SECTIONS = (
    ("look", "What to look out for"),
    ("rejected", "Kept and rejected"),
    ("clusters", "Sizes"),
    ("map", "Map"),
    ("lengths", "Lengths and losses"),
    ("examples", "Examples"),
    ("near", "Near-duplicates"),
    ("overlap", "Overlap"),
    ("cost", "Time and memory"),
    ("repeat", "Repeat it"),
)


def html_report(facts: ReportFacts) -> str:
    """The whole page. The same facts give the same bytes."""
    css = resources.files("clusterft.report").joinpath("style.css").read_text(encoding="utf-8")
    return (
        environment()
        .get_template("report.html.j2")
        .render(
            facts=facts,
            css=Markup(css),
            sections=SECTIONS,
            sizes=sizes_chart(facts.clusters) if facts.clustered else None,
            map=None if facts.map is None else map_chart(facts.map),
            histograms=[histogram_chart(h) for h in facts.histograms],
        )
    )


def environment() -> Environment:
    """Templates with escaping on, undefined names as errors, and the filters for numbers."""
    env = Environment(
        loader=PackageLoader("clusterft.report"),
        autoescape=True,
        undefined=StrictUndefined,
        finalize=shown,
        keep_trailing_newline=True,
    )
    env.filters |= {"count": count, "percent": percent, "number": number, "cosine": "{:.4f}".format, "words": words}
    return env


def shown(value: Any) -> Any:
    """What an expression of a template puts out: markup as it is, text with nothing hidden."""
    return visible(value) if isinstance(value, str) and not isinstance(value, Markup) else value


def count(value: int) -> str:
    return f"{value:,}"


def percent(value: float) -> str:
    return f"{100 * value:.1f} %"


def number(value: float) -> str:
    """Three figures, or all before the point."""
    return f"{value:#.3g}" if abs(value) < 100 else f"{value:,.0f}"


def words(value: str) -> str:
    """snake_case as words."""
    return value.replace("_", " ")
