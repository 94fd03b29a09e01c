"""Scores a file of samples in evalplus's form, in the sandbox, without any model.

    python -m eval.score_samples SAMPLES --problems PROBLEMS --dataset humaneval [--sandbox best_effort] [--json]

SAMPLES has one line a problem, `task_id` with `solution` or `completion`; PROBLEMS is a local file in evalplus's override
form. Prints pass@1 and writes `<samples>.verdicts.jsonl` beside the samples, always anew: no result of an earlier call is
ever read.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from clusterft.records import Metric
from eval.code import summarise, user_cache, write_verdicts
from eval.errors import EvaluationError
from eval.evalplus_adapter import check_environment, check_harness, samples_of, score
from eval.problem_set import load_override, read_jsonl
from eval.sandbox import MODES, Sandbox


def score_file(samples: Path, problems_file: Path, dataset: str, *, sandbox: str = "require", parallel: int = 1) -> list[Metric]:
    """pass@1 of a sample file. Problems without a sample count as failed and are named. Raises EvaluationError,
    FileNotFoundError.
    """
    check_environment()
    problems = load_override(problems_file, dataset)
    solutions = samples_of(problems, read_jsonl(samples), str(samples))
    with Sandbox(sandbox, parallel) as box:
        harness = check_harness(problems, box, user_cache())
        verdicts = score(problems, solutions, box)
        note = f"{problems.source}; {harness}; {box.note}"
    write_verdicts(samples.with_name(samples.name + ".verdicts.jsonl"), dataset, verdicts, {}, problems.has_plus)
    return summarise(dataset, problems, verdicts, note)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m eval.score_samples", description=__doc__.split("\n")[0])
    parser.add_argument("samples", type=Path)
    parser.add_argument("--problems", type=Path, required=True, help="evalplus's override form, .gz or not")
    parser.add_argument("--dataset", choices=["humaneval", "mbpp"], required=True, help="whose oracle rules apply")
    parser.add_argument("--sandbox", choices=MODES, default="require")
    parser.add_argument("--parallel", type=int, default=1, help="problems at once")
    parser.add_argument("--json", action="store_true", help="print the metrics as JSON")
    given = parser.parse_args(arguments)
    try:
        metrics = score_file(given.samples, given.problems, given.dataset, sandbox=given.sandbox, parallel=given.parallel)
    except (EvaluationError, FileNotFoundError) as problem:
        print(f"error: {problem}", file=sys.stderr)
        return 2
    if given.json:
        print(json.dumps([asdict(m) for m in metrics], indent=2))
    else:
        for m in metrics:
            print(f"{m.task} {m.name} {m.value:.4f} (n={m.n}, data {m.dataset_hash}; {m.note})")
    return 0


if __name__ == "__main__":
    sys.exit(main())
