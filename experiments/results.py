"""What an experiment leaves in results/<scale>/: the table's texts, and its figure with the data in the table's CSV.

`write_results` writes, `check_results` says what would change. Texts must be equal to the byte; of a figure only its presence is
checked, because fonts differ between machines while its data, the CSV, do not.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

from experiments.figures import FORMATS, write_figures
from experiments.render import check_outputs, write_outputs
from experiments.spec import ExperimentConfig
from experiments.table import Table


def write_results(table: Table, spec: ExperimentConfig, folder: Path) -> list[Path]:
    """Writes everything and returns the paths, texts first."""
    written = write_outputs(table, folder)
    return written + (write_figures(table, spec.figure, folder) if spec.figure else [])


def check_results(table: Table, spec: ExperimentConfig, folder: Path) -> list[str]:
    """One sentence for each file that is absent or would change, [] when the committed results are what the records give."""
    changed = check_outputs(table, folder)
    if spec.figure and any(value.has_mean for _, _, value in table.cells()):
        missing = [folder / f"{table.id}.{kind}" for kind in FORMATS if not (folder / f"{table.id}.{kind}").exists()]
        changed += [f"{path} does not exist" for path in missing]
    return changed


def refuse_unwritable(folder: Path, asked: str) -> None:
    """Raises ValueError, before hours of runs, for a results folder that cannot be made or written."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as problem:
        raise ValueError(
            f"runtime.results_dir={asked} cannot be written ({problem.strerror}); name another folder, nothing was started"
        ) from problem
