"""Composes many cells quickly: Hydra once a choice of groups, values put in afterwards.

A table has some fifty cells but only a handful of different group choices (selector=...). Hydra composes each of those once;
ratios and seeds are then set the way Hydra itself sets them, on a copy. The result equals `hydra.compose` of all overrides at
once (a test compares them); an unknown key is an error as it is there.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from hydra import compose
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import DictConfig, OmegaConf, open_dict


class Composer:
    """`Composer()(overrides)` is `compose("config", overrides)` with the keys of `dropped` set to what it says.

    Must be used where Hydra has been initialised.
    """

    def __init__(self, dropped: Mapping[str, Any] = MappingProxyType({}), config_name: str = "config") -> None:
        self.dropped, self.config_name = dropped, config_name
        self._parser = OverridesParser.create()
        self._groups: dict[str, bool] = {}
        self._composed: dict[tuple[str, ...], DictConfig] = {}

    def __call__(self, overrides: Sequence[str]) -> DictConfig:
        """A configuration of its own for the caller. Raises what Hydra raises for an override that does not fit."""
        values = [o for o in overrides if self._only_sets_a_value(o)]
        structure = tuple(o for o in overrides if o not in values)
        if structure not in self._composed:
            self._composed[structure] = self._compose(structure)
        cfg = copy.deepcopy(self._composed[structure])
        for text in values:
            parsed = self._parser.parse_override(text)
            OmegaConf.update(cfg, parsed.key_or_group, parsed.value(), merge=True)
        return cfg

    def _compose(self, structure: Sequence[str]) -> DictConfig:
        cfg = compose(self.config_name, overrides=list(structure))
        with open_dict(cfg):
            for key, value in self.dropped.items():
                cfg[key] = value
        return cfg

    def _only_sets_a_value(self, text: str) -> bool:
        """A plain `key=value` whose key is no config group; additions, deletions and sweeps are left to Hydra."""
        parsed = self._parser.parse_override(text)
        if parsed.is_add() or parsed.is_force_add() or parsed.is_delete() or parsed.is_sweep_override():
            return False
        key = parsed.key_or_group
        if key not in self._groups:
            self._groups[key] = bool(GlobalHydra.instance().config_loader().get_group_options(key))
        return not self._groups[key]
