"""`make bench` and `make bench-quick`: every benchmark, one after the other, and their tables on one page.

    python -m benchmarks [--quick]

Each script measures against its peers in its own run and prints a Markdown table; the page is benchmarks/results/README.md (or
quick.md), which the project's README quotes. Quick grids take under two minutes on two idle cores.
"""

from __future__ import annotations

import argparse
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
            "Non-inferiority verdict by simulation": ["verdict_simulation.py", "--draws", "200"],
        }
    return {
        "Clustering": ["bench_clustering.py"],
        "Gradient-proxy pass": ["bench_proxy.py"],
        "Selection end to end": ["bench_selection.py"],
        "How well signals follow true gradients": ["bench_fidelity.py"],
        "LESS gradients and projection": ["bench_less.py", "--model", str(model)],
        "Non-inferiority verdict by simulation": ["verdict_simulation.py"],
        "HumanEval, base model, all 164 problems": ["humaneval_base.py", str(model)],
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true")
    quick = parser.parse_args().quick
    from omegaconf import OmegaConf

    from clusterft.gguf_convert import converted_folder
    from clusterft.models import gguf_path

    model = OmegaConf.load(ROOT / "conf/model/smollm2_135m.yaml")
    folder = converted_folder(gguf_path(model, ROOT / "assets"), model.sha256)
    (HERE / "scratch").mkdir(exist_ok=True)
    page = ["# Benchmarks", "", f"Made by `make {'bench-quick' if quick else 'bench'}`; CPU seconds unless said otherwise."]
    failed = 0
    for title, command in scripts(quick, Path(folder)).items():
        print(f"== {title}", file=sys.stderr, flush=True)
        started = time.perf_counter()
        done = subprocess.run([sys.executable, *command], cwd=HERE, stdout=subprocess.PIPE, text=True, check=False)
        failed += done.returncode != 0
        page += ["", f"## {title}", "", f"`python benchmarks/{command[0]}`", "", done.stdout.strip()]
        print(f"{done.stdout}\n({time.perf_counter() - started:.0f} s)", flush=True)
    target = HERE / ("scratch/quick.md" if quick else "results/README.md")
    target.write_text("\n".join(page) + "\n", encoding="utf-8")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
