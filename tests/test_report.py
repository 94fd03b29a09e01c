"""The report: facts by hand, hostile text as text, and the page in a real browser."""

from __future__ import annotations

import dataclasses
import itertools
import re
import subprocess
import sys

import browser as chromium
import numpy as np
import pytest
import report_kit as kit
from lxml import html as lxml_html
from markdown_it import MarkdownIt

from clusterft.records import Cost, Example, Pool, Selection
from clusterft.report import gather, map2d, write_report
from clusterft.report.charts import spread_labels
from clusterft.report.facts import ClusterFacts, Place
from clusterft.report.gather import _overlap
from clusterft.report.histograms import histogram
from clusterft.report.html import html_report
from clusterft.report.map2d import near_pairs, project
from clusterft.report.markdown import markdown_report
from clusterft.report.terms import distinctive_terms, log_odds_z
from clusterft.report.text import excerpt, md_block, short_names, visible

COMMAND = 'clusterft select "data/<my file>.jsonl" --model m --keep 0.5'
COST = Cost(12.5, peak_memory_gib=1.25)


@pytest.fixture(scope="module")
def made():
    pool, encoded, proxies, losses = kit.make_pool()
    selection, labels = kit.select(pool, proxies)
    return pool, encoded, proxies, losses, selection, labels


def facts_of(made, **more):
    pool, encoded, proxies, losses, selection, labels = made
    return gather(
        pool,
        encoded,
        selection,
        proxies,
        **{"labels": labels, "command": COMMAND, "cost": COST, "losses": losses, "near_threshold": 0.97} | more,
    )


@pytest.fixture(scope="module")
def facts(made):
    return facts_of(made, others={"seed <b>1</b>": dataclasses.replace(made[4], seed=1)})


@pytest.fixture(scope="module")
def everything(facts):
    """Facts in which every hostile row is an example, whatever the selection took."""
    pool, encoded, _, _ = kit.make_pool()
    everyone = Selection("random", pool.fingerprint, pool.ids[:8], 8, 0)
    shown = kit_samples(pool, encoded, everyone)
    first = dataclasses.replace(facts.clusters[0], kept_samples=shown, terms=("<u>term</u>", "x\u202ey"))
    more = tuple(dataclasses.replace(facts.clusters[1], number=n) for n in (3, 4))
    return dataclasses.replace(facts, clusters=(first, *facts.clusters[1:], *more), clusters_with_samples=5)


def kit_samples(pool, encoded, selection):
    from clusterft.report.samples import Sampler

    sampler = Sampler(pool, encoded, selection, None)
    return tuple(sampler.one(i) for i in range(len(kit.HOSTILE)))


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


# -- text of strangers


def test_hidden_characters_are_written_out():
    assert visible("a\x00b\u202ec\r\nd\re\ud800") == "a[U+0000]b[U+202E]c\nd[U+000D]e[U+D800]"
    assert visible("tab\tline\nok — नमस्ते 👩\u200d🔬") == "tab\tline\nok — नमस्ते 👩\u200d🔬"
    assert excerpt("abc", 2) == ("ab", 1)
    assert short_names(["a/x.json", "b/x.json", "c/y.json"]) == {
        "a/x.json": "a/x.json",
        "b/x.json": "b/x.json",
        "c/y.json": "y.json",
    }
    assert md_block("a ```` b").startswith("`````text\n")


def test_hostile_rows_stand_in_the_page_as_text(everything):
    text = html_report(everything)
    text.encode("utf-8")
    assert not re.search("[\x00-\x08\x0b-\x1f\u202a-\u202e\u2066-\u2069]", text)
    tree = lxml_html.document_fromstring(text)
    assert not tree.xpath("//script | //img | //iframe | //object | //link | //base | //form | //template | //u | //i")
    assert not [a for a in tree.xpath("//@*") if a.attrname.startswith("on")]
    assert {a.attrname for a in tree.xpath("//@href | //@src | //@action")} == {"href"}
    assert all(a.startswith("#") for a in tree.xpath("//@href"))
    shown = [" ".join(p.text_content().split()) for p in tree.xpath("//pre")]
    for hostile in kit.HOSTILE:
        start = " ".join(visible(hostile).split())[:60]
        assert any(start in one for one in shown), hostile
    assert "{{ 7*7 }}" in text and "<title>Selection report: odd &lt;i&gt;pool&lt;/i&gt;</title>" in text


