"""Hostile code ends as a failed problem within its limits, leaves nothing behind, and the other problems finish."""

import json
import os
import signal
import socket
import subprocess
import sys
import sysconfig
import tempfile
import time
from pathlib import Path

import psutil
import pytest

from eval import seccomp
from eval.jail import WALLS, Limits
from eval.sandbox import Sandbox, SandboxError

ROOT = Path(__file__).resolve().parents[1]
LIMITS = Limits(memory_gib=1.0, processes=16, wall_seconds=15.0, cpu_seconds=12)
PROBLEM = {
    "task_id": "Test/0",
    "prompt": "def f(x):\n",
    "canonical_solution": "    return x + 1\n",
    "base_input": [[1], [2]],
    "plus_input": [],
    "atol": 0,
    "entry_point": "f",
}
RIGHT = "def f(x):\n    return x + 1\n"


def job(name, solution, problem=PROBLEM):
    return {
        "id": name,
        "kind": "check",
        "dataset": "humaneval",
        "problem": problem,
        "solution": solution,
        "with_plus": False,
        "min_time_limit": 1.0,
    }


def full_sandbox(**parameters):
    """A sandbox with every wall, or a skipped test where this machine does not give them."""
    sandbox = Sandbox("require", **{"parallel": 2, "limits": LIMITS, **parameters})
    try:
        return sandbox.__enter__()
    except SandboxError as problem:
        pytest.skip(str(problem))


@pytest.fixture(scope="module")
def sandbox():
    os.environ["SECRET_TOKEN_FOR_TEST"] = "hush"
    box = full_sandbox()
    yield box
    box.close()
    del os.environ["SECRET_TOKEN_FOR_TEST"]


def outcomes(sandbox, *jobs):
    return dict(sandbox.run(jobs))


def assert_fails_alone(sandbox, solution, seconds=14.0):
    """The hostile solution does not pass, two right ones beside it do, all in time, and no process is left."""
    started = time.monotonic()
    got = outcomes(sandbox, job("before", RIGHT), job("hostile", solution), job("after", RIGHT))
    assert time.monotonic() - started < seconds
    assert got["before"]["base"] == "pass" and got["after"]["base"] == "pass"
    assert got["hostile"].get("base") != "pass" and "error" not in got["hostile"], got["hostile"]
    assert_nothing_left(sandbox)
    return got["hostile"]


def assert_nothing_left(sandbox, seconds=5.0):
    """Of the warden's descendants; what is dying may take a moment."""
    end = time.monotonic() + seconds
    while left := psutil.Process(sandbox._process.pid).children(recursive=True):
        assert time.monotonic() < end, left
        time.sleep(0.05)


def test_every_wall_was_proved(sandbox):
    assert set(sandbox.walls) == {*WALLS, "environment"}
    assert sandbox.note == "sandbox full"


def test_right_half_right_and_wrong(sandbox):
    half = {**PROBLEM, "plus_input": [[5]]}
    jobs = [
        {**job("right", RIGHT, half), "with_plus": True},
        {**job("half", "def f(x):\n    return min(x + 1, 4)\n", half), "with_plus": True},
        {**job("wrong", "def f(x):\n    return x if x == 2 else x + 1\n", half), "with_plus": True},
    ]
    assert outcomes(sandbox, *jobs) == {
        "right": {"base": "pass", "plus": "pass", "failed_input": None},
        "half": {"base": "pass", "plus": "fail", "failed_input": 0},
        "wrong": {"base": "fail", "plus": None, "failed_input": 1},
    }


def test_fork_bomb(sandbox):
    bomb = "import posix\ndef f(x):\n    while True:\n        try:\n            posix.fork()\n"
    bomb += "        except OSError:\n            pass\n"
    assert_fails_alone(sandbox, bomb)


def test_eight_gigabytes(sandbox):
    assert_fails_alone(sandbox, "def f(x):\n    block = bytearray(8 << 30)\n    return x + 1\n")


