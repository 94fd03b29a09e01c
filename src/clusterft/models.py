"""Configurations to models and tokenizers: hub ids, local folders, GGUF files and the tiny model made in code.

In: a `ModelConfig` (or its OmegaConf node). Out: a transformers model in eval mode, a tokenizer, the facts that name both in a
cache key. Weights come from safetensors unless `use_safetensors: false` asks for pickled ones, no code of a model is ever run
unless `trust_remote_code` is set, and the loaded configuration is compared with the `shape` that conf/model promises.

    hub      path is an id, with a revision                 local  path is a folder
    gguf     path is a folder that holds gguf_file; converted to safetensors once (clusterft.gguf_convert)
    tiny     a small random Llama with a byte-level tokenizer, the same in every process (clusterft.tiny)
"""

from __future__ import annotations

import hashlib
from contextlib import nullcontext
from pathlib import Path
from pickle import UnpicklingError
from typing import TYPE_CHECKING, Any

import torch
import transformers
from omegaconf import DictConfig, OmegaConf
from safetensors import SafetensorError
from transformers import AutoTokenizer

from clusterft.arithmetic import check_attention
from clusterft.gguf_convert import converted_folder, sha256_of
from clusterft.network import hub_or_cache
from clusterft.tiny import build_tiny_model, build_tiny_tokenizer

if TYPE_CHECKING:  # naming these loads transformers' modelling code, seconds that a tokenizer alone does not need
    from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

SOURCES = ("hub", "local", "gguf", "tiny")
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
ATTENTION = ("eager", "sdpa", "flash_attention_2")
_WHOLE_HASH_BYTES = 2 << 30
"""Files above this size are named by their safetensors header, size and ends: hashing 13 GB would take a minute a run."""


class ModelError(ValueError):
    """A model cannot be used as configured; the message is one sentence with the remedy."""


def load_tokenizer(
    cfg: Any, *, assets_dir: str | Path = "assets", cache_dir: str | Path | None = None, checkpoint_dir: str | Path | None = None
) -> PreTrainedTokenizerBase:
    """The tokenizer of a model. No token is added: pad stays what it is (see collate.pad_id_of).

    checkpoint_dir  a folder written by training; used when it holds a tokenizer, else the configured one is.
    Raises ModelError if it is not there or cannot be read.
    """
    _check(cfg)
    if checkpoint_dir is not None and (Path(checkpoint_dir) / "tokenizer_config.json").is_file():
        return _fetch_tokenizer(cfg, str(checkpoint_dir), trust_remote_code=False)
    if cfg.source == "tiny":
        return build_tiny_tokenizer()
    place, options = _place(cfg, assets_dir, cache_dir)
    return _fetch_tokenizer(cfg, place, **options)


def load_model(
    cfg: Any,
    *,
    device: str = "cpu",
    assets_dir: str | Path = "assets",
    cache_dir: str | Path | None = None,
    checkpoint_dir: str | Path | None = None,
) -> PreTrainedModel:
    """The model in eval mode on `device`, weights in cfg.weights_dtype, attention as cfg.attention.

    checkpoint_dir  a folder written by `save_pretrained` after training: the same model with these weights.
    cache_dir       where a converted GGUF model lives; default: the user's cache folder.
    Raises ModelError: unknown source, dtype, attention or device, weights absent, shape other than configured.
    """
    _check(cfg)
    if device.startswith("cuda") and not torch.cuda.is_available():
        raise ModelError(f"runtime.device={device} was asked for, but torch finds no CUDA device; use runtime.device=cpu")
    check_attention(cfg, device)
    kwargs: dict[str, Any] = {"dtype": DTYPES[cfg.weights_dtype], "attn_implementation": cfg.attention}
    if checkpoint_dir is not None:
        model = _from_folder(cfg, Path(checkpoint_dir), kwargs)
    elif cfg.source == "tiny":
        model = build_tiny_model(config_from_shape(cfg), **kwargs)
    else:
        place, options = _place(cfg, assets_dir, cache_dir)
        model = _fetch(
            cfg, transformers.AutoModelForCausalLM.from_pretrained, place, **options, **kwargs, use_safetensors=_safetensors(cfg)
        )
    _check_shape(cfg, model.config)
    if model.config._attn_implementation != cfg.attention:
        raise ModelError(
            f"model.attention={cfg.attention} was asked for, the model came with {model.config._attn_implementation}"
        )
    return model.to(device).eval()


def _check(cfg: Any) -> None:
    for key, known in (("source", SOURCES), ("weights_dtype", tuple(DTYPES)), ("attention", ATTENTION)):
        value = getattr(cfg, key)
        if value not in known:
            raise ModelError(f"model.{key}={value!r} is unknown; known: {', '.join(known)}")


