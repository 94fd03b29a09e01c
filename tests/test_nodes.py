"""Several nodes: what is refused before anything starts, and how the reports of a step are read."""

from __future__ import annotations

import json
from argparse import Namespace

import pytest
from omegaconf import OmegaConf

from clusterft import nodes
from clusterft.distributed import Preempted
from clusterft.overrides import UserError
from clusterft.ranks import WorkerError

JOB = {"SLURM_JOB_ID": "7", "SLURM_JOB_NUM_NODES": "2"}


def runtime(**values):
    return OmegaConf.create({"nodes": 1, "launcher": "spawn", "processes": 4, "feature_processes": 1} | values)


def test_layouts_that_fit():
    nodes.check_layout(runtime(), {})
    nodes.check_layout(runtime(launcher="torchrun"), {"SLURM_JOB_ID": "7", "SLURM_NTASKS": "4"})  # inside salloc
    nodes.check_layout(runtime(nodes=2, launcher="srun", feature_processes=2), JOB)
    nodes.check_layout(runtime(), {"SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0"})


@pytest.mark.parametrize(
    ("values", "env", "words"),
    [
        ({"launcher": "mpi"}, {}, "not one of spawn, torchrun, srun"),
        ({"nodes": 0}, {}, "at least one node"),
        ({"nodes": 2}, JOB, "only runtime.launcher=srun"),
        ({"nodes": 2, "launcher": "torchrun"}, JOB, r"slurm/submit\.sh TABLE --nodes N"),
        ({"nodes": 2, "launcher": "srun", "processes": 3}, JOB, "processes=3 cannot be shared evenly by runtime.nodes=2"),
        ({"nodes": 2, "launcher": "srun", "feature_processes": 3}, JOB, "feature_processes=3"),
        ({"nodes": 2, "launcher": "srun"}, {}, "SLURM_JOB_ID is not set"),
        ({"nodes": 4, "launcher": "srun"}, JOB, "runtime.nodes=4 contradicts SLURM_JOB_NUM_NODES=2"),
        ({}, {"SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "4"}, "srun started 4 copies"),
        ({}, {"RANK": "0", "WORLD_SIZE": "2"}, "torchrun started 2 copies"),
    ],
)
def test_layouts_that_contradict_are_refused(values, env, words):
    with pytest.raises(UserError, match=words):
        nodes.check_layout(runtime(**values), env)


def test_an_agent_knows_its_node_or_refuses(tmp_path):
    options = Namespace(nodes=2, folder=tmp_path)
    env = {"SLURM_NNODES": "2", "SLURM_NTASKS": "2", "SLURM_NODEID": "1", "SLURM_PROCID": "1", "SLURMD_NODENAME": "n2"}
    assert "not visible on node n2" in nodes.agent_problem(options, env)
    (tmp_path / "kwargs.json").write_text("{}")
    assert nodes.agent_problem(options, env) is None
    assert "SLURM_NNODES=3 contradicts" in nodes.agent_problem(options, env | {"SLURM_NNODES": "3"})
    assert "SLURM_NTASKS=not set" in nodes.agent_problem(options, {"SLURM_NNODES": "2"})
    assert "SLURM_NODEID=0 contradicts SLURM_PROCID=1" in nodes.agent_problem(options, env | {"SLURM_NODEID": "0"})


def write(folder, name, **facts):
    (folder / f"{name}.json").write_text(json.dumps(facts))


def report(folder, rank, kind, message, time):
    write(folder, str(rank), rank=rank, kind=kind, message=message, details="", time=time)


def test_the_first_real_failure_is_named_before_its_echoes_and_the_signals_that_follow_it(tmp_path):
    report(tmp_path, 0, "error", "RuntimeError: Connection closed by peer", 1.0)
    report(tmp_path, 3, "error", "FloatingPointError: loss is nan", 2.0)
    write(tmp_path, "signal-0", number=15, time=3.0)  # SLURM ends the rest of a failed step
    with pytest.raises(WorkerError, match="rank 3: FloatingPointError: loss is nan"):
        nodes._conclude(tmp_path, 1, set())


def test_a_signal_before_any_failure_is_a_preemption(tmp_path):
    report(tmp_path, 0, "error", "RuntimeError: Connection closed by peer", 4.0)
    report(tmp_path, 1, "preempted", "stopped after step 3", 3.0)
    write(tmp_path, "signal-1", number=15, time=2.0)
    with pytest.raises(Preempted, match="stopped after step 3"):
        nodes._conclude(tmp_path, 75, set())
    (tmp_path / "1.json").unlink()
    with pytest.raises(Preempted):
        nodes._conclude(tmp_path, 1, set())


def test_a_killed_rank_is_a_failure_though_slurm_then_signals_the_other_nodes(tmp_path):
    """A requeue would meet the same end again."""
    report(tmp_path, 0, "error", "RuntimeError: Connection closed by peer", 1.0)
    write(
        tmp_path, "node-1", rank=2, kind="error", message="ended without a word on node n2 (out of memory?)", details="", time=1.2
    )
    write(tmp_path, "signal-0", number=15, time=1.4)
    with pytest.raises(WorkerError, match="rank 2: ended without a word on node n2"):
        nodes._conclude(tmp_path, 137, set())


def test_a_node_that_lost_its_peers_to_a_signal_is_no_failure(tmp_path):
    write(tmp_path, "signal-0", number=10, time=1.0)
    write(
        tmp_path, "node-1", rank=2, kind="error", message="ended without a word on node n2 (out of memory?)", details="", time=1.2
    )
    report(tmp_path, 0, "preempted", "stopped after step 3", 1.1)
    with pytest.raises(Preempted, match="stopped after step 3"):
        nodes._conclude(tmp_path, 75, set())


def test_a_step_without_a_word_names_its_exit_code(tmp_path):
    nodes._conclude(tmp_path, 0, set())
    with pytest.raises(WorkerError, match="exit code 137"):
        nodes._conclude(tmp_path, 137, set())
