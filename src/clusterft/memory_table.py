"""The table of docs/engines.md: `python -m clusterft.memory_table` prints it, `--write docs/engines.md` puts it between its marks."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from omegaconf import OmegaConf

from clusterft.memory_plan import GPU_GIB, memory_plan
from clusterft.overrides import UserError

ROOT = Path(__file__).resolve().parents[2]
BEGIN, END = "<!-- begin python -m clusterft.memory_table -->", "<!-- end -->"
MODELS = ("codellama_python_7b", "codellama_python_13b")
CASES = (
    ("ddp", "adafactor"),
    ("fsdp", "adafactor"),
    ("fsdp", "adamw"),
    ("deepspeed_zero2", "adamw"),
    ("deepspeed_zero3", "adamw"),
)
GPUS = (4, 8)


def rows() -> Iterator[list[str]]:
    """One line a model, engine, optimiser and number of GPUs, with the paper's trainer otherwise."""
    trainer: Any = OmegaConf.load(ROOT / "conf/trainer/paper.yaml")
    for name in MODELS:
        model = OmegaConf.load(ROOT / f"conf/model/{name}.yaml")
        for gpus in GPUS:
            for engine, optimizer in CASES:
                settings = OmegaConf.merge(trainer, {"engine": engine, "optimizer": optimizer, "workers": gpus})
                plan = memory_plan(model, settings, SimpleNamespace(processes=gpus, device="cuda"))
                parts = (plan.weights, plan.gradients, plan.optimizer, plan.activations, plan.logits, plan.work, plan.libraries)
                shown = [f"{part / 2**30:.1f}" for part in parts]
                yield [name, str(gpus), engine, optimizer, *shown, f"{plan.gib:.1f}", "yes" if plan.gib <= GPU_GIB else "no"]


def table() -> str:
    """The table as Markdown, GiB a GPU."""
    head = ["model", "GPUs", "engine", "optimiser", "weights", "gradients", "optimiser state", "activations", "logits", "work"]
    head += ["libraries", "peak", "fits 80 GB"]
    lines = [head, ["---"] * len(head), *rows()]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def main(argv: list[str]) -> None:
    """Raises UserError if the file has no marks."""
    if argv[:1] != ["--write"]:
        print(table())
        return
    page = Path(argv[1])
    text = page.read_text(encoding="utf-8")
    if BEGIN not in text or END not in text:
        raise UserError(f"{page} has no {BEGIN} ... {END} to put the table between")
    before, rest = text.split(BEGIN, 1)
    page.write_text(f"{before}{BEGIN}\n\n{table()}\n\n{END}{rest.split(END, 1)[1]}", encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
