"""A real cell that is killed at any moment of any stage and started again ends as if nothing had happened (`kill_harness`)."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys

import pytest
from forked_runs import ForkingServer
from kill_harness import HERE, Blow, Chain, fresh_chain, reference_run, unexpected


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    """The uninterrupted run. Chains start from a server that has imported everything, all but the one without network."""
    with ForkingServer() as server:
        Chain.launch = server.launch
        chain, _ = reference_run(tmp_path_factory.mktemp("whole") / "reference")
        yield chain
    Chain.launch = None


def survive(chain, reference, blows):
    for blow, stages in blows:
        one = chain.strike(blow)
        assert one.fell and not unexpected(one, chain), f"{one}\n{chain.said()}"
        assert one.stage in stages, one
        if blow.signal != "SIGKILL":
            assert one.code == 75, f"{one}\n{chain.said()}"
    chain.finish()
    assert chain.differences(reference) == []


@pytest.mark.slow
def test_six_sigkills_one_in_every_stage(reference, tmp_path):
    """Each start comes further than the one before; no process outlives a kill; all files are those of the uninterrupted run."""
    blows = [
        (Blow("feature rows", delay=0.05), ("features", "clustering")),
        (Blow("clustering"), ("clustering",)),
        (Blow("training", delay=0.3), ("training", "checkpoint writing")),
        (Blow("checkpoint writing", nth=8), ("checkpoint writing",)),
        (Blow("evaluation", nth=2), ("evaluation",)),
        (Blow("record writing"), ("record writing",)),
    ]
    survive(fresh_chain(tmp_path / "chain", reference), reference, blows)


@pytest.mark.slow
def test_a_request_to_leave_is_answered_with_75_outside_of_training_too(reference, tmp_path):
    """SIGTERM or SIGUSR1, to the whole process group or to its leader alone: requeue, then the same end state.

    Training's own answer, a checkpoint at the next step, is in test_checkpoint and test_case17.
    """
    blows = [
        (Blow("feature rows", signal="SIGTERM", to="leader"), ("features", "clustering")),
        (Blow("clustering", signal="SIGUSR1"), ("clustering", "training start")),
        (Blow("evaluation", signal="SIGTERM"), ("evaluation",)),
    ]
    chain = fresh_chain(tmp_path / "chain", reference)
    survive(chain, reference, blows)


@pytest.mark.slow
def test_two_processes_that_run_one_cell_at_once_leave_one_run(reference, tmp_path):
    """One works; the other leaves with a sentence that names the first, or finds the record."""
    chain = fresh_chain(tmp_path / "chain", reference)
    first, second = chain.start(), chain.start()
    codes = sorted([first.wait(3600), second.wait(3600)])
    said = [(chain.folder / f"said-{n:03d}.txt").read_text() for n in (1, 2)]
    assert codes in ([0, 2], [0, 0]), said
    if codes == [0, 2]:
        assert sum("is being worked on by another process" in text for text in said) == 1
        assert not any("Traceback" in text for text in said)
    assert chain.differences(reference) == []


ISOLATED = """
import fcntl, os, socket, struct, sys
with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:  # a new network namespace has loopback, but down
    name = struct.pack("16sh", b"lo", 0)
    flags = struct.unpack("16sh", fcntl.ioctl(any_socket, 0x8913, name))[1]
    fcntl.ioctl(any_socket, 0x8914, struct.pack("16sh", b"lo", flags | 1))
os.execv(sys.executable, sys.argv[1:])
"""


def isolation():
    """The command prefix that runs a command where there is no network but loopback."""
    prefix = ("unshare", "--net", sys.executable, "-c", ISOLATED)
    if shutil.which("unshare") is None:
        pytest.skip("needs unshare (util-linux)")
    trial = subprocess.run([*prefix, sys.executable, "-c", "print('inside')"], capture_output=True, text=True, check=False)
    if trial.stdout != "inside\n":
        pytest.skip(f"this machine gives no network namespace: {trial.stderr.strip()[-200:]}")
    return prefix


@pytest.mark.slow
def test_a_whole_cell_runs_without_network_and_no_stage_tries_one(reference, tmp_path):
    """In a network namespace without routes, two gloo ranks over loopback: the same end state, and no attempt to connect elsewhere."""
    chain = fresh_chain(tmp_path / "chain", reference, prefix=isolation())
    note = tmp_path / "attempts"
    watch = {"NET_NOTE": str(note), "PYTHONPATH": os.pathsep.join([str(HERE / "kill_points"), os.environ.get("PYTHONPATH", "")])}
    run = chain.start("runtime.processes=2", "runtime.feature_processes=2", SLURM_JOB_ID="1", **watch)
    assert run.wait(3600) == 0, chain.said()
    attempts = [json.loads(line) for line in note.read_text().splitlines()] if note.exists() else []
    assert [a for a in attempts if not a["local"]] == []
    assert chain.differences(reference) == []
