"""What stands where: the queue's lines, the locks of this machine, the rest as an --array string."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from filelock import FileLock

from clusterft.overrides import UserError
from clusterft.site_env import prepare_sweep
from experiments import status
from experiments.plan import PlannedCell
from experiments.spec import Cell
from experiments.status import Task, describe_status, locked_runs, parse_queue, same_cells, status_of

ROOT = Path(__file__).resolve().parents[1]


def planned(*states):
    """Cells 0, 1, ... with runs a, b, ...; a state may name another run: "missing:a"."""
    cells = []
    for i, text in enumerate(states):
        state, _, run = text.partition(":")
        reason = "ValueError: nothing to learn" if state == "failed" else ""
        cells.append(PlannedCell(Cell(i, f"row {i}", "", 0, ()), run or "abcdefgh"[i], state, reason))
    return SimpleNamespace(spec=SimpleNamespace(id="table2"), cells=tuple(cells))


def test_overrides_that_choose_the_same_cells_are_one_text_in_any_order():
    assert same_cells(["+scale=smoke", "+experiment=table2", "status=true"]) == "+experiment=table2 +scale=smoke"
    assert same_cells(["+experiment=table2", "+scale=smoke", "cell=3", "runtime.nodes=2"]) == "+experiment=table2 +scale=smoke"
    assert same_cells(["+experiment=table2", "seed=0"]) != same_cells(["+experiment=table2"])


def test_the_queue_is_read_by_comment_and_state():
    text = "7|3|RUNNING|mine\n7|5-6|PENDING|mine\n8|1|RUNNING|another\n7|9|COMPLETED|mine\n9|N/A|RUNNING|mine\n7|2|PENDING|a|b\n"
    assert parse_queue(text, "mine") == [Task("7", 3, "RUNNING"), Task("7", 5, "PENDING"), Task("7", 6, "PENDING")]
    assert parse_queue(text, "a|b") == [Task("7", 2, "PENDING")]


def test_the_rest_is_what_nobody_works_on_one_cell_a_run():
    plan = planned("complete", "missing", "missing", "failed", "missing", "missing:b", "missing", "missing:g")
    tasks = [Task("7", 2, "RUNNING"), Task("7", 4, "PENDING")]
    found = status_of(plan, tasks, set(), range(8))
    assert found.rest == "1,3,6"  # 5 is the run of 1, 7 that of 6
    assert describe_status(found).splitlines() == [
        "table2: 8 cells; in SLURM's queue as 7",
        "  done        1  [0]",
        "  running     1  [2]",
        "  queued      1  [4]",
        "  failed      1  [3]",
        "    [3] row 3 seed=0: ValueError: nothing to learn",
        "  missing     4  [1,5-7]",
        "  the rest: --array=1,3,6",
    ]
    assert status_of(plan, tasks, {"b"}, range(8)).rest == "3,6"  # its lock is held
    assert status_of(plan, tasks, set(), [0, 2]).rest == ""
    assert "nothing is left to submit" in describe_status(status_of(plan, tasks, set(), [0, 2]))


@pytest.mark.skipif(not status.LOCKS.exists(), reason="the kernel shows no list of locks here")
def test_a_lock_is_seen_while_it_is_held_and_is_not_taken_by_looking(tmp_path):
    for run in "ab":
        (tmp_path / run).mkdir()
        (tmp_path / run / ".lock").touch()
    code = f"from filelock import FileLock; lock = FileLock({str(tmp_path / 'a/.lock')!r}); lock.acquire(); print('held', flush=True); input()"
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout.readline() == "held\n"
        assert locked_runs(tmp_path, ["a", "b", "never"]) == {"a"}
        holder.communicate("\n")
    assert locked_runs(tmp_path, ["a", "b"]) == set()
    with FileLock(tmp_path / "a/.lock", timeout=0):
        pass


def test_a_sweep_reads_the_sites_values_and_leaves_empty_ones_out(tmp_path, monkeypatch):
    site = tmp_path / "site.env"
    site.write_text(': "${CLUSTERFT_PARTITION=short}"\n: "${CLUSTERFT_ACCOUNT=}"\n: "${CLUSTERFT_MINUTES=90}"\nOTHER=1\n')
    monkeypatch.setenv("CLUSTERFT_SITE", str(site))
    monkeypatch.setenv("CLUSTERFT_MINUTES", "5")
    for name in ("CLUSTERFT_PARTITION", "CLUSTERFT_ACCOUNT", "OTHER"):
        monkeypatch.setenv(name, "")  # so that they are put back
        monkeypatch.delenv(name)
    import os

    prepare_sweep(["-m", "selector.ratio=0.25,0.5"], tmp_path)
    assert "CLUSTERFT_PARTITION" not in os.environ
    prepare_sweep(["-m", "hydra/launcher=submitit_slurm"], tmp_path)
    assert (os.environ["CLUSTERFT_PARTITION"], os.environ["CLUSTERFT_MINUTES"]) == ("short", "5")
    assert "CLUSTERFT_ACCOUNT" not in os.environ and "OTHER" not in os.environ
    site.write_text("if\n")
    with pytest.raises(UserError, match="cannot be read by the shell"):
        prepare_sweep(["hydra/launcher=submitit_slurm"], tmp_path)
    site.unlink()
    with pytest.raises(UserError, match=r"site\.env is missing"):
        prepare_sweep(["hydra/launcher=submitit_slurm"], tmp_path)


def test_submit_and_status_refuse_what_they_do_not_know():
    for arguments, words in ((["nope"], "nope is no experiment"), (["table2", "--now"], "unknown option --now"),
                             (["table2", "--nodes", "x"], "needs a number"), ([], "usage"), (["all"], "submit each by its name")):  # fmt: skip
        done = subprocess.run([ROOT / "slurm/submit.sh", *arguments], capture_output=True, text=True, check=False)
        assert done.returncode == 2 and words in done.stderr