def attributes(facts):
    return sorted(f"{a.attrname}={a}" for a in lxml_html.document_fromstring(html_report(facts)).xpath("//@*"))


def test_texts_of_rows_never_become_attributes(everything):
    """The attributes of the hostile page are those of the same page with all its texts made harmless."""

    def plain(row):
        return dataclasses.replace(
            row, parts=tuple(dataclasses.replace(p, text="x") for p in row.parts), place=Place("x", 1), id="x"
        )

    first = everything.clusters[0]
    first = dataclasses.replace(first, kept_samples=tuple(map(plain, first.kept_samples)), terms=("x", "x"))
    harmless = dataclasses.replace(
        everything,
        pool_name="x",
        command="x",
        clusters=(first, *everything.clusters[1:]),
        overlaps=tuple(dataclasses.replace(o, name="x") for o in everything.overlaps),
        reasons=tuple(
            dataclasses.replace(r, places=tuple(Place("x", 1, "x" * bool(p.detail)) for p in r.places))
            for r in everything.reasons
        ),
    )
    assert html_report(harmless) != html_report(everything)
    assert attributes(harmless) == attributes(everything)


def test_hostile_rows_stand_in_markdown_as_text(everything):
    text = markdown_report(everything)
    text.encode("utf-8")
    assert not re.search("[\x00-\x08\x0b-\x1f\u202a-\u202e\u2066-\u2069]", text)
    shown = MarkdownIt("gfm-like", {"html": True, "linkify": False}).render(text)
    tree = lxml_html.fromstring(f"<div>{shown}</div>")
    assert {e.tag for e in tree.iter()} <= set(
        ["div", "h1", "h2", "h3", "p", "strong", "ul", "li", "table", "thead", "tbody", "tr", "th", "td", "pre", "code"]
    )
    assert [h.text_content() for h in tree.xpath("//h1")] == ["What was selected from odd <i>pool</i>"]
    cells = {len(row.xpath("./td | ./th")) for row in tree.xpath("//table[1]//tr")}
    assert cells == {4}
    assert "hacked" in tree.text_content()


def test_files_are_written_whole_and_again_the_same(facts, tmp_path):
    files = write_report(facts, tmp_path)
    assert [f.name for f in files] == ["report.html", "report.md"]
    first = [f.read_bytes() for f in files]
    assert [f.read_bytes() for f in write_report(facts, tmp_path)] == first
    assert sorted(p.name for p in tmp_path.iterdir()) == ["report.html", "report.md"]
    assert len(first[0]) < 200_000
    with pytest.raises(FileNotFoundError, match="make it before"):
        write_report(facts, tmp_path / "absent")


def test_nothing_in_the_page_points_outside(facts):
    text = html_report(facts)
    tree = lxml_html.document_fromstring(text)
    pointing = [
        a for a in tree.xpath("//@*") if a.attrname in ("src", "href", "srcset", "action", "data", "poster", "xlink:href", "ping")
    ]
    assert pointing and all(a.startswith("#") for a in pointing)
    styles = [s.text_content() for s in tree.xpath("//style")] + [str(a) for a in tree.xpath("//@style | //@clip-path")]
    assert any("url(#" in s for s in styles)
    assert not [s for s in styles if re.search(r"url\((?!#)|@import|image-set|https?:", s)]
    policy = tree.xpath("//meta[@http-equiv='Content-Security-Policy']/@content")
    assert policy and policy[0].startswith("default-src 'none'")


def test_importing_the_report_is_light():
    code = "import sys, clusterft.report; sys.exit(any(m in sys.modules for m in ('torch', 'matplotlib', 'sklearn', 'jinja2')))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


# -- colours


def schemes():
    """Variables of the light and of the dark scheme."""
    from importlib import resources

    css = resources.files("clusterft.report").joinpath("style.css").read_text()
    light, dark = (dict(re.findall(r"--([\w-]+): (#[0-9a-f]{6})", block)) for block in re.findall(r":root \{(.*?)\}", css, re.S))
    assert light.keys() == dark.keys() and len(light) > 15
    return {"light": light, "dark": dark}


