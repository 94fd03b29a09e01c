"""The stages of one run, each callable alone: prepare, features, select, train (evaluation is a module of its own).

Every stage reads the frozen configuration and what the stage before it left on disk, so that each can be a separate job and each
resumes by itself. `runner.run_one` strings them together; the `..._entry` functions are what ranks are started with.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from clusterft import launch
from clusterft.cluster import ClusterSelector
from clusterft.config import load_frozen
from clusterft.data import group_of, load_pool, refuse_rejected
from clusterft.distributed import Dist, single_process
from clusterft.exact import floor_product
from clusterft.features import FeatureContext, FeatureStore, compute
from clusterft.interfaces import Feature, FeatureSpec, Selector
from clusterft.load_report import LoadReport
from clusterft.models import load_model, load_tokenizer
from clusterft.progress import training_progress
from clusterft.prompting import encode_pool, row_lengths
from clusterft.records import Cost, Encoded, Example, Pool, Selection
from clusterft.row_io import read_rows, write_rows
from clusterft.seeding import generator, seed_hash
from clusterft.segments import selection_folder
from clusterft.selection_io import read_selection, write_selection
from clusterft.targets import build
from clusterft.tracking import wandb_tracker
from clusterft.validation import Validation, cut_heldout, subtasks_elsewhere

# Keys of the selector node that say how much to keep; the rest are the method's own parameters.
BUDGET_KEYS = ("ratio", "budget", "rows")
BUDGET_RULES = ("match_cluster", "fraction", "rows", "all")


@dataclass(frozen=True)
class Prepared:
    """The pool as tokens: `pool` without the rows that cannot teach, `encoded` aligned with it, the held-out rows likewise."""

    pool: Pool
    encoded: tuple[Encoded, ...]
    tokenizer: Any
    heldout: tuple[Encoded, ...]
    heldout_groups: tuple[str, ...]
    heldout_pool: Pool
    validation: Validation
    validation_examples: tuple[Example, ...]
    report: LoadReport


_EMBEDDED = ("stdlib", "medical_smoke")
_last_prepared: dict[str, Prepared] = {}


def prepare_for_cell(cfg: DictConfig) -> Prepared:
    """`prepare`, once for consecutive cells of a table on the same embedded pool; files are read anew, they may have changed."""
    if cfg.data.kind not in _EMBEDDED:
        return prepare(cfg)
    nodes = {"data": cfg.data, "model": cfg.model, "max_length": cfg.trainer.max_length, "runtime": places(cfg)}
    key = json.dumps({k: OmegaConf.to_container(v) if OmegaConf.is_config(v) else v for k, v in nodes.items()}, default=str)
    if key not in _last_prepared:
        _last_prepared.clear()
        _last_prepared[key] = prepare(cfg)
    return _last_prepared[key]


def prepare(cfg: DictConfig, *, strict: bool = False) -> Prepared:
    """Loads, templates and tokenises. The same code for every selector, the trainer and the held-out loss.

    strict: stop at the first row that would be set aside. Raises data.DataError, and ValueError when no row is left.
    """
    tokenizer = load_tokenizer(cfg.model, **places(cfg))
    count = partial(row_lengths, tokenizer=tokenizer, template=cfg.data.template)
    pools = load_pool(cfg.data, assets_dir=places(cfg)["cache_dir"], strict=strict, count_tokens=count)
    limits = {"max_row_tokens": cfg.data.max_row_tokens}
    pool, encoded = encode_pool(pools.train, tokenizer, cfg.data.template, cfg.trainer.max_length, **limits)
    heldout_pool, heldout = encode_pool(pools.heldout, tokenizer, cfg.data.template, cfg.trainer.max_length, **limits)
    if strict:
        refuse_rejected([*pool.rejected, *heldout_pool.rejected])
    validation, matched, heldout_pool, heldout = cut_heldout(cfg, heldout_pool, heldout)
    groups = tuple(group_of(e, cfg.data.group_field) for e in heldout_pool.examples)
    return Prepared(pool, encoded, tokenizer, heldout, groups, heldout_pool, validation, matched, pools.report)


def make_selector(cfg: DictConfig) -> Selector:
    """The configured selector. Raises what its constructor raises for an unknown or missing parameter."""
    node = {k: v for k, v in OmegaConf.to_container(cfg.selector, resolve=True).items() if k not in BUDGET_KEYS}
    return build("selector", node)


def cluster_selector(cfg: DictConfig) -> ClusterSelector:
    """CluSTER with the run's clustering: what the budget rule `match_cluster` asks for the number of rows."""
    node = OmegaConf.to_container(cfg.clustering, resolve=True)
    return ClusterSelector(**node, within="peripheral", allocation="equal", weights="balanced")


