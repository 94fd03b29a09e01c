"""From a cell's overrides to its configuration and run id, by Hydra's own composition.

In come the overrides of the command line (`+experiment=table2 +scale=laptop ...`) and those of a cell; out comes the configuration that
`python run.py` would compose from both, and the id of its run. The table's own nodes are taken out, so that a run that two tables share
is written down in one way; and since only they differ between tables of the same data, model and evaluators, such tables are composed
through one of them.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from clusterft.store import plain_run_id
from experiments.composing import Composer
from experiments.spec import Cell, override_key

ROOT = Path(__file__).resolve().parents[1]
FILES = ROOT / "conf/experiment"
CONTROL = ("cell", "plan", "status", "check", "render", "explain", "seed")
"""Keys of the command line that choose cells rather than describe them."""
WHOLE = ("experiment", "scale")
"""Keys that name the table itself. A line of table 11 has its own `+experiment=`; the command line's does not choose among them."""
DROPPED = {"experiment": None, "cell": None, "plan": False, "status": False, "check": False, "render": False, "explain": None}


def available_selectors() -> set[str]:
    """Selectors that have a file in conf/selector."""
    return {path.stem for path in (ROOT / "conf/selector").glob("*.yaml")}


@cache
def experiment_file(name: str) -> DictConfig:
    """conf/experiment/NAME.yaml as it stands. Raises FileNotFoundError."""
    cfg = OmegaConf.load(FILES / f"{name}.yaml")
    assert isinstance(cfg, DictConfig)
    return cfg


@cache
def stand_in(name: str) -> str:
    """The first experiment, by name, whose file differs from this one's in nothing but its `experiment:` node; often the same.

    Cells composed through either are equal. A file that is not there stands for itself, and Hydra says what is wrong.
    """
    if not (FILES / f"{name}.yaml").is_file():
        return name
    own = _frame(name)
    return next(path.stem for path in sorted(FILES.glob("*.yaml")) if _frame(path.stem) == own)


@cache
def _frame(name: str) -> str:
    frame = OmegaConf.to_container(experiment_file(name))
    assert isinstance(frame, dict)
    return json.dumps({key: value for key, value in frame.items() if key != "experiment"}, sort_keys=True)


class Resolver:
    """Composes cells on top of the command line's overrides. Must be used where Hydra has been initialised.

    composer: shared between the tables of one command, so that what they have in common is composed once.
    """

    def __init__(self, overrides: Sequence[str], composer: Composer | None = None) -> None:
        self.base = [o for o in overrides if override_key(o) not in CONTROL and not override_key(o).startswith("experiment.")]
        self.composer = composer or Composer(dropped=DROPPED)
        self._cache: dict[tuple[str, ...], tuple[str, dict[str, Any]]] = {}

    def __call__(self, cell_overrides: Sequence[str]) -> tuple[str, dict[str, Any]]:
        """(run id, configuration as plain containers with interpolations resolved)."""
        key = tuple(cell_overrides)
        if key not in self._cache:
            plain = self.composer.resolved(self.overrides(cell_overrides))
            self._cache[key] = (plain_run_id(plain), plain)
        return self._cache[key]

    def config(self, cell_overrides: Sequence[str]) -> DictConfig:
        """The configuration to run, the caller's own."""
        return self.composer(self.overrides(cell_overrides))

    def overrides(self, cell_overrides: Sequence[str]) -> list[str]:
        """The command line's overrides, then the cell's. A cell that belongs to another experiment brings its own `+experiment=`."""
        own = [o for o in cell_overrides if override_key(o) == "experiment"]
        base = [o for o in self.base if not (own and override_key(o) == "experiment")]
        return [_through_stand_in(o) for o in [*own, *base, *(o for o in cell_overrides if o not in own)]]


def _through_stand_in(override: str) -> str:
    if override_key(override) != "experiment" or not override.startswith("+"):
        return override
    return f"+experiment={stand_in(override.split('=', 1)[1])}"


def narrowed(cells: Iterable[Cell], overrides: Sequence[str]) -> list[Cell]:
    """The cells that agree with the command line: `selector.ratio=0.5` or `seed=1` keeps the cells of that ratio or seed.

    So an axis of a table can also be swept by Hydra's multirun, and both ways name the same runs. Raises ValueError if nothing is left.
    """
    cells = list(cells)
    kept = cells
    if not cells:
        return []  # a table without runs has no axis
    for override in overrides:
        key = override_key(override)
        if key in WHOLE:
            continue
        if key == "seed" or any(override_key(o) == key for cell in cells for o in cell.overrides):
            kept = [c for c in kept if all(_agree(o, override) for o in c.overrides if override_key(o) == key)]
            if not kept:
                values = sorted({o.split("=", 1)[1] for c in cells for o in c.overrides if override_key(o) == key})
                raise ValueError(f"{override} is no cell of this experiment; {key} takes {', '.join(values)}")
    return kept


def settings(overrides: Sequence[str]) -> list[str]:
    """The overrides of the command line that can make other runs than the experiment's own: neither places nor what chooses cells."""
    plain = (*WHOLE, *CONTROL, "experiment.members")
    return [o for o in overrides if override_key(o) not in plain and not override_key(o).startswith(("runtime", "hydra"))]


def _agree(one: str, other: str) -> bool:
    values = [text.split("=", 1)[1].strip("'\"") for text in (one, other)]
    try:
        return float(values[0]) == float(values[1])
    except ValueError:
        return values[0] == values[1]
