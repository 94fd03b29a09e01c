"""The composition root: Hydra composes a configuration, this file decides what to do with it.

    python run.py +experiment=table2 +scale=laptop             plan, run what is missing, render
    python run.py +experiment=table2 +scale=laptop plan=true   only the plan
    python run.py +experiment=table2 cell=7                    one cell (array jobs: the index is the array's)
    python run.py -m +experiment=table2 cell='range(0,4)'      several cells, by Hydra's multirun
    python run.py +scale=smoke selector=random seed=1          one run without a table

This is the only file that may import every layer.
"""

from __future__ import annotations

import sys

if sys.version_info < (3, 11):
    sys.exit(f"Python 3.11 or newer is needed, this is {sys.version.split()[0]}: make PYTHON=python3.11 ...")

import hydra  # noqa: E402
from hydra.core.hydra_config import HydraConfig  # noqa: E402
from omegaconf import DictConfig  # noqa: E402

from clusterft.app import register_schema, run_cell, said_plainly  # noqa: E402
from clusterft.records import RunRecord  # noqa: E402
from clusterft.overrides import UserError, check_command_line  # noqa: E402

register_schema()


def check(cfg: DictConfig) -> None:
    """Imported late: a full store renders without loading torch."""
    from clusterft.preflight import preflight

    preflight(cfg)


def one_run(cfg: DictConfig) -> RunRecord:
    from clusterft.runner import run_one

    return run_one(cfg)


@hydra.main(version_base="1.3", config_path="conf", config_name="config")
def main(cfg: DictConfig) -> None:
    overrides = list(HydraConfig.get().overrides.task)
    with said_plainly():
        if cfg.experiment is None:
            run_cell(cfg)
        else:
            from experiments.drive import run_experiment

            run_experiment(cfg, overrides, run=one_run, preflight=check)


if __name__ == "__main__":
    try:
        check_command_line(sys.argv[1:])
    except UserError as problem:
        sys.exit(f"error: {problem}")
    main()