def contrast(a, b):
    """WCAG 2 contrast ratio of two colours."""

    def luminance(colour):
        parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
        r, g, b = (p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts)
        return 0.2126 * r + 0.7152 * g + 0.0722 * b

    high, low = sorted((luminance(a), luminance(b)), reverse=True)
    return (high + 0.05) / (low + 0.05)


def test_contrast_is_that_of_the_guidelines():
    assert contrast("#000000", "#ffffff") == pytest.approx(21)
    for name, scheme in schemes().items():
        for text in ("ink", "muted", "link", "warn"):
            for ground in ("paper", "panel", "warn-paper", "note-paper"):
                assert contrast(scheme[text], scheme[ground]) >= 4.5, (name, text, ground)
        for mark in ("kept", "dropped", *(f"c{i}" for i in range(8))):
            assert contrast(scheme[mark], scheme["paper"]) >= 3, (name, mark)


# -- a real browser

needs_chromium = pytest.mark.skipif(chromium.CHROMIUM is None, reason="chromium is not installed (apt-get install chromium)")


@needs_chromium
def test_the_page_in_a_browser(everything, tmp_path):
    write_report(everything, tmp_path)
    looks = {"phone-light": (390, 844, False, True), "phone-dark": (390, 844, True, True), "narrow": (320, 640, False, True)}
    looks |= {"desktop-light": (1280, 900, False, False), "desktop-dark": (1280, 900, True, False)}
    with chromium.browser(tmp_path) as page:
        for name, (width, height, dark, phone) in looks.items():
            page.events.clear()
            page.look(width=width, height=height, dark=dark, phone=phone)
            page.open(tmp_path / "report.html")
            assert page.value("document.documentElement.scrollWidth") <= width, name
            assert page.value("typeof window.hacked") == "undefined"
            assert page.value("document.title") == "Selection report: odd <i>pool</i>"
            ground = page.value("getComputedStyle(document.body).backgroundColor")
            assert ground == ("rgb(20, 23, 27)" if dark else "rgb(255, 255, 255)"), name
            page.screenshot(tmp_path / f"{name}.png", whole=True)
            assert (tmp_path / f"{name}.png").stat().st_size > 20_000
            assert page.requests() == [(tmp_path / "report.html").as_uri()], name
            assert page.complaints() == [], name
        outline = page.value("[...document.querySelectorAll('h1,h2,h3,h4,h5')].map(h => +h.tagName[1])")
        assert outline[0] == 1 and all(b - a <= 1 for a, b in itertools.pairwise(outline))
        assert page.value("[...document.querySelectorAll('svg')].every(s => s.querySelector('title') && s.querySelector('desc'))")
        ids = page.value("[...document.querySelectorAll('[id]')].map(e => e.id)")
        assert len(ids) == len(set(ids))
        assert page.value("[...document.querySelectorAll('nav a')].every(a => document.querySelector(a.hash))")
        closed = "document.querySelector('details:not([open]) article').checkVisibility({contentVisibilityAuto: true})"
        assert page.value("document.querySelectorAll('details:not([open])').length") == 1
        assert page.value(closed) is False
        page.call("Emulation.setEmulatedMedia", media="print", features=[{"name": "prefers-color-scheme", "value": "dark"}])
        assert page.value(closed) is True, "closed parts are printed, too"
        assert page.value("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
        page.screenshot(tmp_path / "print.png", whole=True)
        page.pdf(tmp_path / "report.pdf")
    assert (tmp_path / "report.pdf").read_bytes()[:5] == b"%PDF-"


@needs_chromium
def test_the_browser_kit_would_see_a_request_and_an_error(tmp_path):
    """What the test above relies on: a page that does ask for something and complain is noticed."""
    bad = tmp_path / "bad.html"
    bad.write_text("<title>x</title><img src='absent.png'><script>console.error('no'); undefined_name()</script>")
    with chromium.browser(tmp_path) as page:
        page.look(width=400, height=400)
        page.open(bad)
        assert (tmp_path / "absent.png").as_uri() in page.requests()
        assert len(page.complaints()) >= 2


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
