"""Objects that a configuration names by `_target_`."""

from __future__ import annotations

import inspect
from typing import Any

from hydra.errors import InstantiationException
from hydra.utils import get_object


def build(where: str, node: dict[str, Any], **more: Any) -> Any:
    """Makes the object that a configuration node names by its `_target_`. Unlike hydra's `instantiate`, errors keep their own sentence.

    Raises ValueError for a target that cannot be imported or for parameters that it does not take.
    """
    parameters = {k: v for k, v in node.items() if k != "_target_"} | more
    try:
        target = get_object(node["_target_"])
    except (KeyError, ImportError, InstantiationException) as problem:
        raise ValueError(f"{where}._target_ {node.get('_target_')!r} cannot be imported: {problem}") from problem
    try:
        inspect.signature(target).bind(**parameters)
    except TypeError as problem:
        raise ValueError(f"{where}: {problem}; {node['_target_']} takes {inspect.signature(target)}") from problem
    return target(**parameters)
