"""Table 9: the symbols, read from the code that defines them, without importing it.

Every symbol names a place: a letter of the axis list in `clusterft.records`, a documented parameter, a field of the configuration
schema with its comment, or the first sentence of a docstring. A place that is gone is an error, so the table cannot drift.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

SYMBOLS: tuple[tuple[str, str, str], ...] = (
    ("N", "axis:n", ""),
    ("K", "parameter:clusterft.cluster:ClusterSelector:n_clusters", "clustering.n_clusters"),
    ("W", "axis:w", "trainer.workers"),
    ("B", "field:clusterft.config:TrainerConfig:global_batch", "trainer.global_batch"),
    ("r", "doc:clusterft.cluster:balanced_rows", "selector.ratio"),
    ("α", "parameter:clusterft.cluster:ClusterSelector:capacity_factor", "clustering.capacity_factor"),
    ("q", "axis:q", ""),
    ("m", "axis:m", ""),
    ("H", "axis:h", ""),
    ("t", "axis:t", ""),
    ("g_i", "doc:clusterft.proxy:gradient_proxies", "clustering.proxy.proxy"),
    ("n_c", "doc:clusterft.cluster:Clustering.sizes", ""),
    ("π_c", "doc:experiments.theory:Population.pi", ""),
    ("w_c", "doc:clusterft.cluster:unbiased_weights", "sampler.weights"),
    ("σ²_intra", "doc:experiments.theory:Population.intra", ""),
    ("σ²_inter", "doc:experiments.theory:Population.inter", ""),
)


@dataclass(frozen=True)
class NotationRow:
    """One symbol. code: module and name; value: what the plain configuration says, "" for quantities that are computed."""

    symbol: str
    meaning: str
    code: str
    value: str


def notation_rows(config: Mapping[str, Any]) -> list[NotationRow]:
    """All symbols. `config`: a composed configuration. Raises LookupError, naming the symbol, for a place that is gone."""
    rows = []
    for symbol, place, path in SYMBOLS:
        try:
            meaning = meaning_of(place)
            value = value_of(config, path) if path else ""
        except (LookupError, AttributeError) as problem:
            raise LookupError(f"notation of {symbol}: {problem}") from problem
        code = place.split(":", 1)[1] if not place.startswith("axis") else "clusterft.records"
        rows.append(NotationRow(symbol, meaning, code.replace(":", "."), f"{path} = {value}" if path else ""))
    return rows


def value_of(config: Mapping[str, Any], path: str) -> str:
    found: Any = config
    for key in path.split("."):
        found = found[key]
    return str(found)


def meaning_of(place: str) -> str:
    """The words that the code has for a place. Raises LookupError."""
    kind, _, rest = place.partition(":")
    if kind == "axis":
        return _axis_letters()[rest]
    module, name, *field = rest.split(":")
    node = _find(module, name)
    if kind == "field":
        return _comment(module, node, field[0])
    doc = ast.get_docstring(node)
    if not doc:
        raise LookupError(f"{module}:{name} has no docstring")
    if kind == "doc":
        return re.split(r"(?<=[.:])\s", doc.replace("\n", " ").replace("`", ""))[0].rstrip(".:")
    match = re.search(rf"^\s*{field[0]}\s{{2,}}(.+)$", doc, flags=re.MULTILINE)
    if match is None:
        raise LookupError(f"{module}:{name} documents no parameter {field[0]}")
    return match[1]


@cache
def _source(module: str) -> str:
    spec = find_spec(module)
    if spec is None or spec.origin is None:
        raise LookupError(f"there is no module {module}")
    return Path(spec.origin).read_text(encoding="utf-8")


def _find(module: str, name: str) -> Any:
    node: Any = ast.parse(_source(module))
    for part in name.split("."):
        inner = [n for n in node.body if isinstance(n, ast.FunctionDef | ast.ClassDef) and n.name == part]
        if not inner:
            raise LookupError(f"{module} has no {name}")
        node = inner[0]
    return node


def _comment(module: str, node: Any, field: str) -> str:
    """The comment behind a field of a dataclass."""
    for item in node.body:
        if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name) and item.target.id == field:
            line = _source(module).splitlines()[item.lineno - 1]
            if "#" in line:
                return line.split("#", 1)[1].strip()
    raise LookupError(f"{module}:{node.name} has no field {field} with a comment")


@cache
def _axis_letters() -> dict[str, str]:
    """Letter -> words, from the sentence in the tour of clusterft.records."""
    doc = ast.get_docstring(ast.parse(_source("clusterft.records"))) or ""
    match = re.search(r"Axis letters used throughout the package:(.+?)\.", doc.replace("\n", " "))
    if match is None:
        raise LookupError("clusterft.records lists no axis letters")
    pairs = [entry.strip().split(" ", 1) for entry in match[1].split(",")]
    return {letter: words for letter, words in pairs}
