"""What is done inside the walls: scoring one solution, recording one problem's own checks, and proving that the walls stand.

Every function takes one job (a plain dict read from JSON) and returns a plain dict. They run in the first process of a jail
(`eval.jail`); model-written code runs one level deeper, in the process that evalplus's own `untrusted_check` forks.
"""

from __future__ import annotations

import contextlib
import copy
import ctypes
import inspect
import io
import os
import random
import socket
from collections.abc import Callable, Mapping
from typing import Any

Job = Mapping[str, Any]


def check(job: Job) -> dict[str, Any]:
    """Scores `job["solution"]` with evalplus: expected outputs from the reference, then evalplus's own untrusted check.

    Needs job: dataset (humaneval | mbpp), problem (evalplus's override form), solution, with_plus, min_time_limit (seconds).
    Returns {"base": status, "plus": status or None, "failed_input": index or None}; status is pass, fail or timeout. The
    extra inputs are run only after the base inputs passed: evalplus counts them only then.
    """
    problem = _deserialised(job)
    result: dict[str, Any] = {"base": None, "plus": None, "failed_input": None}
    for part in ("base", "plus") if job["with_plus"] else ("base",):
        status, n_right = _check_part(job, problem, part)
        result[part] = status
        if status != "pass":
            result["failed_input"] = n_right
            break
    return result


def _deserialised(job: Job) -> dict[str, Any]:
    problem = dict(job["problem"])
    if job["dataset"] == "mbpp":
        from evalplus.data.mbpp import mbpp_deserialize_inputs

        for part in ("base_input", "plus_input"):
            problem[part] = mbpp_deserialize_inputs(problem["task_id"], problem[part])
    return problem


def _check_part(job: Job, problem: Mapping[str, Any], part: str) -> tuple[str, int]:
    """Status and the number of inputs answered rightly before the first wrong one."""
    from evalplus.eval import MBPP_OUTPUT_NOT_NONE_TASKS, untrusted_check
    from evalplus.gen.util import trusted_exec

    inputs, entry_point = problem[f"{part}_input"], problem["entry_point"]
    if not inputs:
        return "pass", 0
    expected, seconds = trusted_exec(
        problem["prompt"] + problem["canonical_solution"],
        inputs,
        entry_point,
        record_time=True,
        output_not_none=job["dataset"] == "mbpp" and entry_point in MBPP_OUTPUT_NOT_NONE_TASKS,
    )
    checked = {"expected": expected, "atol": problem["atol"], "ref_time": seconds, "min_time_limit": job["min_time_limit"]}
    try:
        status, details = untrusted_check(job["dataset"], job["solution"], inputs, entry_point, fast_check=True, **checked)
    except KeyError:  # evalplus looks its verdict up in shared memory, and the solution wrote something else there
        return "fail", 0
    return status, sum(bool(d) for d in details)


def record(job: Job) -> dict[str, Any]:
    """The arguments with which a HumanEval problem's own `check` calls its candidate, recorded on the reference solution.

    The reference must pass its check. Problems that draw random arguments draw them from a seed of their own name, so that the
    inputs are the same everywhere. Returns {"inputs": [[argument, ...], ...]}.
    """
    problem = job["problem"]
    space: dict[str, Any] = {}
    exec(problem["prompt"] + problem["canonical_solution"], space)
    reference, calls = space[problem["entry_point"]], []
    signature = inspect.signature(reference)

    def candidate(*args: Any, **kwargs: Any) -> Any:
        bound = signature.bind(*args, **kwargs)
        if kwargs:
            bound.apply_defaults()
        calls.append(copy.deepcopy(list(bound.args)))
        return reference(*args, **kwargs)

    random.seed(problem["task_id"])
    exec(problem["test"], space)
    space["check"](candidate)
    return {"inputs": calls}


def prove(job: Job) -> dict[str, Any]:
    """Tries to break each wall the way hostile code would. Returns {wall: True if the attempt failed}."""
    attempts: dict[str, Callable[[], None]] = {
        "network": lambda: socket.create_connection(("127.0.0.1", job["port"]), timeout=2).close(),
        "filesystem": lambda: open(os.path.join(job["folder"], "escaped"), "w").close(),
        "processes": lambda: os.kill(job["warden"], 0),
        "unprivileged": lambda: None if _has_power() else _refuse(),
        "syscalls": lambda: os.close(os.pidfd_open(os.getpid())),
        "environment": lambda: None if set(os.environ) - set(job["environment"]) else _refuse(),
    }
    return {wall: _fails(attempt) for wall, attempt in attempts.items()}


def _fails(attempt: Callable[[], None]) -> bool:
    try:
        attempt()
    except OSError:
        return True
    return False


def _refuse() -> None:
    raise PermissionError("refused")


def _has_power() -> bool:
    """Whether this process is root or holds any capability."""
    libc = ctypes.CDLL(None, use_errno=True)
    header, data = (ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)()
    libc.capget(header, data)
    return os.geteuid() == 0 or any(data)


KINDS: dict[str, Callable[[Job], dict[str, Any]]] = {"check": check, "record": record, "prove": prove}


def run(job: Job) -> dict[str, Any]:
    """Runs one job and swallows what it prints. An exception of trusted code is part of the result, as {"error": ...}."""
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        try:
            return KINDS[job["kind"]](job)
        except (Exception, SystemExit) as problem:
            return {"error": f"{type(problem).__name__}: {problem}"}
