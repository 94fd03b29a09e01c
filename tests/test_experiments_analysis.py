"""Tables that come from artifacts, notation from the code, figures: from small runs written to a temporary store."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from clusterft.seeding import generator
from experiments.agreement import agreement, stratified_sample
from experiments.analysis import make_table
from experiments.artifacts import SCHEMAS, VALUE_COLUMNS, check_values, missing_artifacts, read_artifact, value_at, write_artifact
from experiments.cells import value_text
from experiments.figures import figure_files
from experiments.notation import SYMBOLS, meaning_of, notation_rows
from experiments.plan import plan
from experiments.recordstore import load_records
from experiments.render import latex, outputs
from experiments.spec import ExperimentConfig, load_spec
from experiments.theory import measure

ROOT = Path(__file__).resolve().parents[1]
RECORD = json.loads((ROOT / "tests/golden/tables/machine_a/cluster-1.00-0.json").read_text())


def spec_of(experiment: str, **changes: Any) -> ExperimentConfig:
    node = yaml.safe_load((ROOT / f"conf/experiment/{experiment}.yaml").read_text())["experiment"]
    return load_spec({**node, **changes})


def resolve(overrides: Sequence[str]) -> tuple[str, dict[str, str]]:
    given = dict(o.split("=", 1) for o in overrides)
    parts = [given.get(key, "").strip("'") for key in ("+experiment", "selector", "selector.within", "selector.ratio", "seed")]
    return "-".join(p for p in parts if p), given


def make_run(store: Path, run_id: str, artifacts: dict[str, dict[str, Any]]) -> None:
    folder = store / run_id
    folder.mkdir(parents=True)
    (folder / "record.json").write_text(json.dumps({**RECORD, "run_id": run_id}))
    for name, values in artifacts.items():
        write_artifact(folder, name, run_id, values)


def test_artifacts_are_checked_by_name_and_type(tmp_path: Path) -> None:
    good = {"diversity": 2.0, "n": 3, "gradient": "all parameters"}
    write_artifact(tmp_path, "gradient_diversity", "run", good)
    assert read_artifact(tmp_path / "artifacts", "gradient_diversity") == good
    assert missing_artifacts(tmp_path / "artifacts", ["gradient_diversity", "variance"]) == ("variance",)
    for wrong, message in (
        ({**good, "more": 1}, "more is unknown"),
        ({"n": 3, "gradient": ""}, "diversity is missing"),
        ({**good, "diversity": float("nan")}, "diversity is nan"),
        ({**good, "n": 2.5}, "n is 2.5, expected int"),
    ):
        with pytest.raises(ValueError, match=message):
            check_values("gradient_diversity", wrong)
    with pytest.raises(ValueError, match="known are categories"):
        check_values("nothing", {})


def test_numbers_out_of_artifacts() -> None:
    assert value_at({"a": 2}, ["a"]) == 2.0
    assert value_at({"a": [1, 2, 6]}, ["a"]) == 3.0
    assert value_at({"a": {"x": 2, "y": 3}}, ["a"]) == 5.0
    assert value_at({"a": {"x": 2}}, ["a", "x"]) == 2.0
    for value in VALUE_COLUMNS:
        artifact, key, *_ = value.split(".")
        assert key in SCHEMAS[artifact], value


def test_table8_shows_diversity_and_plans_the_artifacts_that_are_absent(tmp_path: Path) -> None:
    spec = spec_of("table8", columns={"r=0.50": ["selector.ratio='0.50'"]}, by_scale={})
    within = {"": (3.0, 3.2, 3.4), "random-": (2.0, 2.25, 2.35), "core-": (1.0, 1.2, 1.4)}
    for name, values in within.items():
        for seed, diversity in enumerate(values):
            artifact = {"gradient_diversity": {"diversity": diversity, "n": 4, "gradient": "g"}}
            make_run(tmp_path, f"cluster-{name}0.50-{seed}", artifact if (name, seed) != ("core-", 2) else {})
    records = load_records([tmp_path])
    table = make_table(spec, resolve, records)
    value = table.line("Random within r=0.50").values["gradient_diversity.diversity"]
    assert value.mean == pytest.approx(2.2) and value.difference is not None
    assert (value.difference.mean, value.difference.verdict) == (pytest.approx(-1.0), "worse")
    assert table.line("Peripheral r=0.50").values["gradient_diversity.diversity"].best
    core = table.line("Core r=0.50").values["gradient_diversity.diversity"]
    assert (core.state, core.problems[2]) == ("incomplete", "artifact gradient_diversity was not made")
    made = plan(spec, resolve, records)
    assert [(c.run_id, c.artifacts) for c in made.artifacts_to_make] == [("cluster-core-0.50-2", ("gradient_diversity",))]
    assert not made.complete and not made.to_run


def test_table10_lists_clusters_by_size_and_the_smallest_cosine(tmp_path: Path) -> None:
    spec = spec_of("table10", columns={"r=0.50": ["selector.ratio='0.50'"]}, seeds=[0, 1], by_scale={})
    for seed, (big, small) in enumerate([(0.9998, 0.9994), (0.9996, 0.9990)]):
        clusters = [
            {"cluster": 0, "rows": 10, "kept": 5, "cosine": small},
            {"cluster": 1, "rows": 30, "kept": 5, "cosine": big},
        ]
        make_run(tmp_path, f"cluster-0.50-{seed}", {"centroid_cosine": {"clusters": clusters, "gradient": "g"}})
    table = make_table(spec, resolve, load_records([tmp_path]))
    assert [x.name for x in table.lines] == [
        "cluster 1 by size r=0.50",
        "cluster 2 by size r=0.50",
        "all, smallest cosine r=0.50",
    ]
    assert table.lines[0].values["rows"].mean == 30
    assert table.lines[2].values["cosine"].by_seed == {0: 0.9994, 1: 0.9990}
    assert "0.99920 ± 0.00028" in outputs(table)["table10.md"]


def test_figure6_needs_cluster_similarity_only_of_cluster(tmp_path: Path) -> None:
    spec = spec_of("figure6")
    for name, base, step in (("random", 0.3, 0.03), ("cluster", 0.1, 0.02)):
        for seed in range(3):
            worker = {"steps": [base, base + step * seed], "workers": 4, "gradient": "g"}
            similar = {"intra": 0.2, "inter": 0.1, "permutations": 10000, "p_value": 0.01, "n": 64, "gradient": "g"}
            similar |= {"null_edges": [0.0, 1.0], "null_counts": [10000]}
            both = {"worker_similarity": worker, "cluster_similarity": similar}
            make_run(tmp_path, f"{name}-1.00-{seed}", both if name == "cluster" else {"worker_similarity": worker})
    records = load_records([tmp_path])
    assert plan(spec, resolve, records).complete
    table = make_table(spec, resolve, records)
    column = table.column("cluster_similarity.p_value")
    assert value_text(table.line("Random r=1.00").values[column.key], column) == "–"
    likeness = table.line("CluSTER r=1.00").values["worker_similarity.steps"]
    assert likeness.by_seed == pytest.approx({0: 0.1, 1: 0.11, 2: 0.12}) and likeness.difference is not None
    assert likeness.difference.verdict == "better"
    assert "| 0.0464 |" in outputs(table)["figure6.md"]
    files = figure_files(table, "similarity")
    assert files == figure_files(table, "similarity")
    assert files["figure6.svg"].startswith(b"<?xml") and files["figure6.png"].startswith(b"\x89PNG")


def test_agreement_by_hand() -> None:
    """Cluster 0: a a b, cluster 1: b b b c. 5 of 7 agree. Chance (3 * 2 + 4 * 4) / 49 = 22/49; kappa (35 - 22) / (49 - 22)."""
    result = agreement([0, 0, 0, 1, 1, 1, 1], ["a", "a", "b", "b", "b", "b", "c"])
    assert [(p.category, p.n, p.agree) for p in result.clusters] == [("a", 3, 2), ("b", 4, 3)]
    assert result.share == pytest.approx(5 / 7)
    assert result.kappa == pytest.approx(13 / 27)
    assert agreement([0, 1], ["a", "a"]).kappa is None
    with pytest.raises(ValueError, match="nothing to compare"):
        agreement([], [])


def test_a_stratified_sample_takes_as_many_of_each_cluster() -> None:
    clusters = [0] * 50 + [1] * 5 + [2] * 45
    rows = stratified_sample(clusters, 35, generator(0, "test"))
    assert np.bincount([clusters[i] for i in rows]).tolist() == [15, 5, 15]
    assert len(set(rows)) == 35 and rows == stratified_sample(clusters, 35, generator(0, "test"))
    with pytest.raises(ValueError, match="there are only 100"):
        stratified_sample(clusters, 101, generator(0, "test"))


def test_table17_reports_agreement_interval_and_kappa(tmp_path: Path) -> None:
    values = {
        "ids": list("abcdefg"),
        "clusters": [0, 0, 0, 1, 1, 1, 1],
        "categories": list("aabbbbc"),
        "labelled_by": "module family",
    }
    make_run(tmp_path, "cluster-1.00-0", {"categories": values})
    table = make_table(spec_of("table17"), resolve, load_records([tmp_path]))
    total = table.line("CluSTER").values
    assert total["agreement"].mean == pytest.approx(500 / 7) and total["kappa"].mean == pytest.approx(13 / 27)
    assert total["interval"].text == "[35.9, 91.8]"
    assert "categories were given by module family" in table.notes
    assert "82" in outputs(table)["table17.md"]
    assert latex(table).isascii() and r"Cohen's $\kappa$" in latex(table)


def test_table11_shows_pools_and_benchmarks(tmp_path: Path) -> None:
    lengths = {"mean": 100.0, "median": 90.0, "p95": 200.0, "max": 300.0}
    values = {"pool": "small", "rows": 400, "rejected": {"empty": 3, "long": 2}, "tokens": lengths, "target_tokens": lengths}
    values |= {"truncated": 7, "groups": 12, "cluster_sizes": [100, 300]}
    for seed in range(3):
        make_run(tmp_path, f"table2-cluster-1.00-{seed}", {"pool_statistics": values})
    table = make_table(spec_of("table11"), resolve, load_records([tmp_path]))
    line = table.line("Magicoder-OSS-Instruct-75K r=1.00").values
    assert line["pool_statistics.rejected"].mean == 5 and line["data_usage"].mean == pytest.approx(60.0)
    assert "Magicoder-OSS-Instruct-75K: scored by humaneval pass@1 on 40 items, problems aaaa1111" in table.notes
    assert any("MedInstruct-52K r=1.00 seeds 0, 1, 2: missing" in p for p in table.problems)


def test_table1_shows_the_passes_that_its_runs_counted(tmp_path: Path) -> None:
    """400 rows: 400 and 1,160 passes are 1 and 2.9 of the pool; a record from before passes were counted says so."""
    counts = {"cluster": (400.0, 0.0), "less": (1160.0, 1160.0), "random": (0.0, 0.0), "ifd": None}
    for name, passes in counts.items():
        cost = {**RECORD["cost"], **(dict(zip(("forward_passes", "backward_passes"), passes, strict=True)) if passes else {})}
        folder = tmp_path / f"{name}-1.00-0"
        folder.mkdir()
        (folder / "record.json").write_text(json.dumps({**RECORD, "run_id": folder.name, "cost": cost}))
    table = make_table(spec_of("table1"), resolve, load_records([tmp_path]))
    texts = {row: table.line(f"{row} r=1.00").values["passes"].text for row in ("CluSTER", "LESS", "Random", "IFD", "S2L")}
    assert texts == {
        "CluSTER": "1 N forward",
        "LESS": "2.9 N forward, 2.9 N backward",
        "Random": "none",
        "IFD": "not counted",
        "S2L": "not known before a run",  # the configurations of this test have no method in them
    }
    assert "| CluSTER | r=1.00 | 1 of 3 | 1 N forward |" in outputs(table)["table1.md"]


def test_notation_comes_from_the_code() -> None:
    config = {
        "clustering": {"n_clusters": 4, "capacity_factor": 1.5, "proxy": {"proxy": "paper"}},
        "trainer": {"workers": 4, "global_batch": 512},
        "selector": {"ratio": "1.00"},
        "sampler": {"weights": "selection"},
    }
    rows = {row.symbol: row for row in notation_rows(config)}
    assert len(rows) == len(SYMBOLS)
    assert rows["N"].meaning == "rows of the pool"
    assert (rows["α"].value, rows["B"].value) == ("clustering.capacity_factor = 1.5", "trainer.global_batch = 512")
    assert re.search(r"K pi_c|w_c", rows["w_c"].meaning)
    with pytest.raises(LookupError, match="has no Nothing"):
        meaning_of("doc:clusterft.cluster:Nothing")
    with pytest.raises(LookupError, match="documents no parameter nothing"):
        meaning_of("parameter:clusterft.cluster:ClusterSelector:nothing")
    table = make_table(spec_of("table9"), lambda _: ("", config), load_records([]))
    assert "| N | rows of the pool | clusterft.records |" in outputs(table)["table9.md"]


def test_variance_puts_made_up_and_true_gradients_side_by_side(tmp_path: Path) -> None:
    rng = generator(5, "test")
    labels = np.repeat([0, 1], [60, 20])
    values = measure(rng.normal(size=(80, 3)), labels, [8, 16], 200, rng)
    make_run(tmp_path, "cluster-1.00-0", {"variance": {**values, "gradient": "made up"}})
    table = make_table(spec_of("variance"), resolve, load_records([tmp_path]))
    equal, truly = table.line("weighted equal clusters, B=8").values, table.line("neyman true gradients, seed 0, B=16").values
    assert equal["against_random"].mean < 100
    assert table.line("weighted unequal clusters, B=8").values["against_random"].mean > 100  # equal allocation raises it there
    assert truly["closed"].run_ids == {0: "cluster-1.00-0"}
    assert abs(equal["closed"].mean - equal["simulated"].mean) < 4 * equal["stderr"].mean
    assert any("true gradients, seed 0" in note and "the variance; Neyman" in note for note in table.notes)
    assert any("unequal clusters" in note and "raises" in note for note in table.notes)
    files = figure_files(table, "variance")
    assert set(files) == {"variance.svg", "variance.png"} and b"neyman" in files["variance.svg"]
    assert figure_files(table, "variance") == files  # to the byte


def test_figure4_has_a_panel_an_axis(tmp_path: Path) -> None:
    rows = {"r=0.50": ["selector.ratio='0.50'"], "r=1.00": ["selector.ratio='1.00'"], "K=4": ["selector.ratio='4'"]}
    for ratio in ("0.50", "1.00", "4"):
        for seed in range(3):
            make_run(tmp_path, f"cluster-{ratio}-{seed}", {})
    table = make_table(spec_of("figure4", rows=rows, by_scale={}), resolve, load_records([tmp_path]))
    files = figure_files(table, "sensitivity")
    assert files["figure4.svg"].count(b'id="axes_') == 4  # r and K, for two scores
    with pytest.raises(KeyError, match="known are sensitivity, similarity, variance"):
        figure_files(table, "nothing")


def test_a_list_of_experiments_has_no_table_of_its_own() -> None:
    with pytest.raises(ValueError, match="is a list of others; make the table of each of table1"):
        make_table(spec_of("all"), resolve, load_records([]))
