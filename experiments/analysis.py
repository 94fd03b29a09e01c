"""Tables that are not one number a run: clusters one by one, schemes of drawing a batch, categories, notation.

Each builder has the signature of `aggregate.build` and returns the same `Table`. `make_table` chooses the builder by the id.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from typing import Any

from clusterft.seeding import generator
from experiments.aggregate import build
from experiments.agreement import SAMPLES, agreement, stratified_sample
from experiments.artifacts import read_artifact
from experiments.cellruns import CellRun, by_line, cell_runs
from experiments.cost_passes import counted_passes, selection_passes
from experiments.notation import notation_rows
from experiments.plan import Resolve
from experiments.recordstore import Records
from experiments.remarks import describe_problems
from experiments.reported import reported
from experiments.spec import ExperimentConfig
from experiments.table import Column, Line, Table, Value
from experiments.variance import variance_lines, variance_notes

Builder = Callable[[ExperimentConfig, Resolve, Records, Collection[str] | None, str, str], Table]


def make_table(
    spec: ExperimentConfig,
    resolve: Resolve,
    records: Records,
    available: Collection[str] | None = None,
    scale: str = "paper",
    scale_note: str = "",
) -> Table:
    """The table of any experiment but `all`. Raises ValueError for that."""
    if spec.kind == "all":
        raise ValueError(f"experiment {spec.id!r} is a list of others; make the table of each of {', '.join(spec.members)}")
    return BUILDERS.get(spec.id, build)(spec, resolve, records, available, scale, scale_note)


def number(value: float, seed: int = 0, run_id: str = "") -> Value:
    """A value that was computed once."""
    return Value(1, {seed: value}, {seed: run_id} if run_id else {})


def words(text: str) -> Value:
    return Value(0, text=text)


def empty_table(spec: ExperimentConfig, scale: str, scale_note: str, columns: list[Column], lines: list[Line]) -> Table:
    """A table of an experiment without problems or comparisons."""
    return Table(
        id=spec.id,
        title=spec.title,
        scale=scale,
        scale_note=scale_note,
        row_title=spec.row_title,
        column_title=spec.column_title,
        columns=tuple(columns),
        lines=tuple(lines),
        reported=reported(spec.reported),
        expected=spec.expected,
    )


def without_artifact(runs: list[CellRun], name: str) -> tuple[list[tuple[CellRun, dict[str, Any]]], list[str]]:
    """(runs with the artifact's values, problems of the others)."""
    found, problems = [], describe_problems(runs)
    for one in runs:
        if one.run.state != "complete":
            continue
        values = read_artifact(one.run.artifacts, name)
        if values is None:
            problems.append(f"{one.cell.name}: artifact {name} was not made (run {one.run.run_id})")
        else:
            found.append((one, values))
    return found, problems


def selection_costs(spec: Any, resolve: Any, records: Any, available: Any, scale: str, scale_note: str) -> Table:
    """Table 1: measured seconds with the passes that the runs counted; before there is one, with those that its configuration plans."""
    table = build(spec, resolve, records, available, scale, scale_note)
    passes: dict[tuple[str, str], Value] = {}
    for group in by_line(cell_runs(spec, resolve, records, available)):
        made = [one.run.stored.record for one in group if one.run.state == "complete" and one.run.stored]
        counts = [counted_passes(record) for record in made]
        texts = sorted({"not counted" if one is None else str(one) for one in counts})
        if not texts and group[0].run.run_id:
            texts = [_planned_passes(resolve(group[0].cell.overrides)[1])]
        ids = {one.cell.seed: one.run.run_id for one in group if one.run.state == "complete"}
        passes[group[0].cell.line] = Value(0, run_ids=ids, text=" or ".join(texts))
    column = Column("passes", "model passes over N rows", "text")
    lines = tuple(replace(x, values={"passes": passes.get((x.row, x.column), words("")), **x.values}) for x in table.lines)
    return replace(table, columns=(column, *table.columns), lines=lines)


def _planned_passes(config: Any) -> str:
    """What a configuration plans; a method of the user's own, or a pool of unknown size, is known by its runs only."""
    try:
        return f"{selection_passes(config)} (planned)"
    except (KeyError, TypeError, AttributeError):
        return "not known before a run"


def centroid_cosines(spec: Any, resolve: Any, records: Any, available: Any, scale: str, scale_note: str) -> Table:
    """Table 10: one line a cluster, clusters in order of size, and the smallest cosine of all."""
    found, problems = without_artifact(cell_runs(spec, resolve, records, available), "centroid_cosine")
    cells: dict[tuple[str, str, str], dict[str, dict[int, float]]] = {}
    ids: dict[int, str] = {}
    for one, values in found:
        ids[one.cell.seed] = one.run.run_id
        ranked = sorted(values["clusters"], key=lambda c: (-c["rows"], c["cluster"]))
        named = [(f"cluster {rank} by size", c) for rank, c in enumerate(ranked, start=1)]
        lowest = {"rows": sum(c["rows"] for c in ranked), "kept": sum(c["kept"] for c in ranked)}
        named.append(("all, smallest cosine", {**lowest, "cosine": min(c["cosine"] for c in ranked)}))
        for label, cluster in named:
            place = cells.setdefault((one.cell.row, one.cell.column, label), {k: {} for k in ("rows", "kept", "cosine")})
            for key, by_seed in place.items():
                by_seed[one.cell.seed] = float(cluster[key])
    columns = [
        Column("rows", "rows", "count"),
        Column("kept", "rows kept", "count"),
        Column("cosine", "cosine of centroids", "cosine"),
    ]
    lines = []
    for (_, ratio, label), by_key in cells.items():
        values = {}
        for key, by_seed in by_key.items():
            state = "ok" if len(by_seed) == len(spec.seeds) else "incomplete"
            values[key] = Value(len(spec.seeds), by_seed, {s: ids[s] for s in by_seed}, state=state)
        lines.append(Line(label, ratio, values))
    table = empty_table(replace_titles(spec, "Cluster"), scale, scale_note, columns, lines)
    return replace(table, problems=tuple(problems))


def replace_titles(spec: ExperimentConfig, row_title: str) -> ExperimentConfig:
    return replace(spec, row_title=row_title)


def categories(spec: Any, resolve: Any, records: Any, available: Any, scale: str, scale_note: str) -> Table:
    """Table 17: agreement of clusters with categories on a stratified sample."""
    found, problems = without_artifact(cell_runs(spec, resolve, records, available), "categories")
    columns = [Column("category", "most frequent category", "text"), Column("n", "rows inspected", "count")]
    columns += [Column("agree", "rows that agree", "count"), Column("agreement", "agreement", "percent")]
    columns += [Column("interval", "95 % Wilson interval", "text"), Column("kappa", "Cohen's κ", "ratio")]
    lines, notes = [], []
    for one, values in found:
        rng = generator(one.cell.seed, "table17")
        rows = stratified_sample(values["clusters"], min(SAMPLES, len(values["clusters"])), rng)
        result = agreement([values["clusters"][i] for i in rows], [values["categories"][i] for i in rows])
        notes.append(f"categories were given by {values['labelled_by']}")
        for part in result.clusters:
            entry = {
                "category": words(part.category),
                **_counts(part.n, part.agree, one),
                "interval": words(""),
                "kappa": words(""),
            }
            lines.append(Line(f"{one.cell.row}, cluster {part.cluster}", "", entry))
        low, high = result.interval
        entry = {"category": words(""), **_counts(result.n, result.agree, one)}
        entry["interval"] = words(f"[{100 * low:.1f}, {100 * high:.1f}]")
        entry["kappa"] = words("undefined") if result.kappa is None else number(result.kappa, one.cell.seed, one.run.run_id)
        lines.append(Line(one.cell.row, "", entry))
    table = empty_table(spec, scale, scale_note, columns, lines)
    return replace(table, problems=tuple(problems), notes=tuple(dict.fromkeys(notes)))


def _counts(n: int, agree: int, one: CellRun) -> Mapping[str, Value]:
    pairs = {"n": float(n), "agree": float(agree), "agreement": 100 * agree / n}
    return {key: number(value, one.cell.seed, one.run.run_id) for key, value in pairs.items()}


def statistics(spec: Any, resolve: Any, records: Any, available: Any, scale: str, scale_note: str) -> Table:
    """Table 11: the pools' numbers, and as notes the benchmarks that the runs were scored on."""
    table = build(spec, resolve, records, available, scale, scale_note)
    notes = list(table.notes)
    for one in cell_runs(spec, resolve, records, available):
        if one.run.state == "complete" and one.run.stored is not None:
            for m in one.run.stored.record.metrics:
                digest = f", problems {m.dataset_hash[:8]}" if m.dataset_hash else ""
                notes.append(f"{one.cell.row}: scored by {m.task} {m.name} on {m.n} items{digest}")
    return replace(table, notes=tuple(dict.fromkeys(notes)))


def notation(spec: Any, resolve: Any, records: Any, available: Any, scale: str, scale_note: str) -> Table:
    """Table 9: symbols, from the code."""
    columns = [Column("meaning", "meaning", "text"), Column("code", "in the code", "text"), Column("value", "value", "text")]
    lines = [
        Line(row.symbol, "", {"meaning": words(row.meaning), "code": words(row.code), "value": words(row.value)})
        for row in notation_rows(resolve(())[1])
    ]
    return empty_table(replace_titles(spec, "Symbol"), scale, scale_note, columns, lines)


def variance(spec: Any, resolve: Any, records: Any, available: Any, scale: str, scale_note: str) -> Table:
    """The propositions: two made-up populations and the true gradients of the runs that have them."""
    found, problems = without_artifact(cell_runs(spec, resolve, records, available), "variance")
    measured = [(f"true gradients, seed {one.cell.seed}", values, one.run.run_id) for one, values in found]
    columns = [Column("closed", "closed form", "number"), Column("simulated", "by drawing", "number")]
    columns += [Column("stderr", "its standard error", "number"), Column("against_random", "against random", "percent")]
    lines = variance_lines(measured)
    spec = replace(spec, row_title="Scheme", column_title="Population and batch")
    table = empty_table(spec, scale, scale_note, columns, lines)
    return replace(table, problems=tuple(problems), notes=tuple(variance_notes(measured)))


BUILDERS: dict[str, Builder] = {
    "table1": selection_costs,
    "table9": notation,
    "table10": centroid_cosines,
    "table11": statistics,
    "table17": categories,
    "variance": variance,
}
