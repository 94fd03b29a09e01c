"""What a report says: counts, samples, terms, the map, near-duplicates, overlaps and rules, by hand and against slow twins."""

from __future__ import annotations

import dataclasses
import itertools

import numpy as np
import pytest
import report_kit as kit
from report_kit import COMMAND, COST, facts_of

from clusterft.records import Example, Pool, Selection
from clusterft.report import gather, map2d
from clusterft.report.charts import spread_labels
from clusterft.report.facts import ClusterFacts
from clusterft.report.gather import _overlap
from clusterft.report.histograms import histogram
from clusterft.report.html import html_report
from clusterft.report.map2d import near_pairs, project
from clusterft.report.markdown import markdown_report
from clusterft.report.terms import distinctive_terms, log_odds_z


@pytest.fixture
def made():
    return kit.made()


@pytest.fixture
def facts():
    return kit.facts()


# -- facts


def test_counts_agree_with_the_selection(made, facts):
    _, encoded, _, _, selection, _ = made
    assert (facts.pool_rows, facts.kept_rows) == (240, len(selection.ids))
    assert sum(c.kept for c in facts.clusters) == len(selection.ids)
    assert [c.before for c in facts.clusters] == selection.info["cluster_sizes"]
    assert [c.kept for c in facts.clusters] == selection.info["cluster_kept"]
    for one in facts.clusters:
        assert one.weight == pytest.approx(one.before / 239 / (one.kept / len(selection.ids)))
    assert [(r.reason, r.stage, r.count) for r in facts.reasons] == [
        ("empty_response", "reading", 2),
        ("not_json", "reading", 1),
        ("zero_proxy", "ranking", 1),
    ]
    assert str(facts.reasons[0].places[1]) == "train.jsonl:991"
    kept = set(selection.ids)
    assert facts.kept_tokens == sum(len(e) for e in encoded if e.id in kept)
    assert facts.truncated_rows == 6


def test_samples_are_of_their_cluster_and_side(made, facts):
    _, _, _, _, selection, labels = made
    kept = set(selection.ids)
    for one in facts.clusters:
        assert len(one.kept_samples) == len(one.dropped_samples) == 3
        assert all(labels[s.id] == one.number and s.id in kept for s in one.kept_samples)
        assert all(labels[s.id] == one.number and s.id not in kept for s in one.dropped_samples)
        values = [s.value for s in one.kept_samples]
        assert values == sorted(values)
        inside = [selection.scores[i] for i in kept if labels[i] == one.number]
        assert (values[0], values[-1]) == (min(inside), max(inside))


def test_a_permuted_pool_gives_the_same_page(made, facts):
    pool, encoded, proxies, losses, selection, labels = made
    order = np.random.default_rng(5).permutation(len(pool))
    shuffled = Pool(pool.name, tuple(pool.examples[i] for i in order), pool.rejected[::-1])
    again = facts_of((shuffled, tuple(encoded[i] for i in order), proxies[order], losses[order], selection, labels))
    assert html_report(again) == html_report(dataclasses.replace(facts, overlaps=again.overlaps))


def test_a_method_without_clusters_or_proxies(made):
    pool, encoded, _, _, _, _ = made
    chosen = Selection("random", pool.fingerprint, pool.ids[:60], 60, 0)
    found = gather(pool, encoded, chosen, None, command=COMMAND, cost=COST)
    assert [(c.name, c.before, c.kept, c.weight) for c in found.clusters] == [("all rows", 240, 60, None)]
    assert found.map is None and found.near is None
    assert len(found.clusters[0].kept_samples) == 3
    text = html_report(found) + markdown_report(found)
    assert text.count("computed no gradient proxies") >= 2
    assert text.count("not measured") >= 4  # losses, processor time, passes


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"labels": None}, "pass labels"),
        ({"labels": {}}, "labels lack 239 rows"),
        ({"losses": np.zeros(3)}, r"losses have shape \(3,\), expected \(240,\)"),
    ],
)
def test_what_does_not_align_is_refused(made, change, message):
    with pytest.raises(ValueError, match=message):
        facts_of(made, **change)


def test_labels_that_contradict_the_selection_are_refused(made):
    wrong = {i: (c + 1) % 3 for i, c in made[5].items()}
    with pytest.raises(ValueError, match="the selection elsewhere"):
        facts_of(made, labels=wrong)


# -- pieces, by hand


def test_terms_by_hand():
    texts = ["apple pie the"] * 6 + ["stone wall the"] * 6
    clusters = np.repeat([0, 1], 6)
    assert distinctive_terms(texts, clusters, 2) == [("apple", "pie"), ("stone", "wall")]
    assert distinctive_terms(texts, np.zeros(12, int), 1) == [()]
    assert distinctive_terms(["", "?"], np.array([0, 1]), 2) == [(), ()]


def test_a_word_common_to_all_scores_zero():
    z = log_odds_z(np.array([[8.0, 8.0], [8.0, 0.0]]), np.array([10.0, 10.0]))
    assert z[:, 0] == pytest.approx([0, 0])
    # word 1: prior 10 * 8 / 20 = 4; here 12 / 8.5, there 4 / 16.5; variance 1/12 + 1/4
    assert z[0, 1] == pytest.approx(np.log((12 / 8.5) / (4 / 16.5)) / np.sqrt(1 / 12 + 1 / 4))


