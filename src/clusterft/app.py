"""What `run.py` and the console script share: the schema, plain error messages, running one cell."""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from hydra.core.config_store import ConfigStore
from omegaconf import DictConfig
from omegaconf.errors import OmegaConfBaseException

from clusterft.config import RunConfig
from clusterft.overrides import UserError
from clusterft.stop_signals import leaving_on_signals
from clusterft.store import StoreError
from clusterft.text_rules import printable


def register_schema() -> None:
    """Puts the typed schema first in the defaults list: a misspelt key is an error that names it, also inside an experiment file."""
    ConfigStore.instance().store(name="run_schema", node=RunConfig)


def prepare_libraries() -> None:
    """Settings that torch and transformers read once, at import.

    No progress bars of weight files inside a run's own progress; large pages for torch's CPU memory, without which a training step of the
    small model spends 10 to 25 % of its time in page faults (values do not change). On a compute node of SLURM the hub is not asked
    unless the job says so (HF_HUB_OFFLINE=0): such nodes often have no way out, and each try would cost its time-out.
    """
    if "SLURM_JOB_ID" in os.environ:
        os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")


@contextmanager
def said_plainly(words: Callable[[str], str] = str) -> Iterator[None]:
    """Turns the errors that a person can mend into one sentence on stderr and exit code 2. words: the caller's terms for settings.

    A run that was asked to stop and wrote its checkpoint leaves with code 75 (EX_TEMPFAIL): schedulers requeue on it. Anything else is a fault of the program and keeps its stack trace; CLUSTERFT_TRACE=1 keeps it for every error.
    """
    if os.environ.get("CLUSTERFT_TRACE"):
        yield
        return
    try:
        with leaving_on_signals():
            yield
    except KeyboardInterrupt:
        print("interrupted; the same command goes on from what is finished", file=sys.stderr)
        sys.exit(130)  # 128 + SIGINT, as a shell has it
    except (UserError, StoreError, ValueError, FileNotFoundError, OmegaConfBaseException) as problem:
        _leave(words(str(problem)))
    except RuntimeError as problem:
        _leave_known(problem, words)
        raise
    except OSError as problem:
        if problem.errno not in _REMEDIES:
            raise
        what = f"{problem.strerror}: {problem.filename}" if problem.filename else str(problem)
        _leave(words(f"{what}; nothing finished before was lost, {_REMEDIES[problem.errno]} and run the same command again"))


_OTHER_NAME = "name another place"
_ELSEWHERE = "point runtime.runs_dir and runtime.cache_dir to folders that can be written to"
_REMEDIES = {
    errno.ENOSPC: "free some room",
    errno.EDQUOT: "free some of your quota",
    errno.EROFS: _ELSEWHERE,
    errno.EACCES: _ELSEWHERE,
    errno.ENOTDIR: _OTHER_NAME,
    errno.EISDIR: _OTHER_NAME,
    errno.EEXIST: _OTHER_NAME,
    errno.ENAMETOOLONG: _OTHER_NAME,
    errno.ELOOP: _OTHER_NAME,
}
"""What a person can do about a disk: error number -> part of a sentence."""


def _leave_known(problem: RuntimeError, words: Callable[[str], str]) -> None:
    """Leaves for a failed rank or a preempted run. Their classes are looked up late: no torch for a command that needs none."""
    distributed, ranks = sys.modules.get("clusterft.distributed"), sys.modules.get("clusterft.launch")
    if distributed is not None and isinstance(problem, distributed.Preempted):
        print(f"stopped: {problem}; the same command goes on from here", file=sys.stderr)
        sys.exit(distributed.EXIT_PREEMPTED)
    if ranks is not None and isinstance(problem, ranks.WorkerError):
        _leave(words(str(problem)))


def _leave(message: str) -> None:
    print(f"error: {printable(message)}", file=sys.stderr)
    sys.exit(2)


def run_cell(cfg: DictConfig) -> None:
    """Checks, runs and prints one cell."""
    from clusterft.preflight import preflight
    from clusterft.runner import run_one

    preflight(cfg)
    record = run_one(cfg)
    print(f"run {record.run_id}: {record.status}, {record.selection['budget']} of {record.selection['pool_rows']} rows")
    for metric in record.metrics:
        print(f"  {metric.task}/{metric.name}: {metric.value:.4f} (n={metric.n})")
