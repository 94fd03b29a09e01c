"""A person's request to a configuration: the same conf/ that `run.py` composes, with `+scale=local`.

    Request(data, model, selector, budget, ...) ► compose ► RunConfig, frozen later by the run store

Names chosen from conf/ go through Hydra; paths and numbers are set as values, never spliced into an override text, so that no
file name can change what is composed. Nothing here imports torch.
"""

from __future__ import annotations

import json
import re
import shlex
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_dir
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf, open_dict

from clusterft.app import register_schema
from clusterft.data import expand_paths
from clusterft.exact import decimal_ratio
from clusterft.overrides import UserError, check_additions, one_sentence
from clusterft.sources import read_rows
from clusterft.text_rules import has_lone_surrogate

SELECTORS = ("cluster", "random", "ifd", "less", "s2l", "full")
HELDOUT_ROWS = 64
"""Rows held out of data of at least ten times as many; a tenth of smaller data."""

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json")

_NAME = re.compile(r"[A-Za-z0-9_]+")
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")


@dataclass(frozen=True)
class Request:
    """What a person asks of `select`. Exactly one of keep, rows and ratio (none for selector `full`).

    keep      share of the pool wanted in the end, in (0, 1]; for `cluster` within what equal clusters can reach
    rows      number of rows; beyond K n_min the small clusters are exhausted first
    ratio     r of the paper: every cluster keeps floor(r n_min) rows; another selector gets as many rows as CluSTER would
    holdout   rows set apart for the loss after training; None: HELDOUT_ROWS, or a tenth of data below ten times that
    fields    (ours, theirs) column names where the layout is not one that is recognised: prompt, response, input or turns
    settings  further Hydra overrides, for example trainer.epochs=3
    """

    data: tuple[Path, ...]
    model: str
    selector: str = "cluster"
    keep: str | None = None
    rows: int | None = None
    ratio: str | None = None
    clusters: int | None = None
    seed: int = 0
    template: str | None = None
    max_length: int | None = None
    holdout: int | None = None
    device: str = "cpu"
    progress: bool = False
    file_format: str | None = None
    fields: tuple[tuple[str, str], ...] = ()
    settings: tuple[str, ...] = ()


def conf_dir() -> Path:
    """The folder of conf/: inside an installed package, or beside src/ in a checkout. Raises UserError if neither is there."""
    here = Path(__file__).resolve().parent
    for place in (here / "conf", here.parents[1] / "conf"):
        if (place / "config.yaml").is_file():
            return place
    raise UserError(f"the configuration files are missing from {here}; install the package again")