def test_near_pairs_by_hand(monkeypatch):
    monkeypatch.setattr(map2d, "BLOCK_ROWS", 2)
    rows = np.array([[1, 0], [0, 2], [3, 0.01], [5, 0], [1, 1], [-1, 0]], dtype=np.float32)
    pairs, dropped, best = near_pairs(rows, np.array([0, 1]), np.array([2, 3, 4, 5]), 0.99, 1)
    assert (pairs, dropped) == (2, 2)
    assert [(round(c, 6), a, b) for c, a, b in best] == [(1.0, 0, 3)]


def test_near_duplicates_equal_the_slow_count(made):
    _, _, proxies, _, selection, labels = made
    pool, found = made[0], facts_of(made, near_threshold=0.9).near
    unit = proxies / np.linalg.norm(proxies, axis=1, keepdims=True).clip(1e-30)
    kept = set(selection.ids)
    pairs = [
        (a, b)
        for a, i in enumerate(pool.ids)
        for b, j in enumerate(pool.ids)
        if i in kept and j not in kept and j in labels and labels[i] == labels[j] and unit[a] @ unit[b] >= 0.9
    ]
    assert len(pairs) > 10
    assert (found.pairs, found.dropped_rows) == (len(pairs), len({b for _, b in pairs}))
    assert (found.compared, found.of) == (239, 239)


def test_projection_equals_the_singular_vectors():
    points = np.random.default_rng(0).normal(size=(60, 5)) * [5, 3, 1, 0.5, 0.1]
    got, explained = project(points, seed=1)
    centred = points - points.mean(0)
    u, s, _ = np.linalg.svd(centred, full_matrices=False)
    assert np.abs(got) == pytest.approx(np.abs(u[:, :2] * s[:2]), abs=1e-8)
    assert explained == pytest.approx(tuple((s**2 / (s**2).sum())[:2]))


def test_overlap_by_hand():
    one = _overlap("x", {"a", "b", "c"}, {"b", "c", "d", "e"}, 12)
    assert (one.shared, one.jaccard) == (2, 2 / 5)
    assert one.expected == pytest.approx(1 / 6)  # 3 * 4 / 12 = 1 shared by chance, of 6


def test_histogram_loses_no_row():
    values = np.array([0, 1, 2, 3, 50, 4000, np.nan])
    kept = np.array([True, False, True, True, False, True, True])
    one = histogram("x", "t", "u", values, kept, log_scale=True)
    assert (one.kept.sum(), one.dropped.sum()) == (4, 2)
    assert (one.kept_median, one.dropped_median) == (2.5, 25.5)
    flat = histogram("x", "t", "u", np.array([2.0, 2.0]), np.array([True, False]))
    assert (flat.kept.sum(), flat.dropped.sum(), flat.dropped[0]) == (1, 1, 1)


def test_rules_name_what_was_found(facts):
    keys = {f.key for f in facts.findings}
    assert {"not_ranked", "few_rows", "no_heldout"} <= keys
    assert facts.findings[0].level == "warning"
    assert "1 (see below)" in next(f for f in facts.findings if f.key == "not_ranked").fact


def test_small_clusters_and_low_shares_are_found(facts):
    from clusterft.report.rules import low_share, small_cluster

    sizes = (ClusterFacts(0, 100, 5, 1.0), ClusterFacts(1, 10, 5, 1.0), ClusterFacts(2, 100, 5, 1.0))
    small = small_cluster(dataclasses.replace(facts, clusters=sizes))
    assert small is not None and small.fact.startswith("Cluster 1 has 10 rows")
    assert small_cluster(dataclasses.replace(facts, clusters=(sizes[0], sizes[2]))) is None
    assert low_share(dataclasses.replace(facts, kept_rows=23)) is not None
    assert low_share(dataclasses.replace(facts, kept_rows=24)) is None


def test_heavy_weights_are_found(made):
    from clusterft.report.rules import weights

    pool = made[0]
    values = np.array([3.0, 0.5, 0.25, 0.25])
    heavy = Selection("cluster", pool.fingerprint, pool.ids[:4], 4, 0, weights=values)
    assert "25.0 % of the kept rows" in weights(heavy).fact
    assert weights(dataclasses.replace(heavy, weights=np.array([2.0, 1.0, 0.5, 0.5]))) is None


def test_an_example_with_many_turns_is_cut_in_the_middle():
    from clusterft.records import Turn
    from clusterft.report.samples import parts_of

    turns = tuple(Turn("user" if i % 2 == 0 else "assistant", f"text {i}") for i in range(7))
    parts = parts_of(Example("0" * 16, "", "", turns=turns))
    assert [p.text for p in parts] == ["text 0", "text 1", "(3 further turns)", "text 5", "text 6"]


def test_labels_of_clusters_never_cover_each_other():
    middles = np.array([[0.0, 0.0], [0.0, 0.0], [5.0, 5.0], [0.1, 0.0], [0.0, 0.0]])
    places = spread_labels(middles, 1.0)
    assert places[[0, 2]].tolist() == middles[[0, 2]].tolist()
    gaps = [np.hypot(*(a - b)) for a, b in itertools.combinations(places, 2)]
    assert min(gaps) >= 1.0 - 1e-12
    assert spread_labels(np.empty((0, 2)), 1.0).shape == (0, 2)
