"""The small base model on HumanEval: how many of the 164 problems it solves, and what that costs.

    python benchmarks/humaneval_base.py MODEL_FOLDER [--template chat] [--quick] [--threads 2] [--stop fence] [--out FOLDER]

MODEL_FOLDER is what `clusterft.models` converts the GGUF file to, or any folder that transformers reads. The base model solves a
handful; the number depends on the prompt, so template, stop and precision are in the metric's note. `--quick` takes the 16
problems of the laptop scale. Prints metrics, solved problems and seconds as JSON; with all problems also to results/humaneval_base.json.
"""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import asdict
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace

from clusterft.interfaces import EvalContext
from eval.humaneval import HumanEval

RESULTS = Path(__file__).resolve().parent / "results" / "humaneval_base.json"
LAPTOP = {"rule": "shortest_reference", "n": 16}


def measure(model: Path, out: Path, given: argparse.Namespace) -> dict:
    """Scores `model`; the seconds hold loading, generation and scoring, not the harness check."""
    context = EvalContext(
        model=SimpleNamespace(attention="sdpa", trust_remote_code=False),
        template=given.template,
        max_length=1024,
        assets_dir=given.assets,
        device=given.device,
        precision=given.precision,
        threads=given.threads,
        progress=True,
    )
    evaluator = HumanEval(
        context=context, subset=LAPTOP if given.quick else None, stop=given.stop, max_new_tokens=given.max_new_tokens
    )
    evaluator.preflight()
    started, cpu = time.perf_counter(), time.process_time()
    metrics = evaluator.evaluate(model, out)
    rows = [json.loads(line) for line in (out / "per_problem.jsonl").read_text().splitlines()]
    return {
        "metrics": [asdict(m) for m in metrics],
        "solved": [r["id"] for r in rows if r["value"]],
        "new_tokens": sum(r["n_tokens"] for r in rows),
        "wall_seconds": round(time.perf_counter() - started, 1),
        "cpu_seconds": round(time.process_time() - cpu, 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("--template", default="chat")
    parser.add_argument("--stop", default="fence", choices=["fence", "fence_or_toplevel"])
    parser.add_argument("--max-new-tokens", type=int, default=256)
    parser.add_argument("--precision", default="bf16_autocast")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--assets", type=Path, default=Path("assets"))
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--out", type=Path, default=None)
    given = parser.parse_args()
    with TemporaryDirectory() as folder:
        report = measure(given.model, given.out or Path(folder), given)
    print(json.dumps(report, indent=1))
    if not given.quick:
        RESULTS.parent.mkdir(parents=True, exist_ok=True)
        RESULTS.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


def markdown(report: dict) -> str:
    """One paragraph: the score, which problems, how it was asked."""
    lines = [
        f"{m['task']} {m['name']}: {100 * m['value']:.1f} % ± {100 * m['stderr']:.1f} of {m['n']} problems ({m['note']})."
        for m in report["metrics"]
    ]
    lines.append(
        f"Solved: {', '.join(report['solved'])}. {report['new_tokens']:,} new tokens, {report['cpu_seconds']:.0f} CPU s, "
        f"{report['wall_seconds']:.0f} s of wall time."
    )
    return "\n".join(lines)


if __name__ == "__main__":
    main()
