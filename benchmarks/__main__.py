"""`make bench` and `make bench-quick`: every benchmark, one after the other, and their tables on one page.

    python -m benchmarks [--quick]
    python -m benchmarks --page      only the page, from the committed results/*.json

Each script measures against its peers in its own run, writes results/NAME.json and prints a Markdown table. The page is
results/README.md; the project's README quotes a shorter one, results/in_readme.md. Quick grids take under two minutes on two cores and leave the page alone.
"""

from __future__ import annotations

import argparse
import importlib
import json
import subprocess
import sys
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent


def scripts(quick: bool, model: Path) -> dict[str, list[str]]:
    """Title -> command line below benchmarks/."""
    if quick:
        return {
            "Clustering": ["bench_clustering.py", "--quick", "--out", str(HERE / "scratch" / "clustering_quick.json")],
            "Gradient-proxy pass": ["bench_proxy.py", "--quick"],
            "Selection end to end": ["bench_selection.py", "--quick"],
            "LESS gradients and projection": ["bench_less.py", "--quick", "--model", str(model)],
            "Two million rows": ["bench_scale.py", "--rows", "20000", "--out", str(HERE / "scratch" / "scale_quick.json")],
            "Non-inferiority verdict by simulation": ["verdict_simulation.py", "--draws", "200"],
        }
    return {
        "Clustering": ["bench_clustering.py"],
        "Gradient-proxy pass": ["bench_proxy.py"],
        "Selection end to end": ["bench_selection.py"],
        "Two million rows": ["bench_scale.py"],
        "A million rows in": ["bench_load.py"],
        "Bytes sent in a step": ["bench_traffic.py"],
        "How well signals follow true gradients": ["bench_fidelity.py"],
        "LESS gradients and projection": ["bench_less.py", "--model", str(model)],
        "Non-inferiority verdict by simulation": ["verdict_simulation.py"],
        "HumanEval, base model, all 164 problems": ["humaneval_base.py", str(model)],
        "Medical questions, base model": ["medical_questions.py", "--out", str(HERE / "scratch" / "medical")],
    }


PAGE = (
    ("Clustering", "bench_clustering", "clustering", lambda module, data: module.page(data)),
    ("Gradient-proxy pass", "bench_proxy", "proxy", lambda module, data: module.markdown(data)),
    ("Selection end to end", "bench_selection", "selection", lambda module, data: module.markdown(data)),
    ("Two million rows", "bench_scale", "scale", lambda module, data: module.markdown(data)),
    ("A million rows in", "bench_load", "load", lambda module, data: module.markdown(data)),
    ("Bytes sent in a step", "bench_traffic", "traffic", lambda module, data: module.markdown(data)),
    ("How well signals follow true gradients", "bench_fidelity", "fidelity", lambda module, data: module.markdown(data)),
    ("LESS gradients and projection", "bench_less", "less", lambda module, data: module.markdown(data)),
    ("HumanEval, base model, all 164 problems", "humaneval_base", "humaneval_base", lambda module, data: module.markdown(data)),
    ("Medical questions, base model", "medical_questions", "medical", lambda module, data: module.markdown(data)),
)


ELSEWHERE = (
    "Two million rows",
    "A million rows in",
    "Bytes sent in a step",
    "How well signals follow true gradients",
    "HumanEval, base model, all 164 problems",
    "Medical questions, base model",
)
"""What only the full page has: the project's README has room for few tables."""


def page(leave_out: tuple[str, ...] = ()) -> str:
    """The tables of all committed results; a benchmark without one is named as not run."""
    sys.path.insert(0, str(HERE))
    lines = [
        "# Benchmarks",
        "",
        "Made by `make bench`; CPU seconds unless said otherwise. Each table compares versions within one run.",
    ]
    for title, module, name, render in (one for one in PAGE if one[0] not in leave_out):
        path = HERE / "results" / f"{name}.json"
        text = render(importlib.import_module(module), json.loads(path.read_text())) if path.exists() else "not run yet"
        lines += ["", f"### {title}", "", f"`python benchmarks/{module}.py`", "", text]
    return "\n".join(lines) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--page", action="store_true")
    options = parser.parse_args()
    failed = 0 if options.page else run_all(options.quick)
    if not options.quick:
        (HERE / "results" / "README.md").write_text(page(), encoding="utf-8")
        (HERE / "results" / "in_readme.md").write_text(page(ELSEWHERE), encoding="utf-8")
    return int(failed > 0)


def run_all(quick: bool) -> int:
    """Runs every script; the number that failed."""
    from omegaconf import OmegaConf

    from clusterft.gguf_convert import converted_folder
    from clusterft.models import gguf_path

    model = OmegaConf.load(ROOT / "conf/model/smollm2_135m.yaml")
    folder = converted_folder(gguf_path(model, ROOT / "assets"), model.sha256)
    (HERE / "scratch").mkdir(exist_ok=True)
    failed = 0
    for title, command in scripts(quick, Path(folder)).items():
        print(f"== {title}", file=sys.stderr, flush=True)
        started = time.perf_counter()
        done = subprocess.run([sys.executable, *command], cwd=HERE, check=False)
        failed += done.returncode != 0
        print(f"({time.perf_counter() - started:.0f} s)", flush=True)
    return failed


if __name__ == "__main__":
    sys.exit(main())
