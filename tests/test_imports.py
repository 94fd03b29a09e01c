"""Who may import whom (docs/architecture.md), read from the source."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = {
    "clusterft": ROOT / "src/clusterft",
    "baselines": ROOT / "baselines",
    "eval": ROOT / "eval",
    "experiments": ROOT / "experiments",
}


def imports_of(path):
    """Module names that a file imports anywhere in it."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {a.name for a in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            found |= {node.module} | {f"{node.module}.{a.name}" for a in node.names}
    return found


def files(package):
    return sorted(PACKAGES[package].rglob("*.py"))


def offenders(package, *forbidden):
    return [
        f"{path.relative_to(ROOT)} imports {name}"
        for path in files(package)
        for name in sorted(imports_of(path))
        if any(name == f or name.startswith(f + ".") for f in forbidden)
    ]


def test_every_package_has_files():
    assert all(len(files(p)) > 1 for p in PACKAGES)


@pytest.mark.parametrize(
    ("package", "forbidden"),
    [
        ("clusterft", ("baselines", "eval", "experiments")),
        ("baselines", ("eval", "experiments", "clusterft.runner", "clusterft.trainer", "clusterft.launch", "clusterft.stages")),
        ("eval", ("baselines", "experiments", "clusterft.runner", "clusterft.trainer", "clusterft.stages")),
        (
            "experiments",
            ("torch", "transformers", "baselines", "eval", "clusterft.trainer", "clusterft.runner", "clusterft.stages"),
        ),
    ],
)
def test_layers_import_downwards_only(package, forbidden):
    assert offenders(package, *forbidden) == []


def test_records_and_interfaces_stand_at_the_bottom():
    for name, allowed in (("records", set()), ("interfaces", {"clusterft.records"})):
        own = {i for i in imports_of(PACKAGES["clusterft"] / f"{name}.py") if i.startswith("clusterft")}
        assert {i for i in own if not any(i.startswith(a) for a in allowed)} == set()


def test_tables_are_built_without_torch():
    code = "import sys, experiments.drive, experiments.render; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False).returncode == 0


def test_baselines_never_import_each_other():
    names = {p.stem for p in files("baselines")} - {"__init__"}
    found = [
        f"{path.name} imports {name}"
        for path in files("baselines")
        for name in imports_of(path)
        if name.startswith("baselines.") and name.split(".")[1] in names - {path.stem}
    ]
    assert found == []
