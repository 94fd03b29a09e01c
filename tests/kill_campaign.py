"""Kills a real cell again and again at random, and says where the kills fell: `make kill-test`.

    python tests/kill_campaign.py --kills 50 --seed 0 --report kills.json     or KILLS and KILL_SEED in the environment

In come a number and a seed; out come the counts by stage, signal and moment, and every difference from an uninterrupted run. Exit code
1 if there is one. `kill_harness` says what is killed and compared.
"""

from __future__ import annotations

import argparse
import collections
import json
import os
import random
import runpy
import shutil
import subprocess
import sys
import tempfile
import time
import traceback
from pathlib import Path
from typing import Any

from kill_harness import HERE, MOMENTS, ROOT, Blow, Chain, Struck, fresh_chain, reference_run, unexpected


class Forked:
    """`python run.py ...` in a process forked from this one, which has imported torch and the project already: half the work of a start.

    The part of Popen's face that is used here. Only for a process without further threads: the command line, not pytest.
    """

    def __init__(self, arguments: list[str], environment: dict[str, str], output: int) -> None:
        self.returncode: int | None = None
        self.pid = os.fork()
        if self.pid == 0:
            os._exit(self._live(arguments, environment, output))  # not a frame of the harness may be unwound in here

    def _live(self, arguments: list[str], environment: dict[str, str], output: int) -> int:
        os.setsid()
        for number in (1, 2):
            os.dup2(output, number)
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

    def poll(self) -> int | None:
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            self.returncode = os.waitstatus_to_exitcode(status) if pid else None
        return self.returncode

    def wait(self, timeout: float) -> int:
        deadline = time.monotonic() + timeout
        while self.poll() is None:
            if time.monotonic() > deadline:
                raise subprocess.TimeoutExpired("run.py", timeout)
            time.sleep(0.05)
        return self.returncode


def warm_up() -> None:
    """Imports what a run imports, for `Forked`."""
    os.environ.update({"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"})
    os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    sys.path.insert(0, str(ROOT))
    import hydra  # noqa: F401
    import transformers.models.llama.modeling_llama
    import transformers.optimization  # noqa: F401

    import clusterft.preflight
    import clusterft.runner  # noqa: F401

    Chain.launch = Forked


REPEATED = {"checkpoint writing": 40, "checkpoint renaming": 7, "checkpoint pruning": 4, "evaluation": 3, "selection writing": 5}
"""How often a moment comes by in a run at least; the others once."""


def random_blow(draw: random.Random, seconds: float) -> Blow:
    """Some anywhere in time, most at a named moment with or without a delay; one in four a signal that may be answered."""
    number = draw.choice(["SIGKILL", "SIGKILL", "SIGKILL", draw.choice(["SIGTERM", "SIGUSR1"])])
    to = "group" if number == "SIGKILL" else draw.choice(["group", "leader"])
    if draw.random() < 0.3:
        return Blow(None, delay=draw.uniform(0.05, 0.7) * seconds, signal=number, to=to)
    moment = draw.choice(list(MOMENTS))
    nth = draw.randint(1, REPEATED.get(moment, 1))
    return Blow(moment, nth, draw.choice([0.0, draw.uniform(0.0, 0.1) * seconds]), number, to)


def campaign(kills: int, seed: int, folder: Path, say: Any = print) -> dict[str, Any]:
    """Chains of three to eight blows until `kills` have fallen. Each start of a chain may carry another number of processes."""
    draw = random.Random(seed)
    reference, seconds = reference_run(folder / "reference")
    say(f"reference: {seconds:.1f} s")
    struck, problems, chains = [], [], 0
    while sum(s.fell for s in struck) < kills:
        chain, chains = fresh_chain(folder / f"chain-{chains:03d}", reference), chains + 1
        for _ in range(draw.randint(3, 8)):
            one = chain.strike(random_blow(draw, seconds), f"runtime.processes={draw.choice([1, 1, 2, 4])}")
            struck.append(one)
            problems += unexpected(one, chain)
            say(f"{chain.folder.name}: {one.blow} -> {'hit' if one.fell else 'missed'}, stage {one.stage}, exit {one.code}")
            if one.code == 0:
                break
        seconds = min(seconds, max(chain.finish(), seconds / 3))  # the machine may have become faster since
        wrong = chain.differences(reference)
        problems += [f"{chain.folder.name}: {line}" for line in wrong]
        say(f"{chain.folder.name}: {wrong or 'same end state'}")
        if not wrong:
            shutil.rmtree(chain.folder)
    return summary(struck, chains, problems, seed)


def summary(struck: list[Struck], chains: int, problems: list[str], seed: int) -> dict[str, Any]:
    hits = [s for s in struck if s.fell]
    return {
        "seed": seed,
        "chains": chains,
        "kills": len(hits),
        "by_signal": dict(collections.Counter(s.blow.signal for s in hits)),
        "by_stage": dict(collections.Counter(s.stage for s in hits)),
        "by_moment": dict(collections.Counter(s.blow.moment or "random time" for s in hits)),
        "missed": len(struck) - len(hits),
        "problems": problems,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=int(os.environ.get("KILLS", "50")))
    parser.add_argument("--seed", type=int, default=int(os.environ.get("KILL_SEED", "0")))
    parser.add_argument("--report", type=Path)
    parser.add_argument("--folder", type=Path, help="keep the chains that went wrong here")
    options = parser.parse_args()
    warm_up()
    with tempfile.TemporaryDirectory(prefix="clusterft-kill-") as scratch:
        folder = options.folder or Path(scratch)
        facts = campaign(options.kills, options.seed, folder, lambda text: print(text, flush=True))
    print(json.dumps(facts, indent=1))
    if options.report:
        options.report.write_text(json.dumps(facts, indent=1) + "\n")
    return 1 if facts["problems"] else 0


if __name__ == "__main__":
    sys.exit(main())
