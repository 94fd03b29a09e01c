"""Files that an analysis leaves beside a run's record: names, contents, reading and writing.

    <run directory>/artifacts/NAME.json        {"schema": 1, "artifact": NAME, "run_id": ..., "values": {...}}
    results/<scale>/artifacts/RUN_ID/NAME.json  the same file, committed beside the exported record

The numbers need a model, so they are computed by `clusterft.diagnostics` and written by the composition root through
`write_artifact`; tables and figures only read. `SCHEMAS` says which keys an artifact's `values` must have, with type and meaning.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from clusterft.atomic import write_atomic

SCHEMA = 1

SCHEMAS: dict[str, dict[str, tuple[type | tuple[type, ...], str]]] = {
    "gradient_diversity": {
        "diversity": (
            float,
            "sum of squared norms over squared norm of the sum of the selected rows' true gradients",
        ),
        "n": (int, "rows whose gradients were taken"),
        "gradient": (str, "which gradient: parameters, projection and its dimension"),
    },
    "centroid_cosine": {
        "clusters": (
            list,
            "[{cluster, rows, kept, cosine}]: gradient centroid of all rows against the kept rows'",
        ),
        "gradient": (str, "which gradient"),
    },
    "worker_similarity": {
        "steps": (list, "mean cosine over pairs of workers of their true gradients, one number a training step"),
        "workers": (int, "W"),
        "gradient": (str, "which gradient"),
    },
    "cluster_similarity": {
        "intra": (float, "mean cosine of pairs of rows of one cluster, true gradients"),
        "inter": (float, "mean cosine of pairs of rows of different clusters"),
        "permutations": (int, "label permutations that keep the cluster sizes"),
        "p_value": (float, "share of permutations with intra - inter at least as large, (b + 1) / (permutations + 1)"),
        "null_edges": (list, "histogram of intra - inter under permutation: edges, one more than counts"),
        "null_counts": (list, "counts of that histogram"),
        "n": (int, "rows"),
        "gradient": (str, "which gradient"),
    },
    "variance": {
        "gradient": (str, "which gradient"),
        "n": (int, "rows"),
        "pi": (list, "n_c / n of each cluster"),
        "sigma_sq": (
            list,
            "variance of each cluster's gradients around its mean, divisor n_c - 1, summed over dimensions",
        ),
        "inter": (float, "sum of pi_c |mean_c - mean|^2"),
        "batch_sizes": (list, "batch sizes"),
        "closed": (dict, "scheme -> expected squared error of the batch mean at each batch size, closed form"),
        "measured": (dict, "scheme -> the same by drawing batches"),
        "stderr": (dict, "scheme -> standard error of the measured value"),
    },
    "categories": {
        "ids": (list, "row ids"),
        "clusters": (list, "cluster of each row"),
        "categories": (list, "category of each row: a person's label, or the module family at laptop scale"),
        "labelled_by": (str, "who or what gave the categories"),
    },
    "pool_statistics": {
        "pool": (str, "name of the pool"),
        "rows": (int, "rows after loading"),
        "rejected": (dict, "reason -> rows set aside"),
        "tokens": (dict, "mean, median, p95, max of tokens a row after templating and cutting"),
        "target_tokens": (dict, "the same of response tokens"),
        "truncated": (int, "rows that were cut"),
        "groups": (int, "families or sources that the rows name, 0 if none"),
        "cluster_sizes": (list, "rows of each cluster, [] for a method without clusters"),
    },
}


VALUE_COLUMNS: dict[str, tuple[str, str, str | None]] = {
    "gradient_diversity.diversity": ("gradient diversity", "number", "higher"),
    "worker_similarity.steps": ("cosine between workers", "number", "lower"),
    "cluster_similarity.intra": ("cosine within clusters", "number", None),
    "cluster_similarity.inter": ("cosine between clusters", "number", None),
    "cluster_similarity.p_value": ("permutation p", "number", None),
    "pool_statistics.rows": ("rows", "count", None),
    "pool_statistics.rejected": ("rows set aside", "count", None),
    "pool_statistics.truncated": ("rows cut", "count", None),
    "pool_statistics.groups": ("families", "count", None),
    "pool_statistics.tokens.mean": ("tokens a row, mean", "count", None),
    "pool_statistics.tokens.p95": ("tokens a row, 95 %", "count", None),
    "pool_statistics.target_tokens.mean": ("response tokens a row, mean", "count", None),
}
"""What an experiment's `values` may name: artifact.key -> (heading, unit, which way is better)."""


def value_at(values: Mapping[str, Any], path: Sequence[str]) -> float:
    """One number out of an artifact's values: a number itself, the mean of a list, the sum of a mapping. Raises KeyError."""
    found: Any = values
    for key in path:
        found = found[key]
    if isinstance(found, list):
        return math.fsum(found) / len(found)
    return float(math.fsum(found.values()) if isinstance(found, dict) else found)


def check_values(name: str, values: Mapping[str, Any]) -> None:
    """Raises ValueError, naming the key, if `values` is not what artifact `name` holds."""
    if name not in SCHEMAS:
        raise ValueError(f"artifact {name!r} is unknown; known are {', '.join(sorted(SCHEMAS))}")
    wanted = SCHEMAS[name]
    for key in sorted(wanted.keys() | values.keys()):
        if key not in values:
            raise ValueError(f"artifact {name}: {key} is missing")
        if key not in wanted:
            raise ValueError(f"artifact {name}: {key} is unknown; known are {', '.join(wanted)}")
        kind = wanted[key][0]
        fits = isinstance(values[key], (int, float) if kind is float else kind) and not isinstance(values[key], bool)
        if not fits or (kind is float and not math.isfinite(values[key])):
            raise ValueError(f"artifact {name}: {key} is {values[key]!r}, expected {getattr(kind, '__name__', kind)}")


def write_artifact(run_dir: Path, name: str, run_id: str, values: Mapping[str, Any]) -> Path:
    """Checks and writes one artifact, atomically, one line a value. Raises ValueError for values that do not fit the schema."""
    check_values(name, values)
    path = Path(run_dir) / "artifacts" / f"{name}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = [f" {json.dumps(key)}: {_compact(values[key])}" for key in sorted(values)]
    head = f'"artifact": {_compact(name)}, "run_id": {_compact(run_id)}, "schema": {SCHEMA}'
    write_atomic(path, f'{{{head}, "values": {{\n' + ",\n".join(lines) + "\n}}\n")
    return path


def _compact(value: Any) -> str:
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False)


def read_artifact(folder: Path | None, name: str) -> dict[str, Any] | None:
    """The values of an artifact in a run's folder of artifacts, None if it was not made.

    Raises ValueError for a file of another schema or shape.
    """
    if folder is None or not (folder / f"{name}.json").exists():
        return None
    path = folder / f"{name}.json"
    data = json.loads(path.read_text(encoding="utf-8"))
    if data.get("schema") != SCHEMA or data.get("artifact") != name:
        raise ValueError(f"{path}: expected artifact {name} of schema {SCHEMA}; remove it to make it again")
    check_values(name, data["values"])
    return data["values"]


def missing_artifacts(folder: Path | None, names: Sequence[str]) -> tuple[str, ...]:
    """Which of `names` a run lacks in its folder of artifacts."""
    return tuple(n for n in names if folder is None or not (folder / f"{n}.json").exists())