def test_memory_spread_over_processes_is_counted_together(sandbox):
    hog = (
        "import posix, time\ndef f(x):\n    for _ in range(5):\n        if posix.fork() == 0:\n            break\n"
        "    block = bytearray(b'x') * (300 << 20)\n    time.sleep(10)\n"
    )
    slow = {**PROBLEM, "base_input": [[1]] * 8}
    got = outcomes(sandbox, {**job("hog", hog, slow), "min_time_limit": 9.0}, job("after", RIGHT))
    assert got == {"hog": {"killed": "memory"}, "after": {"base": "pass", "plus": None, "failed_input": None}}
    assert_nothing_left(sandbox)


def test_infinite_loop(sandbox):
    assert assert_fails_alone(sandbox, "def f(x):\n    while True:\n        pass\n")["base"] == "fail"


def test_infinite_loop_that_swallows_the_alarm(sandbox):
    stubborn = "def f(x):\n    while True:\n        try:\n            while True:\n                pass\n"
    stubborn += "        except BaseException:\n            pass\n"
    assert assert_fails_alone(sandbox, stubborn)["base"] == "timeout"


def test_outer_wall_clock_kills_what_evalplus_would_wait_for(tmp_path):
    stubborn = "import signal\nsignal.pthread_sigmask(signal.SIG_BLOCK, range(1, 64))\ndef f(x):\n    while True:\n        pass\n"
    many = {**PROBLEM, "base_input": [[1]] * 50}
    box = full_sandbox(limits=Limits(memory_gib=1.0, wall_seconds=3.0))
    try:
        started = time.monotonic()
        assert outcomes(box, job("stuck", stubborn, many)) == {"stuck": {"killed": "wall_clock"}}
        assert time.monotonic() - started < 8
        assert_nothing_left(box)
    finally:
        box.close()


@pytest.mark.parametrize("place", ["home", "repository", "root", "temporary", "interpreter"])
def test_writes_outside_the_temporary_folder(sandbox, place, tmp_path):
    os.chmod(tmp_path, 0o777)
    targets = {
        "home": Path.home(),
        "repository": ROOT,
        "root": Path("/"),
        "temporary": tmp_path,
        "interpreter": Path(os.__file__).parent,
    }
    target = targets[place] / f"written-by-hostile-code-{os.getpid()}"
    assert_fails_alone(sandbox, f"import io\ndef f(x):\n    io.open({str(target)!r}, 'w').write('x')\n    return x + 1\n")
    assert not target.exists()


def test_reads_of_the_repository_and_home(sandbox):
    at_home = [p for p in Path.home().iterdir() if p.is_file()][:1]
    for path in (ROOT / "pyproject.toml", ROOT / ".git", Path("/etc/passwd"), Path("/proc/1/environ"), *at_home):
        assert_fails_alone(sandbox, f"import os\ndef f(x):\n    os.stat({str(path)!r})\n    return x + 1\n")


def test_socket_to_loopback(sandbox):
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.setblocking(False)
        address = server.getsockname()
        assert_fails_alone(
            sandbox, f"import socket\ndef f(x):\n    socket.create_connection({address!r}, 1).send(b'x')\n    return x + 1\n"
        )
        with pytest.raises(BlockingIOError):
            server.accept()


def test_the_environment_of_the_parent(sandbox):
    assert_fails_alone(sandbox, "import os\ndef f(x):\n    os.environ['SECRET_TOKEN_FOR_TEST']\n    return x + 1\n")


@pytest.mark.parametrize("victim", ["os.getppid()", "-1"])
def test_kill_of_the_parent(sandbox, victim):
    assassin = f"import ctypes, os\ndef f(x):\n    ctypes.CDLL(None).kill({victim}, 9)\n    raise RuntimeError('still here')\n"
    assert assert_fails_alone(sandbox, assassin)["base"] == "fail"


