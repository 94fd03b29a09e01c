"""`python run.py ...` in processes that are forked from one which has imported torch and the project already: half the work of a start.

    Forked(arguments, environment, output)      in this process, which may have no further threads: the command line, not pytest
    with ForkingServer() as server:             from any process: a child of it forks
        run = server.launch(arguments, environment, output)

Both give the part of Popen's face that `kill_harness` uses: pid, poll, wait. All that a run starts itself, it starts as always.
"""

from __future__ import annotations

import json
import os
import runpy
import subprocess
import sys
import time
import traceback
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent


class _Run:
    """A started run; `_ask` gives its exit code or None."""

    pid: int
    returncode: int | None = None

    def _ask(self) -> int | None:
        raise NotImplementedError

    def poll(self) -> int | None:
        if self.returncode is None:
            self.returncode = self._ask()
        return self.returncode

    def wait(self, timeout: float) -> int:
        deadline = time.monotonic() + timeout
        while self.poll() is None:
            if time.monotonic() > deadline:
                raise subprocess.TimeoutExpired("run.py", timeout)
            time.sleep(0.05)
        return self.returncode


class Forked(_Run):
    """Forked from this process. output: file descriptor for what the run prints."""

    def __init__(self, arguments: list[str], environment: dict[str, str], output: int) -> None:
        self.pid = os.fork()
        if self.pid == 0:
            os._exit(_live(arguments, environment, output))  # not a frame of the harness may be unwound in here

    def _ask(self) -> int | None:
        pid, status = os.waitpid(self.pid, os.WNOHANG)
        return os.waitstatus_to_exitcode(status) if pid else None


def _live(arguments: list[str], environment: dict[str, str], output: int) -> int:
    os.setsid()
    for number, file in enumerate((os.open(os.devnull, os.O_RDONLY), output, output)):
        os.dup2(file, number)
    os.chdir(ROOT)
    os.environ.update(environment)
    sys.argv = arguments
    try:
        if "KILL_POINT" in environment:
            runpy.run_path(str(HERE / "kill_points" / "sitecustomize.py"))
        runpy.run_path(arguments[0], run_name="__main__")
        code = 0
    except SystemExit as leaving:
        code = leaving.code if isinstance(leaving.code, int) else int(leaving.code is not None)
    except BaseException:  # as the interpreter does at its top
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    return code


def warm_up() -> None:
    """Imports what a run imports."""
    os.environ.update({"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"})
    os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    sys.path.insert(0, str(ROOT))
    import hydra  # noqa: F401
    import transformers.models.llama.modeling_llama
    import transformers.optimization  # noqa: F401

    import clusterft.preflight
    import clusterft.runner  # noqa: F401


class ForkingServer:
    """Context manager: a warmed-up child that forks runs on request. For processes with threads, which may not fork themselves."""

    def __enter__(self) -> ForkingServer:
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        self._server = subprocess.Popen([sys.executable, str(Path(__file__))], text=True, start_new_session=True, **pipes)
        return self

    def __exit__(self, *_: object) -> None:
        self._server.stdin.close()
        self._server.wait(60)
        self._server.stdout.close()

    def launch(self, arguments: list[str], environment: dict[str, str], output: int) -> _Run:
        place = os.readlink(f"/proc/self/fd/{output}")
        run = _Remote()
        run.ask, run.pid = self.ask, self.ask(arguments=arguments, environment=environment, output=place)
        return run

    def ask(self, **question: Any) -> Any:
        self._server.stdin.write(json.dumps(question) + "\n")
        self._server.stdin.flush()
        return json.loads(self._server.stdout.readline())


class _Remote(_Run):
    ask: Any

    def _ask(self) -> int | None:
        return self.ask(pid=self.pid)


def serve() -> None:
    """Answers questions on stdin until it ends: what to start -> its pid; a pid -> its exit code, or null while it lives."""
    warm_up()
    answers, runs = os.fdopen(os.dup(1), "w"), {}
    for line in sys.stdin:
        question = json.loads(line)
        if "pid" in question:
            answer = runs[question["pid"]].poll()
        else:
            output = os.open(question["output"], os.O_WRONLY | os.O_APPEND)
            run = Forked(question["arguments"], question["environment"], output)
            os.close(output)
            answer = run.pid
            runs[answer] = run
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


if __name__ == "__main__":
    serve()
