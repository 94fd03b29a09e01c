"""One thread for all tests, set before torch is loaded: equalities to the bit hold for one thread count, and ranks have one thread each."""

import os

os.environ["OMP_NUM_THREADS"] = "1"
os.environ["OMP_WAIT_POLICY"] = "PASSIVE"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
# Tests start hundreds of interpreters; each would compile the project again.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

LONGEST_FIRST = ("test_slurm.py", "test_kills.py", "test_adaptive.py", "test_experiments_conf.py", "test_run_command.py")
"""Files that take minutes. Two workers share the files out whole; a long one that comes last would leave the other worker idle."""


def pytest_collection_modifyitems(items):
    ranks = {name: rank for rank, name in enumerate(LONGEST_FIRST)}
    items.sort(key=lambda item: ranks.get(item.path.name, len(ranks)))
