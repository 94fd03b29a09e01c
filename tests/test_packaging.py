"""A built wheel carries conf/, the report's parts and the console script, and works away from the checkout."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PARTS = ("pyproject.toml", "README.md", "LICENSE", "requirements.txt", "src", "conf", "baselines", "eval", "experiments")


@pytest.fixture(scope="module")
def installed(tmp_path_factory) -> Path:
    """The wheel's contents in a folder, built from a copy so that the checkout stays clean."""
    setuptools = pytest.importorskip("setuptools")
    if int(setuptools.__version__.split(".")[0]) < 75:
        pytest.skip("setuptools is older than pyproject.toml asks for")
    home = tmp_path_factory.mktemp("wheel")
    (home / "tree").mkdir()
    ignore = shutil.ignore_patterns("__pycache__", "*.egg-info")
    for name in PARTS:
        source = ROOT / name
        shutil.copytree(source, home / "tree" / name, ignore=ignore) if source.is_dir() else shutil.copy(
            source, home / "tree" / name
        )
    code = f"from setuptools.build_meta import build_wheel; build_wheel({str(home)!r})"
    subprocess.run([sys.executable, "-c", code], cwd=home / "tree", check=True, capture_output=True)
    (wheel,) = home.glob("*.whl")
    zipfile.ZipFile(wheel).extractall(home / "site")
    return home / "site"


@pytest.mark.slow
def test_the_wheel_holds_what_the_commands_need(installed):
    for name in (
        "clusterft/conf/config.yaml",
        "clusterft/conf/scale/local.yaml",
        "clusterft/py.typed",
        "clusterft/report/style.css",
    ):
        assert (installed / name).is_file(), name
    there = {str(p.relative_to(installed / "clusterft" / "conf")) for p in (installed / "clusterft" / "conf").rglob("*.yaml")}
    assert there == {str(p.relative_to(ROOT / "conf")) for p in (ROOT / "conf").rglob("*.yaml")}
    assert list((installed / "clusterft" / "report" / "templates").glob("*.j2"))
    (entry,) = installed.glob("*.dist-info/entry_points.txt")
    assert "clusterft = clusterft.cli:main" in entry.read_text()


@pytest.mark.slow
def test_an_installed_package_composes_from_its_own_conf(installed, tmp_path):
    data = tmp_path / "a.jsonl"
    data.write_text('{"instruction": "a", "output": "b"}\n' * 30)
    code = (
        "import clusterft, sys; from pathlib import Path; from clusterft.composing import Request, compose_request, conf_dir\n"
        f"assert conf_dir() == Path({str(installed)!r}, 'clusterft', 'conf'), conf_dir()\n"
        "cfg = compose_request(Request((Path('a.jsonl'),), 'tiny', rows=4)); assert cfg.data.holdout_rows == 3\n"
        "from clusterft.cli import main; sys.exit(main(['doctor', 'a.jsonl', '--model', 'tiny']))"
    )
    where = {**os.environ, "PYTHONPATH": str(installed), "CLUSTERFT_CACHE": str(tmp_path / "cache")}
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=where, capture_output=True, text=True, check=False)
    assert done.returncode == 1 and "29 rows repeat an earlier one" in done.stdout, done.stderr