def _place(cfg: Any, assets_dir: str | Path, cache_dir: str | Path | None) -> tuple[str, dict[str, Any]]:
    """Where from_pretrained shall look, and with which options."""
    if cfg.source == "gguf":
        return str(converted_folder(gguf_path(cfg, assets_dir), cfg.sha256, cache_dir)), {"trust_remote_code": False}
    options = {"trust_remote_code": bool(cfg.trust_remote_code)}
    if cfg.source == "hub":
        return cfg.path, {**options, "revision": cfg.revision}
    folder = Path(cfg.path)
    if not (folder / "config.json").is_file():
        raise ModelError(f"model.path={cfg.path}: no config.json there; a local model is a folder written by save_pretrained")
    if cfg.sha256 is not None:
        found = sha256_of(folder / "model.safetensors")
        if found != cfg.sha256:
            raise ModelError(f"{folder / 'model.safetensors'} has SHA-256 {found}, model.sha256 is {cfg.sha256}")
    return str(folder), options


def _safetensors(cfg: Any) -> bool:
    """False where `use_safetensors: false` asks for pickled weights and there are no others. Raises ModelError if they were not asked for."""
    folder = Path(cfg.path) if cfg.source == "local" else None
    there = folder is not None and any(folder.glob("*.safetensors"))
    if getattr(cfg, "use_safetensors", None) is False:
        return there
    if folder is not None and not there:
        pickled = ", ".join(sorted(p.name for p in folder.glob("*.bin"))[:2])
        raise ModelError(
            _no_safetensors(folder) + (f" (it holds pickled weights, {pickled}, which can run code)" if pickled else "")
        )
    return True


def _no_safetensors(folder: Path) -> str:
    return (
        f"{folder}: no safetensors file; convert the model with save_pretrained in a place that you trust, "
        "or set model.use_safetensors=false"
    )


def gguf_path(cfg: Any, assets_dir: str | Path = "assets") -> Path:
    """The GGUF file: `path` below assets_dir, or as it is when absolute. Raises ModelError naming `make assets` if absent."""
    path = Path(assets_dir) / cfg.path / str(cfg.gguf_file)
    if not path.is_file():
        raise ModelError(f"model {cfg.name}: {path} is not there; run 'make assets', which brings the embedded model")
    return path


def _fetch(cfg: Any, loader: Any, place: str, **options: Any) -> Any:
    try:
        with hub_or_cache() if cfg.source == "hub" else nullcontext():
            return loader(place, **options)
    except ImportError as error:
        raise ModelError(f"model {cfg.name}: {_first_line(error)}; install it or set model.attention=sdpa") from error
    except SafetensorError as error:
        raise ModelError(f"model {cfg.name}: weights in {place} are damaged ({_first_line(error)}); fetch them again") from error
    except UnpicklingError as error:
        raise ModelError(f"model {cfg.name}: the pickled weights in {place} hold more than weights, and are refused") from error
    except ValueError as error:
        if "trust_remote_code" not in str(error):
            raise ModelError(f"model {cfg.name}: {place} cannot be loaded ({_first_line(error)})") from error
        raise ModelError(
            f"model {cfg.name}: {place} needs code of its own; read it, then set model.trust_remote_code=true to run it"
        ) from error
    except OSError as error:  # offline, gated, absent and "no safetensors" all arrive as OSError
        if cfg.source != "hub":
            raise ModelError(f"model {cfg.name}: {place} cannot be loaded ({_first_line(error)})") from error
        raise ModelError(
            f"model {cfg.path} (revision {cfg.revision or 'newest'}) is not available ({_first_line(error)}); "
            "connect to the hub, set model.source=local and model.path to a copy, or add +scale=laptop, which needs no hub"
        ) from error


def _fetch_tokenizer(cfg: Any, place: str, **options: Any) -> PreTrainedTokenizerBase:
    """What a folder without a readable tokenizer raises depends on what is wrong with it; a person gets one sentence."""
    try:
        return _fetch(cfg, AutoTokenizer.from_pretrained, place, **options)
    except Exception as error:  # the tokenizers library raises bare Exceptions for files that it cannot parse
        problem = error.__cause__ if isinstance(error, ModelError) else error
        unreadable = type(problem) is Exception or isinstance(problem, KeyError | TypeError | AttributeError | ValueError)
        if not unreadable or "trust_remote_code" in str(error):
            raise
        raise ModelError(
            f"model {cfg.name}: {place} holds no tokenizer that can be read ({type(problem).__name__}: {_first_line(problem).rstrip(' :')}); "
            "put the model's tokenizer.json and tokenizer_config.json there, which tokenizer.save_pretrained writes"
        ) from problem


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0][:200]


