"""LoRA adapters for features: put on, trained, saved with their optimiser's moments by parameter name, taken off again.

In comes the run's model; within `lora_on(...)` it carries adapters and nothing else of it can be trained; afterwards it is what
it was.

    checkpoint file (safetensors)   weight/<name>, m/<name>, v/<name> for every adapter tensor; step and mean learning rate as
    text
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from clusterft.seeding import seed_hash


@dataclass(frozen=True)
class LoraParams:
    """rank and alpha as in Hu et al. 2021; targets: names of linear layers; last_layers: adapters on so many last layers, None
    for all."""

    rank: int
    alpha: int
    dropout: float
    targets: Sequence[str]
    last_layers: int | None
    seed: int


@contextmanager
def lora_on(model: Any, params: LoraParams) -> Iterator[Any]:
    """The model itself with adapters in place, float32 whatever the model's dtype; A random (by `seed`), B zero.

    Raises ValueError (peft) if no layer is called as `targets` say, or last_layers exceeds the model's layers.
    """
    trainable = {name: p.requires_grad for name, p in model.named_parameters()}
    count = model.config.get_text_config().num_hidden_layers
    if params.last_layers is not None and not 1 <= params.last_layers <= count:
        raise ValueError(f"last_layers is {params.last_layers}, the model has {count} layers")
    layers = None if params.last_layers is None else list(range(count - params.last_layers, count))
    config = LoraConfig(
        r=params.rank,
        lora_alpha=params.alpha,
        lora_dropout=params.dropout,
        target_modules=list(params.targets),
        layers_to_transform=layers,
        bias="none",
    )
    with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="`is_gradient_checkpointing` is deprecated")  # peft asks by the old name
        torch.manual_seed(seed_hash(params.seed, "lora-init"))
        wrapped = get_peft_model(model, config)
    try:
        yield model
    finally:
        wrapped.unload()
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(trainable[name])


def adapter_parameters(model: Any) -> dict[str, nn.Parameter]:
    """Name -> adapter tensor, in the model's own order. The order of a flat gradient."""
    return {name: p for name, p in model.named_parameters() if p.requires_grad}


def moments_by_name(named: Mapping[str, nn.Parameter], optimizer: torch.optim.Optimizer) -> dict[str, tuple[Tensor, Tensor]]:
    """name -> (first, second moment) of a live Adam optimiser. Raises KeyError naming the tensor that has none."""
    found = {}
    for name, parameter in named.items():
        state = optimizer.state.get(parameter, {})
        if "exp_avg" not in state or "exp_avg_sq" not in state:
            raise KeyError(f"the optimiser holds no moments of {name}; it took no update of it")
        found[name] = (state["exp_avg"], state["exp_avg_sq"])
    return found


def moments_from_state(state: Mapping[str, Any], group_names: Sequence[Sequence[str]]) -> dict[str, tuple[Tensor, Tensor]]:
    """name -> moments from a saved optimiser state with integer keys, as `optimizer.pt` of the Trainer has them.

    state        optimizer.state_dict()
    group_names  the parameters' names, group by group, in the order in which the optimiser was given them: the only thing that
    ties numbers to names

    Raises KeyError naming the tensor without moments, ValueError if the groups do not fit.
    """
    groups = state["param_groups"]
    if [len(g["params"]) for g in groups] != [len(names) for names in group_names]:
        held, given = [len(g["params"]) for g in groups], [len(names) for names in group_names]
        raise ValueError(f"the optimiser has groups of {held} tensors, the names come in groups of {given}")
    found = {}
    for group, names in zip(groups, group_names, strict=True):
        for number, name in zip(group["params"], names, strict=True):
            entry = state["state"].get(number, {})
            if "exp_avg" not in entry or "exp_avg_sq" not in entry:
                raise KeyError(f"the optimiser state holds no moments of {name} (tensor {number})")
            found[name] = (entry["exp_avg"], entry["exp_avg_sq"])
    return found


@dataclass(frozen=True)
class AdapterCheckpoint:
    """One epoch's end: weights and moments by name, updates made, mean learning rate of the epoch."""

    weights: Mapping[str, Tensor]
    first: Mapping[str, Tensor]
    second: Mapping[str, Tensor]
    step: int
    rate: float

    def load_into(self, model: Any) -> None:
        """Copies the weights into the model's adapters. Raises ValueError if the names differ."""
        own = adapter_parameters(model)
        if list(own) != list(self.weights):
            odd = sorted(set(own) ^ set(self.weights))
            raise ValueError(f"the checkpoint's adapters are not the model's: {len(odd)} names differ, for example {odd[:1]}")
        with torch.no_grad():
            for name, parameter in own.items():
                parameter.copy_(self.weights[name])

    def flat_moments(self) -> tuple[Tensor, Tensor]:
        """(p,) and (p,): both moments in the order of a flat gradient."""
        flat = [torch.cat([part[name].flatten().float() for name in self.weights]) for part in (self.first, self.second)]
        return flat[0], flat[1]


def save_checkpoint(file: Path, model: Any, optimizer: torch.optim.Optimizer, *, step: int, rate: float) -> None:
    """Writes weights and moments, atomically."""
    named = adapter_parameters(model)
    tensors = {f"weight/{name}": p.detach().contiguous() for name, p in named.items()}
    for name, (first, second) in moments_by_name(named, optimizer).items():
        tensors |= {f"m/{name}": first.contiguous(), f"v/{name}": second.contiguous()}
    temporary = file.with_suffix(".tmp")
    save_file(tensors, temporary, metadata={"step": str(step), "rate": repr(rate), "names": "\n".join(named)})
    os.replace(temporary, file)


def load_checkpoint(file: Path) -> AdapterCheckpoint:
    """Raises FileNotFoundError if a planned checkpoint is missing."""
    if not file.exists():
        raise FileNotFoundError(f"{file} is missing; delete its folder so that the warm-up runs again")
    with safe_open(file, framework="pt") as data:
        facts = data.metadata()
        names = facts["names"].split("\n")
        parts = [{name: data.get_tensor(f"{kind}/{name}") for name in names} for kind in ("weight", "m", "v")]
    return AdapterCheckpoint(*parts, step=int(facts["step"]), rate=float(facts["rate"]))
