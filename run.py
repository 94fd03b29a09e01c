"""The composition root: Hydra composes a configuration, this file decides what to do with it.

    python run.py +experiment=table2 +scale=laptop             plan, run what is missing, render
    python run.py +experiment=table2 +scale=laptop plan=true   only the plan
    python run.py +experiment=table2 +scale=laptop --check     do the committed records still give the committed results?
    python run.py +experiment=table2 +scale=laptop --render    write the committed results again from the committed records; run nothing
    python run.py +scale=laptop --explain table2 "CluSTER r=1.00" average      the runs behind a number
    python run.py +experiment=table2 cell=7                    one cell (array jobs: the index is the array's)
    python run.py +experiment=table2 status=true               what is done, running, queued, failed, missing
    python run.py -m +experiment=table2 cell='range(0,4)'      several cells, by Hydra's multirun
    python run.py -m +experiment=figure4 selector.ratio=0.25,0.5 hydra/launcher=submitit_slurm     as SLURM jobs
    python run.py +scale=smoke selector=random seed=1          one run without a table

This is the only file that may import every layer.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path

if sys.version_info < (3, 11):  # noqa: UP036  (the sentence is for an older interpreter)
    sys.exit(f"Python 3.11 or newer is needed, this is {sys.version.split()[0]}: make PYTHON=python3.11 ...")

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException
from omegaconf import DictConfig

from clusterft.app import prepare_libraries, register_schema, run_cell, said_plainly
from clusterft.memory_plan import memory_lines
from clusterft.overrides import UserError, check_command_line, one_sentence, spelled_out
from clusterft.records import RunRecord
from clusterft.site_env import prepare_sweep

prepare_libraries()
register_schema()


def check(cfg: DictConfig) -> None:
    """Imported late: a full store renders without loading torch."""
    from clusterft.preflight import preflight

    preflight(cfg)


def one_run(cfg: DictConfig) -> RunRecord:
    from clusterft.runner import run_one

    return run_one(cfg)


def measure(cfg: DictConfig, artifacts: Sequence[str]) -> None:
    """Makes the artifacts of a finished run that its table reads."""
    from clusterft.analyse import analyse
    from clusterft.store import RunStore, run_id
    from experiments.measures import make_artifact

    name = run_id(cfg)
    run_dir = RunStore(Path(cfg.runtime.runs_dir)).path(name)
    analysed = analyse(cfg, run_dir)
    for artifact in artifacts:
        make_artifact(artifact, analysed, run_dir, name)


@hydra.main(version_base="1.3", config_path="conf", config_name="config")
def main(cfg: DictConfig) -> None:
    overrides = list(HydraConfig.get().overrides.task)
    with said_plainly():
        if cfg.experiment is None and cfg.plan:
            print("\n".join(memory_lines([cfg])))
        elif cfg.experiment is None:
            run_cell(cfg)
        else:
            from experiments.drive import run_experiment

            run_experiment(cfg, overrides, run=one_run, preflight=check, measure=measure)


if __name__ == "__main__":
    try:
        sys.argv[1:] = spelled_out(sys.argv[1:])
        check_command_line(sys.argv[1:])
        prepare_sweep(sys.argv[1:], Path(__file__).resolve().parent)
    except UserError as problem:
        sys.exit(f"error: {problem}")
    os.environ.setdefault("HYDRA_FULL_ERROR", "1")  # Hydra raises instead of printing its own page about a misspelt key
    try:
        main()
    except HydraException as problem:
        sys.exit(f"error: {one_sentence(problem)}")