def needed_features(cfg: DictConfig) -> list[FeatureSpec]:
    """Features of the selector, then those that set its number of rows; each once. Two may bear one name, of different signals."""
    own = list(make_selector(cfg).feature_specs())
    return own + [s for s in budget_features(cfg) if s not in own]


def budget_features(cfg: DictConfig) -> list[FeatureSpec]:
    """What the clusters of `match_cluster` are made from."""
    return list(cluster_selector(cfg).feature_specs()) if cfg.selector.budget == "match_cluster" else []


def feature_context(cfg: DictConfig, ready: Prepared, dist: Dist) -> FeatureContext:
    """What extractors may use. The model is loaded at the first call of `load_model`, and once."""
    return FeatureContext(
        pool=ready.pool,
        encoded=ready.encoded,
        model_cfg=cfg.model,
        tokenizer=ready.tokenizer,
        template=cfg.data.template,
        max_length=cfg.trainer.max_length,
        token_budget=cfg.runtime.token_budget,
        dist=dist,
        seed=cfg.seed,
        load_model=lambda: model_for(cfg, device=str(dist.device)),
        progress=cfg.runtime.progress,
        validation=validation_rows(cfg, ready),
        places=places(cfg),
    )


def model_for(cfg: DictConfig, *, device: str) -> Any:
    """The run's model, loaded as configured."""
    return load_model(cfg.model, device=device, **places(cfg))


def places(cfg: DictConfig) -> dict[str, Path]:
    """The folders of assets and of the user's cache."""
    return {"assets_dir": Path(cfg.runtime.assets_dir), "cache_dir": Path(cfg.runtime.cache_dir).expanduser()}


def validation_rows(cfg: DictConfig, ready: Prepared) -> Validation:
    """Validation rows for the selectors that use them; empty for the others, so that nothing is fetched in vain."""
    if not any(spec.params.get("uses_validation") for spec in needed_features(cfg)):
        return {}
    return ready.validation or subtasks_elsewhere(cfg, ready.pool, ready.tokenizer)


def feature_store(cfg: DictConfig) -> FeatureStore:
    return FeatureStore(places(cfg)["cache_dir"] / "features")


def features(cfg: DictConfig, ready: Prepared, *, dist: Dist | None = None) -> dict[str, Feature]:
    """Every needed feature, computed (by the feature processes) or loaded; of two with one name the selector's own."""
    specs = needed_features(cfg)
    if dist is None and cfg.runtime.feature_processes > 1:
        store, context = feature_store(cfg), feature_context(cfg, ready, single_process(cfg.runtime.device))
        if not all(store.complete(spec, context) for spec in specs):
            run_on_workers(cfg, "features", processes=cfg.runtime.feature_processes, threads=cfg.runtime.feature_threads)
    return _loaded(specs, cfg, ready, dist)


def _loaded(specs: list[FeatureSpec], cfg: DictConfig, ready: Prepared, dist: Dist | None = None) -> dict[str, Feature]:
    """By name, computed where missing; of two with one name the first."""
    context = feature_context(cfg, ready, dist or single_process(cfg.runtime.device))
    return {name: its for spec in reversed(specs) for name, its in compute([spec], context, feature_store(cfg)).items()}


def budget_rows(cfg: DictConfig, ready: Prepared, have: Mapping[str, Feature]) -> int:
    """The exact number of rows that the run may keep. Raises ValueError for an unknown rule or an impossible number."""
    rule, n = cfg.selector.budget, len(ready.pool)
    if rule == "match_cluster":
        return cluster_selector(cfg).budget(ready.pool, have, cfg.selector.ratio, generator(cfg.seed, "choose"))
    if rule == "fraction":
        return max(1, floor_product(cfg.selector.ratio, n))
    if rule == "all":
        return n
    if rule == "rows":
        rows = cfg.selector.rows
        if not isinstance(rows, int) or not 1 <= rows <= n:
            raise ValueError(f"selector.rows is {rows!r}; give an integer from 1 to {n}, the rows of pool {ready.pool.name!r}")
        return rows
    raise ValueError(f"selector.budget {rule!r} is unknown; known are {', '.join(BUDGET_RULES)}")


