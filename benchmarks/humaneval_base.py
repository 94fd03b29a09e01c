"""The small base model on HumanEval: how many of the 164 problems it solves, and what that costs.

    python benchmarks/humaneval_base.py MODEL_FOLDER [--template chat] [--quick] [--threads 2] [--stop fence] [--batch-sizes 16 32] [--out FOLDER]

MODEL_FOLDER is what `clusterft.models` converts the GGUF file to, or any folder that transformers reads. The base model solves a
handful; the number depends on the prompt, so template, stop and precision are in the metric's note. In bfloat16 it also depends on the
batches, because rounding does: where two tokens are almost equally likely, another batch writes another text. So the problems are asked
once for every batch size, and what differs is named. `--quick` takes the 16 problems of the laptop scale. Prints metrics, solved problems
and seconds as JSON; with all problems also to results/humaneval_base.json.
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


def measure(model: Path, out: Path, batch_size: int, given: argparse.Namespace) -> dict:
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
    options = {"stop": given.stop, "max_new_tokens": given.max_new_tokens, "batch_size": batch_size}
    evaluator = HumanEval(context=context, subset=LAPTOP if given.quick else None, **options)
    evaluator.preflight()
    started, cpu = time.perf_counter(), time.process_time()
    metrics = evaluator.evaluate(model, out)
    rows = [json.loads(line) for line in (out / "per_problem.jsonl").read_text().splitlines()]
    return {
        "batch_size": batch_size,
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
    parser.add_argument("--batch-sizes", type=int, nargs="+", default=[16, 32])
    parser.add_argument("--precision", default="bf16_autocast")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--assets", type=Path, default=Path("assets"))
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--out", type=Path, default=None)
    given = parser.parse_args()
    with TemporaryDirectory() as folder:
        out = given.out or Path(folder)
        runs = [measure(given.model, out / f"batch-{size}", size, given) for size in given.batch_sizes]
        report = {"runs": runs, "texts_that_differ": differing(out, given.batch_sizes)}
    print(json.dumps(report, indent=1))
    if not given.quick:
        RESULTS.parent.mkdir(parents=True, exist_ok=True)
        RESULTS.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


def differing(out: Path, batch_sizes: list[int]) -> int:
    """Problems whose programme is not the same for all batch sizes."""
    programmes: dict[str, set[str]] = {}
    for size in batch_sizes:
        for line in (out / f"batch-{size}" / "samples.jsonl").read_text().splitlines():
            row = json.loads(line)
            programmes.setdefault(row["task_id"], set()).add(row["solution"])
    return sum(len(found) > 1 for found in programmes.values())


def markdown(report: dict) -> str:
    """One line a batch size: the score, which problems, what it cost; then how the problems were asked."""
    lines = []
    for run in report["runs"]:
        for m in run["metrics"]:
            score = f"{m['task']} {m['name']} {100 * m['value']:.1f} % ± {100 * m['stderr']:.1f} of {m['n']}"
            cost = f"{run['new_tokens']:,} new tokens, {run['cpu_seconds']:.0f} CPU s, {run['wall_seconds']:.0f} s of wall time"
            solved = ", ".join(name.removeprefix("HumanEval/") for name in run["solved"])
            lines.append(f"- {run['batch_size']} problems at once: {score}; {len(run['solved'])} solved: {solved}. {cost}.")
    note = report["runs"][0]["metrics"][0]["note"]
    different = (
        f"{report['texts_that_differ']} programmes differ between the batch sizes, by rounding alone; in float32 none would."
    )
    return "\n".join([*lines, "", f"{different} Asked with: {note}."])


if __name__ == "__main__":
    main()