def test_a_gigabyte_of_output(sandbox):
    assert_fails_alone(sandbox, "def f(x):\n    for _ in range(1024):\n        print('x' * 2**20)\n")
    assert_fails_alone(sandbox, "import os\ndef f(x):\n    for _ in range(1024):\n        os.write(1, b'x' * 2**20)\n")


def test_a_gigabyte_on_disk(sandbox):
    assert_fails_alone(
        sandbox,
        "import os\ndef f(x):\n    for i in range(64):\n        fd = os.open(f'/tmp/{i}', os.O_CREAT | os.O_WRONLY)\n"
        "        for _ in range(16):\n            os.write(fd, b'x' * 2**20)\n    return x + 1\n",
    )


def test_symlinks_lead_nowhere(sandbox, tmp_path):
    secret = tmp_path / "secret"
    secret.write_text("hush")
    os.chmod(secret, 0o666)
    for mode in ("r", "w"):
        assert_fails_alone(
            sandbox,
            f"import io, os\ndef f(x):\n    os.symlink({str(secret)!r}, 'link')\n    io.open('link', {mode!r}).close()\n"
            "    return x + 1\n",
        )
    assert secret.read_text() == "hush"


def test_exit_without_a_word_is_no_pass(sandbox):
    assert_fails_alone(sandbox, "import os\ndef f(x):\n    os._exit(0)\n")


def test_results_cannot_be_forged(sandbox):
    assert_fails_alone(
        sandbox,
        "import os\ndef f(x):\n    wrote = 0\n    for fd in range(3, 64):\n        try:\n"
        '            wrote += os.write(fd, b\'{"base": "pass", "plus": null, "failed_input": null}\\n\')\n'
        "        except OSError:\n            pass\n"
        "    return wrote or None\n",
    )


def test_no_other_programme_is_started(sandbox):
    assert_fails_alone(
        sandbox, f"import posix\ndef f(x):\n    posix.execv({sys.executable!r}, ['python', '-c', 'pass'])\n    return x + 1\n"
    )


def test_fifty_problems_leave_no_folder_and_no_traceback(capfd):
    before = set(os.listdir(tempfile.gettempdir()))
    box = full_sandbox()
    try:
        assert all(r["base"] == "pass" for r in outcomes(box, *[job(i, RIGHT) for i in range(50)]).values())
    finally:
        box.close()
    assert {n for n in set(os.listdir(tempfile.gettempdir())) - before if n.startswith("jail-")} == set()
    assert "Traceback" not in capfd.readouterr().err


def test_nothing_survives_the_death_of_the_evaluator():
    """SIGKILL of the program that asked takes warden, keepers and hostile code with it."""
    script = (
        "import sys; sys.path.insert(0, ROOT)\nfrom eval.sandbox import Sandbox\nimport test_sandbox as t\n"
        "box = Sandbox('best_effort', 2, t.LIMITS).__enter__()\nprint(box._process.pid, box._root, flush=True)\n"
        "list(box.run([t.job('loop', 'def f(x):\\n    while True: pass', {**t.PROBLEM, 'base_input': [[1]] * 20})]))\n"
    ).replace("ROOT", repr(str(ROOT)))
    program = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, cwd=ROOT / "tests", text=True)
    pid, root = program.stdout.readline().split()
    warden, folder = psutil.Process(int(pid)), Path(root)
    assert folder.is_dir()
    end = time.monotonic() + 20
    while len(warden.children(recursive=True)) < 3:
        assert time.monotonic() < end
        time.sleep(0.05)
    family = [warden, *warden.children(recursive=True)]
    program.send_signal(signal.SIGKILL)
    program.wait()
    program.stdout.close()
    _, alive = psutil.wait_procs(family, timeout=5)
    assert [p for p in alive if p.status() != psutil.STATUS_ZOMBIE] == []
    assert not folder.exists()