def _from_folder(cfg: Any, folder: Path, kwargs: dict[str, Any]) -> PreTrainedModel:
    if not (folder / "config.json").is_file():
        raise ModelError(f"{folder}: no trained model there (config.json is missing)")
    return _fetch(
        cfg,
        transformers.AutoModelForCausalLM.from_pretrained,
        str(folder),
        use_safetensors=True,
        trust_remote_code=False,
        **kwargs,
    )


def config_from_shape(cfg: Any) -> PretrainedConfig:
    """A transformers configuration of class `cfg.architecture` with the numbers of `cfg.shape`.

    Raises ModelError if this version of transformers has no such architecture.
    """
    model_class = getattr(transformers, cfg.architecture, None)
    if model_class is None or not hasattr(model_class, "config_class"):
        raise ModelError(f"model.architecture={cfg.architecture!r} is no model class of transformers {transformers.__version__}")
    return model_class.config_class(**plain_shape(cfg))


def plain_shape(cfg: Any) -> dict[str, Any]:
    """cfg.shape as plain Python values: transformers refuses OmegaConf's own dictionaries."""
    shape = cfg.shape
    return OmegaConf.to_container(shape, resolve=True) if isinstance(shape, DictConfig) else dict(shape)  # type: ignore[return-value]


def _check_shape(cfg: Any, config: PretrainedConfig) -> None:
    found_class = (config.architectures or [cfg.architecture])[0]
    if found_class != cfg.architecture:
        raise ModelError(f"model {cfg.name} is a {found_class}, model.architecture says {cfg.architecture}")
    if not cfg.shape:  # nothing is promised; a class that comes with the model has no configuration in transformers
        return
    expected = config_from_shape(cfg)
    for key in cfg.shape:
        asked = getattr(expected, key, None)
        found = getattr(config, key, None)
        if not _same(asked, found):
            raise ModelError(f"model {cfg.name}: {key} is {found}, model.shape says {asked}; correct conf/model or the path")


def _same(asked: Any, found: Any) -> bool:
    """Equal up to the rounding of a float that went through float32; of a dictionary, the keys that are asked for."""
    if isinstance(asked, dict) and isinstance(found, dict):
        return all(_same(value, found.get(key)) for key, value in asked.items())
    if isinstance(asked, float) and isinstance(found, float):
        return abs(asked - found) <= 1e-6 * abs(asked)
    return asked == found


def parameter_count(cfg: Any) -> int:
    """Number of parameters of the real shape, tied ones counted once; computed without memory for weights."""
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config_from_shape(cfg))
    model.tie_weights()
    return sum(p.numel() for p in model.parameters())


def model_identity(cfg: Any, *, assets_dir: str | Path = "assets") -> dict[str, Any]:
    """What names this model in a cache key: changes whenever the values that it computes may change. JSON-able.

    Does not load the model. Hub models are named by id and revision; files by SHA-256 (see _WHOLE_HASH_BYTES).
    """
    _check(cfg)
    identity = {k: getattr(cfg, k) for k in ("name", "source", "revision", "architecture", "weights_dtype", "attention")}
    if cfg.source == "hub":
        identity["path"] = cfg.path
    elif cfg.source == "gguf":
        identity["sha256"] = sha256_of(gguf_path(cfg, assets_dir))
    elif cfg.source == "local":
        _safetensors(cfg)
        identity["sha256"] = folder_sha256(Path(cfg.path))
    else:
        identity["shape"] = plain_shape(cfg)
    return identity


def folder_sha256(folder: Path) -> str:
    """One hash for config, tokenizer and weights (pickled ones where there are no others) of a local model folder.

    Raises ModelError if it has no weights.
    """
    weights = sorted(folder.glob("*.safetensors")) or sorted(folder.glob("pytorch_model*.bin"))
    if not weights:
        raise ModelError(_no_safetensors(folder))
    small = sum(p.stat().st_size for p in weights) <= _WHOLE_HASH_BYTES
    digest = hashlib.sha256()
    for path in [folder / "config.json", *sorted(folder.glob("tokenizer*.json")), *weights]:
        whole = small or path.suffix == ".json"
        digest.update(f"{path.name} {sha256_of(path) if whole else _ends_sha256(path)}\n".encode())
    return digest.hexdigest()


def _ends_sha256(path: Path) -> str:
    size = path.stat().st_size
    with path.open("rb") as stream:
        digest = hashlib.sha256(f"{size}".encode() + stream.read(1 << 24))
        stream.seek(max(0, size - (1 << 24)))
        digest.update(stream.read())
    return "ends-" + digest.hexdigest()
