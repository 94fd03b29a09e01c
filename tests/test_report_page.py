"""How a report looks: hostile text stays text, colours can be read, and the page in a real browser."""

from __future__ import annotations

import dataclasses
import itertools
import re
import subprocess
import sys
import time

import browser as chromium
import pytest
import report_kit as kit
from lxml import html as lxml_html
from markdown_it import MarkdownIt

from clusterft.report import write_report
from clusterft.report.facts import Place
from clusterft.report.html import html_report
from clusterft.report.markdown import markdown_report
from clusterft.report.text import excerpt, md_block, short_names, visible


@pytest.fixture
def facts():
    return kit.facts()


@pytest.fixture
def everything():
    return kit.everything()


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
            names = "[...document.querySelectorAll('th.any')].filter(e => e.checkVisibility()).map(e => e.clientWidth)"
            assert min(page.value(names)) >= 90, "names beside numbers are not squeezed to a letter a line"
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
        # Chromium applies the new medium with its next frame.
        assert any(page.value(closed) is True or time.sleep(0.1) for _ in range(100)), "closed parts are printed, too"
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
