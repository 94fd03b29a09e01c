"""From a cell's overrides to its configuration and run id, by Hydra's own composition.

In come the overrides of the command line (`+experiment=table2 +scale=laptop ...`) and those of a cell; out comes the configuration that
`python run.py` would compose from both, and the id of its run. The table's own nodes are taken out, so that a run that two tables share
is written down in one way.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from omegaconf import DictConfig

from clusterft.store import run_id
from experiments.composing import Composer
from experiments.spec import Cell, override_key

ROOT = Path(__file__).resolve().parents[1]
CONTROL = ("cell", "plan", "check", "explain", "seed")
"""Keys of the command line that choose cells rather than describe them."""
WHOLE = ("experiment", "scale")
"""Keys that name the table itself. A line of table 11 has its own `+experiment=`; the command line's does not choose among them."""


def available_selectors() -> set[str]:
    """Selectors that have a file in conf/selector."""
    return {path.stem for path in (ROOT / "conf/selector").glob("*.yaml")}


class Resolver:
    """Composes cells on top of the command line's overrides. Must be used where Hydra has been initialised."""

    def __init__(self, overrides: Sequence[str]) -> None:
        self.base = [o for o in overrides if override_key(o) not in CONTROL]
        self._compose = Composer(dropped={"experiment": None, "cell": None, "plan": False, "check": False, "explain": None})
        self._cache: dict[tuple[str, ...], tuple[str, DictConfig]] = {}

    def __call__(self, cell_overrides: Sequence[str]) -> tuple[str, DictConfig]:
        key = tuple(cell_overrides)
        if key not in self._cache:
            cfg = self._compose(self.overrides(cell_overrides))
            self._cache[key] = (run_id(cfg), cfg)
        return self._cache[key]

    def overrides(self, cell_overrides: Sequence[str]) -> list[str]:
        """The command line's overrides, then the cell's. A cell that belongs to another experiment brings its own `+experiment=`."""
        own = [o for o in cell_overrides if override_key(o) == "experiment"]
        base = [o for o in self.base if not (own and override_key(o) == "experiment")]
        return [*own, *base, *(o for o in cell_overrides if o not in own)]


def narrowed(cells: Iterable[Cell], overrides: Sequence[str]) -> list[Cell]:
    """The cells that agree with the command line: `selector.ratio=0.5` or `seed=1` keeps the cells of that ratio or seed.

    So an axis of a table can also be swept by Hydra's multirun, and both ways name the same runs. Raises ValueError if nothing is left.
    """
    cells = list(cells)
    kept = cells
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


def _agree(one: str, other: str) -> bool:
    values = [text.split("=", 1)[1].strip("'\"") for text in (one, other)]
    try:
        return float(values[0]) == float(values[1])
    except ValueError:
        return values[0] == values[1]
