"""CluSTER: choose a balanced subset of instruction data, fine-tune on it in parallel, see that nothing was lost.

    from clusterft import select, ClusterBatchSampler, weighted_loss

The names below are loaded when they are first used: importing the package costs nothing and imports no torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from clusterft.allocation import ClusterBatchSampler as ClusterBatchSampler
    from clusterft.api import SelectResult as SelectResult
    from clusterft.api import select as select
    from clusterft.kmeans import CapacityKMeans as CapacityKMeans
    from clusterft.loss import weighted_loss as weighted_loss

__version__ = "0.1.0"

_LAZY = {
    "select": "clusterft.api",
    "SelectResult": "clusterft.api",
    "ClusterBatchSampler": "clusterft.allocation",
    "CapacityKMeans": "clusterft.kmeans",
    "weighted_loss": "clusterft.loss",
}
__all__ = ["CapacityKMeans", "ClusterBatchSampler", "SelectResult", "__version__", "select", "weighted_loss"]


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module 'clusterft' has no attribute {name!r}")
    return getattr(import_module(_LAZY[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_LAZY})