def test_require_refuses_thin_walls_and_best_effort_names_them():
    with (
        pytest.raises(SandboxError, match=r"sandbox=require, but .*filesystem.*best_effort"),
        Sandbox("require", plans=("limits_only",)),
    ):
        pass
    with Sandbox("best_effort", limits=LIMITS, plans=("limits_only",)) as thin:
        assert thin.note.startswith("sandbox partial: not covered: ") and "filesystem" in thin.missing
        got = outcomes(thin, job("right", RIGHT), job("loop", "def f(x):\n    while True:\n        pass\n"))
        assert got["right"]["base"] == "pass" and got["loop"]["base"] == "fail"


@pytest.mark.skipif(os.geteuid() != 0, reason="a plain user takes this path in every other test")
def test_without_the_power_of_root_a_user_namespace_does(tmp_path):
    """Root without CAP_SYS_ADMIN: the walls come from a user namespace; only "unprivileged" cannot be proved, and is named."""
    script = (
        "import sys, json; sys.path.insert(0, ROOT)\nfrom eval.sandbox import Sandbox\nimport test_sandbox as t\n"
        "with Sandbox('best_effort', 1, t.LIMITS) as box:\n"
        "    print(json.dumps([box.missing, dict(box.run([t.job('right', t.RIGHT)]))]))\n"
    ).replace("ROOT", repr(str(ROOT)))
    command = ["setpriv", "--bounding-set", "-sys_admin", "--inh-caps", "-sys_admin", sys.executable, "-c", script]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT / "tests", timeout=60)
    if done.returncode != 0:
        pytest.skip(f"capabilities cannot be dropped here: {done.stderr[-200:]}")
    missing, got = json.loads(done.stdout)
    if "filesystem" in missing:
        pytest.skip("no user namespaces on this machine")
    assert missing == ["unprivileged"] and got["right"]["base"] == "pass"


def test_libraries_of_an_installation_below_the_temporary_folder_are_readable(tmp_path):
    """A clone in /tmp has its packages there: what a solution imports late must not be hidden by the jail's own /tmp."""
    full_sandbox().close()
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path / "venv"], check=True)
    (packages,) = tmp_path.glob("venv/lib/python*/site-packages")
    (packages / "others.pth").write_text(sysconfig.get_path("purelib") + "\n")
    (packages / "late_library.py").write_text("ONE = 1\n")
    late = "def f(x):\n    import late_library\n    return x + late_library.ONE\n"
    script = (
        "import sys, json; sys.path.insert(0, ROOT)\nfrom eval.sandbox import Sandbox\nimport test_sandbox as t\n"
        "with Sandbox('require', 1, t.LIMITS) as box:\n    print(json.dumps(dict(box.run([t.job('late', LATE)]))))\n"
    )
    script = script.replace("ROOT", repr(str(ROOT))).replace("LATE", repr(late))
    python = tmp_path / "venv/bin/python"
    done = subprocess.run([python, "-c", script], capture_output=True, text=True, cwd=ROOT / "tests", timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["late"]["base"] == "pass", done.stdout


def test_modes_and_counts_are_checked():
    with pytest.raises(ValueError, match="not one of require, best_effort"):
        Sandbox("sometimes")
    with pytest.raises(ValueError, match="at least 1"):
        Sandbox(parallel=0)


@pytest.mark.parametrize("machine", ["x86_64", "aarch64"])
def test_the_filter_is_well_formed(machine):
    """Eight bytes an instruction, under the kernel's 4,096, and it ends by allowing."""
    code = seccomp.program(machine)
    assert len(code) % 8 == 0 and len(code) // 8 < 4096
    assert code[-8:] == b"\x06\x00\x00\x00\x00\x00\xff\x7f"


def test_an_unknown_machine_has_no_filter():
    with pytest.raises(OSError, match="no system-call filter for riscv64"):
        seccomp.program("riscv64")
