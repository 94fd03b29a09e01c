"""slurm/site.env for a sweep: the variables of a shell file, put where conf/hydra/launcher reads them."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Sequence
from pathlib import Path

from clusterft.overrides import UserError

LAUNCHER = "hydra/launcher=submitit_slurm"


def prepare_sweep(arguments: Sequence[str], root: Path) -> None:
    """Reads the site's values into this process's environment if the command line asks for SLURM sweeps; empty ones are left out.

    root: the checkout. Raises UserError if the file is missing or the shell refuses it.
    """
    if LAUNCHER not in arguments:
        return
    path = root / os.environ.get("CLUSTERFT_SITE", "slurm/site.env")
    if not path.is_file():
        raise UserError(f"{path} is missing: it says what a job asks this cluster for; see docs/cluster.md")
    asked = subprocess.run(["bash", "-c", 'set -eua; . "$0"; env -0', str(path)], capture_output=True, text=True, check=False)
    if asked.returncode != 0:
        raise UserError(f"{path} cannot be read by the shell: {asked.stderr.strip()}")
    found = dict(entry.split("=", 1) for entry in asked.stdout.split("\0") if "=" in entry)
    for name, value in found.items():
        if not name.startswith(("CLUSTERFT_", "HF_HUB_")):
            continue
        if value:
            os.environ[name] = value
        else:
            os.environ.pop(name, None)
