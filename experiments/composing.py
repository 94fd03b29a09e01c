"""Composes many cells quickly: Hydra once a choice of groups, values put in afterwards.

A table has some fifty cells but only a handful of different group choices (selector=...). Hydra composes each of those once;
ratios and seeds are then set the way Hydra itself sets them. The result equals `hydra.compose` of all overrides at once (a test
compares them); an unknown key is an error as it is there. One `Composer` may serve all tables of a command.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from hydra import compose
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from omegaconf import DictConfig, OmegaConf, open_dict


class Composer:
    """`Composer()(overrides)` is `compose("config", overrides)` with the keys of `dropped` set to what it says.

    Must be used where Hydra has been initialised.
    """

    def __init__(self, dropped: Mapping[str, Any] = MappingProxyType({}), config_name: str = "config") -> None:
        self.dropped, self.config_name = dropped, config_name
        self._parser = OverridesParser.create()
        self._parsed: dict[str, Override] = {}
        self._groups: dict[str, bool] = {}
        self._composed: dict[tuple[str, ...], DictConfig] = {}
        self._working: dict[tuple[Any, ...], DictConfig] = {}
        self._resolved: dict[tuple[Any, ...], dict[str, Any]] = {}

    def __call__(self, overrides: Sequence[str]) -> DictConfig:
        """A configuration of its own for the caller. Raises what Hydra raises for an override that does not fit."""
        structure, values = self.split(overrides)
        cfg = copy.deepcopy(self._structure(structure))
        self._put(cfg, values)
        return cfg

    def resolved(self, overrides: Sequence[str]) -> dict[str, Any]:
        """The same as plain containers, interpolations resolved; not to be changed, equal cells share them.

        Quicker: cells that set the same keys share one configuration, into which each puts its values.
        """
        structure, values = self.split(overrides)
        if (structure, values) not in self._resolved:
            self._resolved[structure, values] = self._resolve(structure, values)
        return self._resolved[structure, values]

    def _resolve(self, structure: tuple[str, ...], values: tuple[str, ...]) -> dict[str, Any]:
        parsed = [self._parse(text) for text in values]
        if any(isinstance(one.value(), dict) for one in parsed):  # a mapping is merged, so that it would stay for the next cell
            plain = OmegaConf.to_container(self([*structure, *values]), resolve=True)
        else:
            place = (structure, tuple(sorted({one.key_or_group for one in parsed})))
            if place not in self._working:
                self._working[place] = copy.deepcopy(self._structure(structure))
            self._put(self._working[place], values)
            plain = OmegaConf.to_container(self._working[place], resolve=True)
        assert isinstance(plain, dict)
        return plain

    def split(self, overrides: Sequence[str]) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """(those that choose groups or change the structure, those that only set a value)."""
        values = tuple(o for o in overrides if self._only_sets_a_value(o))
        return tuple(o for o in overrides if o not in values), values

    def _put(self, cfg: DictConfig, values: Sequence[str]) -> None:
        for text in values:
            parsed = self._parse(text)
            OmegaConf.update(cfg, parsed.key_or_group, parsed.value(), merge=True)

    def _parse(self, text: str) -> Override:
        if text not in self._parsed:
            self._parsed[text] = self._parser.parse_override(text)
        return self._parsed[text]

    def _structure(self, structure: tuple[str, ...]) -> DictConfig:
        if structure not in self._composed:
            cfg = compose(self.config_name, overrides=list(structure))
            with open_dict(cfg):
                for key, value in self.dropped.items():
                    cfg[key] = value
            self._composed[structure] = cfg
        return self._composed[structure]

    def _only_sets_a_value(self, text: str) -> bool:
        """A plain `key=value` whose key is no config group; additions, deletions and sweeps are left to Hydra."""
        parsed = self._parse(text)
        if parsed.is_add() or parsed.is_force_add() or parsed.is_delete() or parsed.is_sweep_override():
            return False
        key = parsed.key_or_group
        if key not in self._groups:
            self._groups[key] = bool(GlobalHydra.instance().config_loader().get_group_options(key))
        return not self._groups[key]
