"""What the README shows is what the committed results say, and the committed results are what the committed records give."""

import os
import subprocess
import sys

import pytest
from composed import ROOT

from experiments.readme import demoted, filled


def results_made_here() -> bool:
    """Whether tables were made anew in this tree, with this machine's times: then the committed ones are not in the files."""
    command = ["git", "status", "--porcelain", "-uno", "--", "results"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    return done.returncode == 0 and bool(done.stdout.strip())


committed = pytest.mark.skipif(
    results_made_here(), reason="results/ holds tables that were made here; `git checkout results` for the committed"
)


@committed
def test_every_block_is_filled_from_its_file():
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert text.count("<!-- begin ") == 2
    assert filled(text, ROOT) == text


def test_a_block_without_a_file_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"nothing\.md"):
        filled("<!-- begin nothing.md -->\n<!-- end -->", tmp_path)


def test_headings_of_a_page_go_below_the_readmes():
    assert demoted("# a\n\n## b\n# c") == "### a\n\n#### b\n### c"
    assert demoted("## a\ntext # not a heading") == "## a\ntext # not a heading"


@committed
@pytest.mark.parametrize("experiment", ["table2", "table1", "table4"])
def test_committed_tables_are_what_their_committed_records_give(experiment, tmp_path):
    command = [sys.executable, "run.py", f"+experiment={experiment}", "+scale=laptop", "check=true"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env={**os.environ}, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
