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
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

from forked_runs import Forked, warm_up
from kill_harness import MOMENTS, Blow, Chain, Struck, fresh_chain, reference_run, unexpected

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
    Chain.launch = Forked
    with tempfile.TemporaryDirectory(prefix="clusterft-kill-") as scratch:
        folder = options.folder or Path(scratch)
        facts = campaign(options.kills, options.seed, folder, lambda text: print(text, flush=True))
    print(json.dumps(facts, indent=1))
    if options.report:
        options.report.write_text(json.dumps(facts, indent=1) + "\n")
    return 1 if facts["problems"] else 0


if __name__ == "__main__":
    sys.exit(main())
