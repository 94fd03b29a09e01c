"""A million short rows load within 2 GiB: measured in two children, whose difference gives the memory of a row."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
CODE = """
import resource, sys
sys.path.insert(0, sys.argv[3])
from data_configs import files_config
from clusterft.data import load_pool
pools = load_pool(files_config(sys.argv[1], holdout_rows=64))
assert pools.report.rows_read == int(sys.argv[2]) and len(pools.train) + 64 == int(sys.argv[2]), pools.report.lines()
assert "torch" not in sys.modules
lines = pools.report.source_lines(pools.train.examples[::1000])
assert all(b'"output"' in line for line in lines)
print(next(int(x.split()[1]) for x in open("/proc/self/status") if x.startswith("VmHWM")))
"""


def peak_kib(path: Path, rows: int) -> int:
    """Peak resident memory of a process that loads the rows, as its own status says it: ru_maxrss would count what the parent had at the fork."""
    command = [sys.executable, "-c", CODE, str(path), str(rows), str(HERE)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return int(done.stdout)


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs Linux's /proc")
def test_a_million_rows_load_within_two_gib(tmp_path):
    sys.path.insert(0, str(HERE.parent / "benchmarks"))
    try:
        from bench_load import write_rows
    finally:
        sys.path.pop(0)
    few, many = 20_000, 100_000
    for rows in (few, many):
        write_rows(tmp_path / f"{rows}.jsonl", rows)
    least, most = (peak_kib(tmp_path / f"{rows}.jsonl", rows) for rows in (few, many))
    row = (most - least) / (many - few)
    assert 0 < row < 2, f"{row:.2f} KiB a row"
    assert most + row * (1_000_000 - many) < 2 * 2**20