def compose_request(request: Request) -> DictConfig:
    """The configuration of a request. Raises UserError, DataError or an OmegaConf error, each one sentence for a person."""
    _check_budget(request)
    paths = data_paths(request.data)
    chosen, model = model_choice(request.model)
    check_additions(request.settings)
    cfg = composed([f"selector={request.selector}", f"model={chosen}", *request.settings])
    asked = {key: OmegaConf.select(cfg, key) for key in (s.partition("=")[0].lstrip("+") for s in request.settings)}
    cfg.data.name = plain_name(request.data[0].absolute() if request.data else paths[0])  # of a folder: its own name
    cfg.data.path = [str(p) for p in paths]
    cfg.data.holdout_rows = default_holdout(paths) if request.holdout is None else request.holdout
    # Two thirds of few held-out rows are still scored; only LESS looks at the others.
    cfg.data.validation.rows = min(cfg.data.validation.rows, cfg.data.holdout_rows // 3)
    if request.selector == "less" and cfg.data.validation.rows < 1:
        raise UserError(f"selector less matches held-out rows, and {cfg.data.holdout_rows} are too few; use --holdout 3 or more")
    cfg.data.fields = dict(request.fields) or cfg.data.fields
    if request.file_format is not None:
        cfg.data.file_format = request.file_format
    for key, value in model.items():
        setattr(cfg.model, key, value)
    _set_budget(cfg, request)
    cfg.seed = request.seed
    cfg.runtime.device = request.device
    cfg.runtime.progress = request.progress
    if request.template is not None:
        cfg.data.template = request.template
    if request.max_length is not None:
        cfg.trainer.max_length = request.max_length
    if request.clusters is not None:
        cfg.clustering.n_clusters = request.clusters
    if request.selector == "s2l":
        cfg.selector.proxy.model = None  # its proxy is the run's own model: nothing to fetch
    if not Path(cfg.runtime.assets_dir).is_absolute():
        cfg.runtime.assets_dir = str(assets_dir(cfg.runtime.assets_dir))
    for key, value in asked.items():
        found = OmegaConf.select(cfg, key)
        if key != "runtime.assets_dir" and found != value and value == value:  # NaN is refused by its own check
            raise UserError(f"--set {key}: this command sets {key} itself, by a flag or from the data; --help lists the flags")
    return cfg


def composed(overrides: Sequence[str]) -> DictConfig:
    """conf/config.yaml with `+scale=local` and overrides. Raises UserError with Hydra's own first sentence."""
    register_schema()
    try:
        with initialize_config_dir(str(conf_dir()), version_base="1.3"):
            return compose("config", overrides=["+scale=local", *overrides])
    except HydraException as problem:
        raise UserError(f"--set: {one_sentence(problem)}") from problem


def command_of(request: Request, out: Path) -> str:
    """The command line of a request, quoted for a shell: what a report says to repeat it."""
    files = [f"./{path}" if str(path).startswith("-") else str(path) for path in request.data]
    words = ["clusterft", "select", *files, "--model", request.model, "--selector", request.selector]
    options = ("keep", "rows", "ratio", "clusters", "seed", "template", "max_length", "holdout", "device", "file_format")
    for name in options:
        value = getattr(request, name)
        if value is not None:
            words += [f"--{name.replace('_', '-')}", str(value)]
    for ours, theirs in request.fields:
        words += ["--field", f"{ours}={theirs}"]
    for setting in request.settings:
        words += ["--set", setting]
    return shlex.join([*words, "--out", str(out)])


def _check_share(name: str, value: str) -> None:
    try:
        decimal_ratio(value)
    except ValueError as problem:
        if name == "ratio":
            raise
        raise UserError(
            f"keep {value} is outside (0, 1]; 0.3 keeps three rows of ten, --rows takes a number of rows"
        ) from problem


def _check_budget(request: Request) -> None:
    given = [name for name in ("keep", "rows", "ratio") if getattr(request, name) is not None]
    if request.selector not in SELECTORS:
        raise UserError(f"selector {request.selector!r} is unknown; known are {', '.join(SELECTORS)}")
    if request.selector == "full":
        if given:
            raise UserError(f"selector full keeps every row; leave {given[0]} out")
    elif len(given) != 1:
        raise UserError(f"say how much to keep with exactly one of keep, rows and ratio; given: {', '.join(given) or 'none'}")
    for name in ("keep", "ratio"):
        if name in given:
            _check_share(name, getattr(request, name))
    if request.device not in ("cpu", "cuda"):
        raise UserError(f"device {request.device!r} is unknown; use cpu or cuda")


def _set_budget(cfg: DictConfig, request: Request) -> None:
    if request.selector == "full":
        return
    with open_dict(cfg.selector):
        if request.rows is not None:
            cfg.selector.budget, cfg.selector.rows = "rows", request.rows
        elif request.keep is not None:
            cfg.selector.budget, cfg.selector.ratio = "fraction", str(request.keep)
        else:
            cfg.selector.budget, cfg.selector.ratio = "match_cluster", str(request.ratio)


def data_paths(data: Sequence[Path]) -> list[Path]:
    """Absolute paths of all data files. Raises UserError for a file named twice or a name that a configuration cannot hold."""
    paths = [p.absolute() for p in expand_paths(list(data))]
    for path in paths:
        if has_lone_surrogate(str(path)):
            raise UserError(f"{path}: the name is not UTF-8, so no table can hold it; rename the file")
        if "${" in str(path):
            raise UserError(f"{path}: '${{' in a path would be read as a reference by the configuration; rename the file")
    real = [p.resolve() for p in paths]
    twice = [p for p, r in zip(paths, real, strict=True) if real.count(r) > 1]
    if twice:
        raise UserError(f"{twice[0]} is given twice; name each file once")
    return paths


def default_holdout(paths: Sequence[Path]) -> int:
    """HELDOUT_ROWS, or a tenth of the rows where there are fewer than ten times as many. Reads no further than it must."""
    enough, found = 10 * HELDOUT_ROWS, 0
    for path in paths:
        _, rows = read_rows(path)
        found += sum(1 for _ in islice(rows, enough - found))
        if found >= enough:
            return HELDOUT_ROWS
    return found // 10


def plain_name(path: Path) -> str:
    """A short name of letters and digits of any script, dashes and underscores for a data file, whatever the file is called."""
    stem = unicodedata.normalize("NFC", path.name.split(".")[0])
    return re.sub(r"[^\w-]+", "-", stem).strip("-")[:60] or "data"


def assets_dir(relative: str) -> Path:
    """The assets folder beside conf/ in a checkout, else `relative` below the working folder."""
    beside = conf_dir().parent / relative
    return beside if beside.is_dir() else Path(relative).absolute()


def model_choice(spec: str) -> tuple[str, dict[str, Any]]:
    """(name of a file in conf/model, values to set in it) for a name, a folder, a GGUF file or a hub id. Raises UserError."""
    known = sorted(p.stem for p in (conf_dir() / "model").glob("*.yaml") if p.stem != "local")
    if _NAME.fullmatch(spec) and spec in known:
        return spec, {}
    path = Path(spec).expanduser()
    if path.is_dir():
        if not any((path / name).is_file() for name in TOKENIZER_FILES):
            raise UserError(f"{path} holds no tokenizer ({', '.join(TOKENIZER_FILES)}); save it there with save_pretrained")
        return "local", {
            "name": plain_name(path),
            "path": str(path.absolute()),
            "architecture": _architecture(path / "config.json"),
        }
    if path.suffix == ".gguf" and path.is_file():
        return "local", _gguf(path.absolute())
    if _HUB_ID.fullmatch(spec) and path.suffix != ".gguf":
        return "local", _hub(spec)
    raise UserError(
        f"model {spec!r} is neither a folder, a GGUF file, a hub id (owner/name) nor one of {', '.join(known)}; check it"
    )


def _architecture(config: Path) -> str:
    try:
        found = json.loads(config.read_text(encoding="utf-8"))["architectures"][0]
    except (OSError, ValueError, KeyError, IndexError, TypeError) as problem:
        raise UserError(
            f"{config}: no model architecture there; a local model is a folder written by save_pretrained"
        ) from problem
    return str(found)


def _gguf(path: Path) -> dict[str, Any]:
    from clusterft.gguf_convert import converted_folder

    cache = Path(composed([]).runtime.cache_dir).expanduser()
    folder = converted_folder(path, None, cache)
    return {
        "name": plain_name(path),
        "source": "gguf",
        "path": str(path.parent),
        "gguf_file": path.name,
        "architecture": _architecture(folder / "config.json"),
    }


def _hub(spec: str) -> dict[str, Any]:
    from transformers import AutoConfig

    from clusterft.network import hub_or_cache

    try:
        with hub_or_cache():
            config = AutoConfig.from_pretrained(spec, trust_remote_code=False)
    except (OSError, ValueError) as problem:
        first = (str(problem).splitlines() or [""])[0][:200]
        raise UserError(
            f"model {spec} is not available ({first}); connect to the hub, or name a folder or a GGUF file"
        ) from problem
    if not config.architectures:
        raise UserError(f"model {spec}: its configuration names no architecture; it cannot be loaded as a language model")
    return {"name": spec, "source": "hub", "path": spec, "architecture": config.architectures[0]}
