"""The pages: links resolve, the quick start runs as it stands, the site builds strictly, the page on data and models is true."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from hydra import compose, initialize_config_dir

from clusterft import stages
from clusterft.app import register_schema
from clusterft.cli import main
from clusterft.models import parameter_count

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", ROOT / "CHANGELOG.md", *sorted(DOCS.glob("*.md"))]


def prose(page: Path) -> str:
    """A page without its code."""
    text = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    return re.sub(r"`[^`\n]*`", "", text)


def anchors(page: Path) -> set[str]:
    """The anchors that Markdown gives a page's headings."""
    heads = re.findall(r"^#+ +(.*)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", h.strip().lower()).replace(" ", "-") for h in heads}


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_relative_links_resolve(page):
    for target in re.findall(r"\]\(([^)\s]+)\)", prose(page)):
        if re.match(r"[a-z]+:", target):
            continue
        path, _, anchor = target.partition("#")
        there = (page.parent / path).resolve() if path else page
        assert there.exists(), f"{page.name}: {target} is not there"
        assert ROOT in [there, *there.parents], f"{page.name}: {target} leaves the repository"
        assert not anchor or there.suffix != ".md" or anchor in anchors(there), f"{page.name}: no heading {target}"


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_files_that_pages_name_are_there(page):
    """A path in code style that begins with a folder of the repository, without marks of invention, is a file of it."""
    text = page.read_text(encoding="utf-8")
    invented = set(re.findall(r"^(?:One file, )?`([\w./-]+)`:$", text, re.MULTILINE))
    for name in re.findall(r"`((?:conf|src|baselines|eval|experiments|examples|benchmarks|tests|docs)/[\w./-]+)`", text):
        assert name in invented or (ROOT / name).exists(), f"{page.name} names {name}"


def test_the_readme_is_short():
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) < 250


@pytest.mark.slow
def test_the_site_builds_without_a_warning(tmp_path):
    pytest.importorskip("mkdocs")
    pytest.importorskip("mkdocstrings_handlers.python")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "-d", str(tmp_path / "site")]
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, env={**os.environ, "NO_MKDOCS_2_WARNING": "1"}, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    page = (tmp_path / "site" / "api.html").read_text(encoding="utf-8")
    assert "weighted_loss" in page and "<strong>keep, rows, ratio</strong>" in page
    outside = [u for u in re.findall(r'(?:src|href)="(https?://[^"]+)"', page) if "squidfunk" not in u and "mkdocs" not in u]
    assert not outside, outside
    for name in DOCS.glob("*.md"):
        assert (tmp_path / "site" / f"{name.stem}.html").is_file()


# -- quick start ----------------------------------------------------------------------------------------------------------------


def shell_blocks(page: Path) -> list[tuple[str, str]]:
    """(commands, the text from there to the next block) for every sh block of a page."""
    pieces = re.split(r"^```sh\n(.*?)^```$", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    return list(zip(pieces[1::2], pieces[2::2], strict=True))


def promised(text: str) -> list[str]:
    """Paths in code style that a page says a command leaves: of my.jsonl, subset/ and full/."""
    return re.findall(r"`((?:my\.jsonl|subset/|full/)[\w./*-]*)`", text)


def run_block(commands: str, capfd) -> str:
    """Runs a block in the working folder and returns what it printed: `clusterft` in this process, which spares each command the import of
    torch, everything else in bash. Any status but 0, or the one that the page tests for, fails."""
    for line in re.split(r"\n(?=clusterft )", commands.strip()):
        if line.startswith("clusterft "):
            command, _, tested = line.partition("||")
            expected = int(re.fullmatch(r" test \$\? -eq (\d)", tested)[1]) if tested else 0
            assert main(shlex.split(command)[1:]) == expected, line
        else:
            subprocess.run(["bash", "-euo", "pipefail", "-c", line], check=True)
    return capfd.readouterr().out


@pytest.mark.slow
def test_every_command_of_the_quick_start_does_what_the_page_says(tmp_path, monkeypatch, capfd):
    home = tmp_path / "home"
    home.mkdir()
    monkeypatch.chdir(home)
    monkeypatch.setenv("CLUSTERFT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    said = []
    for commands, after in shell_blocks(DOCS / "quickstart.md"):
        said.append(run_block(commands.replace("smollm2_135m", "tiny"), capfd))
        for path in promised(after):
            assert list(home.glob(path.rstrip("/"))), f"{path} is promised after {commands}"
    data, doctor, choice, training, verdict = said
    assert sum(1 for _ in (home / "my.jsonl").open()) == 201 and data == ""
    assert "201 rows read" in doctor and "empty_response: 1 (my.jsonl line 201)" in doctor
    assert "nothing is written" in choice and "60 of 180 rows kept" in choice
    assert "trained" in training and "heldout/nll_micro" in training
    assert "heldout" in verdict and any(word in verdict for word in ("no worse", "cannot tell", "worse"))
    source = (home / "my.jsonl").read_bytes().splitlines()
    kept = (home / "subset" / "subset.jsonl").read_bytes().splitlines()
    assert len(kept) == 60 and set(kept) <= set(source)
    assert pq.read_table(home / "subset" / "selection.parquet").num_rows == 180


# -- a data set and a model of one's own ------------------------------------------------------------------------------------------


@pytest.fixture
def composed_page(tmp_path):
    """The page's data set and model, in a copy of conf/ at the places that the page says."""
    text = (DOCS / "add-data-or-model.md").read_text(encoding="utf-8")
    files = re.findall(r"^One file, `(conf/[\w/]+\.yaml)`:\n\n```yaml\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    assert [name.split("/")[1] for name, _ in files] == ["data", "model"]
    shutil.copytree(ROOT / "conf", tmp_path / "conf")
    for name, content in files:
        (tmp_path / name).write_text(content, encoding="utf-8")
    rows = [{"question": f"Who wrote poem {i}?", "answer": f"Poet {i % 5}, in spring.", "poet": f"p{i % 5}"} for i in range(40)]
    (tmp_path / "poems.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    register_schema()

    def make(*overrides: str):
        with initialize_config_dir(str(tmp_path / "conf"), version_base="1.3"):
            return compose("config", overrides=["+scale=smoke", f"runtime.cache_dir={tmp_path}/cache", *overrides])

    return make


def test_the_page_s_data_set_is_read_with_its_columns_and_families(composed_page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    cfg = composed_page("data=poems", "evaluators=heldout_only", "selector=full")
    ready = stages.prepare(cfg)
    assert (len(ready.pool), len(ready.heldout), len(ready.validation["heldout"])) == (32, 6, 2)
    assert ready.pool.examples[0].prompt.startswith("Who wrote poem") and set(ready.heldout_groups) <= {f"p{i}" for i in range(5)}
    assert ready.report.notes == ()


def test_the_page_s_model_has_the_shape_of_the_real_one(composed_page):
    assert parameter_count(composed_page("data=poems", "model=qwen25_05b").model) == 494_032_768