def select(cfg: DictConfig, ready: Prepared, run_dir: Path) -> tuple[Selection, dict[str, float]]:
    """Computes features, chooses, writes `run_dir`/selection with the tokens of the chosen rows, and reads it back.

    The cost returned (seconds, passes of single rows) is that of the method itself: its own features, as measured when they were
    computed, and its `choose`.
    The clusters that only tell a rival how many rows it may keep are not counted against it.
    """
    folder = run_dir / "selection"
    selector = make_selector(cfg)
    budget = None if cfg.selector.budget == "match_cluster" else budget_rows(cfg, ready, {})
    clusters = cluster_selector(cfg) if budget is None else selector
    if isinstance(clusters, ClusterSelector):
        clusters.check(len(ready.pool), budget)
    have = features(cfg, ready)
    own = [spec.name for spec in selector.feature_specs()]
    if budget is None:
        budget = budget_rows(cfg, ready, _loaded(budget_features(cfg), cfg, ready))
    started, cpu_started = time.perf_counter(), time.process_time()
    chosen = selector.choose(ready.pool, {name: have[name] for name in own}, budget, generator(cfg.seed, "choose"))
    choose_seconds, choose_cpu_seconds = time.perf_counter() - started, time.process_time() - cpu_started
    feature_seconds = sum(have[name].cost.wall_seconds for name in own)
    feature_cpu_seconds = sum(have[name].cost.cpu_seconds or 0.0 for name in own)
    cost = Cost(wall_seconds=feature_seconds + choose_seconds)
    chosen = replace(chosen, seed=cfg.seed, cost=cost)
    chosen.check_against(ready.pool)
    write_rows(selected_rows(ready, chosen), folder)
    write_selection(chosen, folder)
    selection = read_selection(folder)
    selection.check_against(ready.pool)
    return selection, {
        "feature_seconds": feature_seconds,
        "choose_seconds": choose_seconds,
        "selection_seconds": cost.wall_seconds,
        "selection_cpu_seconds": feature_cpu_seconds + choose_cpu_seconds,
        "forward_passes": sum(have[name].cost.forward_passes or 0.0 for name in own),
        "backward_passes": sum(have[name].cost.backward_passes or 0.0 for name in own),
    }


def selected_rows(ready: Prepared, selection: Selection) -> list[Encoded]:
    """The encoded rows of a selection, aligned with its ids."""
    by_id = {row.id: row for row in ready.encoded}
    return [by_id[i] for i in selection.ids]


def train_entry(*, dist: Dist, config_path: str, segment: int = 0, begin_step: int = 0, until_step: int | None = None) -> None:
    """One rank of the training stage: reads the frozen configuration and the written selection, trains, rank 0 saves the model.

    segment, begin_step, until_step: with re-selection (see `adaptive`) the selection to use and the steps it is used for.
    The pool itself is neither loaded nor tokenised again: the stage before wrote the chosen rows beside the selection.
    """
    from clusterft.trainer import train

    cfg, run_dir = load_frozen(Path(config_path)), Path(config_path).parent
    folder = selection_folder(run_dir, segment)
    mode = cfg.runtime.wandb if dist.is_main else "disabled"
    facts, rows, shown = OmegaConf.to_container(cfg, resolve=True), read_rows(folder), cfg.runtime.progress and dist.is_main
    tracked = wandb_tracker(mode, run_id=run_dir.name, folder=run_dir / "train", config=facts)
    with tracked as tracker, training_progress([*map(len, rows)], cfg.trainer, tracker, shown=shown) as on_step:
        train(
            model_for(cfg, device=str(dist.device)),
            rows,
            read_selection(folder),
            cfg.trainer,
            cfg.sampler,
            dist=dist,
            out_dir=run_dir / "train",
            seed=seed_hash(cfg.seed, "train"),
            tokenizer=load_tokenizer(cfg.model, **places(cfg)),
            begin_step=begin_step,
            stop_after=until_step,
            on_step=on_step,
        )


def features_entry(*, dist: Dist, config_path: str) -> None:
    """One rank of the feature stage."""
    cfg = load_frozen(Path(config_path))
    features(cfg, prepare(cfg), dist=dist)


def run_on_workers(
    cfg: DictConfig, stage: str, *, processes: int, threads: int, run_dir: Path | None = None, **arguments: int
) -> None:
    """Starts the ranks of a stage and waits. Raises launch.WorkerError with the failing rank's message.

    stage: train | features, or any "module:function"; `arguments` are passed to it beside the configuration's path.
    """
    from clusterft.store import RunStore

    folder = run_dir or RunStore(Path(cfg.runtime.runs_dir)).begin(cfg)
    launch.run(
        stage if ":" in stage else f"clusterft.stages:{stage}_entry",
        {"config_path": str(folder / "config.yaml"), **arguments},
        processes=processes,
        threads=threads,
        device=cfg.runtime.device,
        launcher=cfg.runtime.launcher,
        nodes=cfg.runtime.nodes,
        scratch=folder,
    )
