"""Notebooks are views: executed top to bottom, outputs stripped in git, importing nothing of ours but `experiments`, writing nothing."""

from __future__ import annotations

import ast
import json
import subprocess
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

ROOT = Path(__file__).resolve().parents[1]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
OURS = ("clusterft", "baselines", "eval", "benchmarks")


def test_the_three_are_there() -> None:
    assert [path.name for path in NOTEBOOKS] == ["01_selection.ipynb", "02_tables.ipynb", "03_theory.ipynb"]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.stem)
def test_outputs_are_stripped_and_only_experiments_is_imported(path: Path) -> None:
    for cell in json.loads(path.read_text(encoding="utf-8"))["cells"]:
        if cell["cell_type"] != "code":
            continue
        assert cell["outputs"] == [] and cell["execution_count"] is None
        for node in ast.walk(ast.parse("".join(cell["source"]))):
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            assert not [name for name in names if name.split(".")[0] in OURS]


@pytest.mark.slow
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.stem)
def test_a_notebook_runs_top_to_bottom(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MPLBACKEND", "module://matplotlib_inline.backend_inline")
    before = changed_files()
    book = nbformat.read(path, as_version=4)
    NotebookClient(book, timeout=300, kernel_name="python3", resources={"metadata": {"path": str(path.parent)}}).execute()
    assert any(cell.get("outputs") for cell in book.cells if cell.cell_type == "code")
    assert changed_files() == before


def changed_files() -> str:
    """What git sees as changed below the folders that a notebook reads."""
    command = ["git", "status", "--porcelain", "results", "docs", "examples", "notebooks"]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False).stdout
