"""How much memory a training process needs, worked out from the configuration before anything is loaded.

In come the nodes `model`, `trainer` and `runtime`; out comes a `MemoryPlan` in bytes per process (one GPU each, or one CPU process). Plain
arithmetic on `model.shape`, no torch; `tests/test_memory_plan.py` compares it with measured training. The largest micro-batch is assumed:
per_device_batch rows of max_length tokens, every token a target.

    peak = libraries + max(weights + gradients + optimiser + max(activations + logits + work of the backward pass, work of the optimiser),
                           loading whole weights)

Letters: h hidden, f intermediate, v vocabulary, l blocks, a = attention heads x head width, k = key-value heads x head width, n tokens of the
micro-batch, p parameters, w ranks.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from clusterft.engine_names import is_deepspeed

GIB = 2**30
GPU_GIB = 79.6
"""What an 80 GB H100 has, in GiB (81,559 MiB)."""

LIBRARIES = {"cuda": 1.5 * GIB, "cpu": 0.45 * GIB}
"""cuda: context, cuBLAS workspaces and NCCL buffers (assumed); cpu: Python, torch and transformers, resident (measured)."""

MESSAGE_BYTES = 128 * 2**20
"""Send and receive buffer of `carriers.MessageExchange`, each."""

ZERO3_LIVE = 1_000_000_000
"""stage3_max_live_parameters in deepspeed_config: so many gathered parameters may lie around."""

ZERO3_GROUP = 1_000_000_000
"""sub_group_size in deepspeed_config: so many elements are stepped at once."""

BUCKET = 50_000_000
"""Elements of a DeepSpeed reduction bucket (deepspeed_config)."""


@dataclass(frozen=True)
class Sizes:
    """Counts of parameters: of one block, of the input embedding, of the head (0 where tied), of the rest."""

    block: int
    blocks: int
    embedding: int
    head: int
    rest: int
    matrix_sums: int
    largest: int

    @property
    def total(self) -> int:
        return self.block * self.blocks + self.embedding + self.head + self.rest

    @property
    def root(self) -> int:
        """What lies outside of the blocks."""
        return self.embedding + self.head + self.rest


@dataclass(frozen=True)
class MemoryPlan:
    """Bytes per process at the peak."""

    weights: float
    gradients: float
    optimizer: float
    activations: float
    logits: float
    backward_work: float
    optimizer_work: float
    loading: float
    libraries: float

    @property
    def work(self) -> float:
        """What the pass needs beside activations and logits, or the optimiser beyond them, whichever is more."""
        return max(self.backward_work, self.optimizer_work - self.activations - self.logits)

    @property
    def model(self) -> float:
        """The peak without the libraries: what training itself allocates."""
        return max(self.loading, self.weights + self.gradients + self.optimizer + self.activations + self.logits + self.work)

    @property
    def total(self) -> float:
        return self.model + self.libraries

    @property
    def gib(self) -> float:
        return self.total / GIB

    def line(self) -> str:
        """Its parts in GiB."""
        parts = {
            "weights": self.weights,
            "gradients": self.gradients,
            "optimiser": self.optimizer,
            "activations": self.activations,
            "logits": self.logits,
            "work": self.work,
            "libraries": self.libraries,
        }
        text = " + ".join(f"{name} {value / GIB:.2f}" for name, value in parts.items())
        if self.loading == self.model:
            return f"{text}; loading whole weights needs more: {self.gib:.1f} GiB"
        return f"{text} = {self.gib:.1f} GiB"


def sizes(architecture: str, shape: Mapping[str, Any]) -> Sizes:
    """Parameters of a model from its configured shape. Raises ValueError for a family whose blocks are not known here."""
    if architecture not in ("LlamaForCausalLM", "GPTNeoXForCausalLM") or "hidden_size" not in shape:
        raise ValueError(f"no memory plan for model.architecture={architecture} with a shape of {len(shape)} entries")
    h, f, v, blocks = (shape[key] for key in ("hidden_size", "intermediate_size", "vocab_size", "num_hidden_layers"))
    a, k = _heads(shape)
    if architecture == "LlamaForCausalLM":
        matrices, vectors, rest = [(a, h), (k, h), (k, h), (h, a), (f, h), (f, h), (h, f)], 2 * h, h
    else:
        matrices, vectors, rest = [(3 * h, h), (h, h), (f, h), (h, f)], 3 * h + h + f + h + 4 * h, 2 * h
    tied = bool(shape.get("tie_word_embeddings", False))
    heads = 1 if tied else 2
    return Sizes(
        block=sum(r * c for r, c in matrices) + vectors,
        blocks=blocks,
        embedding=v * h,
        head=0 if tied else v * h,
        rest=rest,
        matrix_sums=blocks * (sum(r + c for r, c in matrices) + vectors) + heads * (v + h) + rest,
        largest=max(v * h, *(r * c for r, c in matrices)),
    )


def _heads(shape: Mapping[str, Any]) -> tuple[int, int]:
    heads = shape["num_attention_heads"]
    width = shape.get("head_dim") or shape["hidden_size"] // heads
    return heads * width, shape.get("num_key_value_heads", heads) * width


def memory_plan(model: Any, trainer: Any, runtime: Any) -> MemoryPlan:
    """The plan of one training process, from configuration nodes or plain mappings.

    Raises ValueError for an architecture whose blocks are not known here.
    """
    model, trainer, runtime = _node(model), _node(trainer), _node(runtime)
    shape = dict(model.shape)
    s, ranks = sizes(model.architecture, shape), runtime.processes
    wide = 2 if trainer.precision == "bf16" else 4
    tokens = trainer.per_device_batch * trainer.max_length
    weights, gradients, work = _states(s, trainer, ranks, wide, runtime)
    casts = 2 * (s.total - s.embedding - s.rest) if trainer.precision == "bf16_autocast" else 0
    if trainer.precision == "bf16_autocast" and trainer.engine != "ddp":
        casts = 2 * (s.block + s.head)  # not kept
    return MemoryPlan(
        weights=weights + casts,
        gradients=gradients,
        optimizer=_optimizer(s, trainer, ranks, wide),
        activations=tokens * _activations(shape, s, trainer, model.attention),
        logits=tokens * shape["vocab_size"] * 12,  # log-probabilities, their gradient and that of the logits, all in float32
        backward_work=work,
        optimizer_work=_optimizer_work(s, trainer, ranks, wide),
        loading=s.total * wide * (2 if trainer.engine == "ddp" else 1 + 1 / ranks),  # whole, and the engine's own copy
        libraries=LIBRARIES["cpu" if runtime.device == "cpu" else "cuda"],
    )


def _states(s: Sizes, trainer: Any, ranks: int, wide: int, runtime: Any) -> tuple[float, float, float]:
    """(weights, gradients, work of the backward pass): bytes that the engine holds."""
    p, fresh = s.total, s.largest * wide  # a tensor's new gradient lies beside the sum that it is added to
    if trainer.engine == "ddp":
        carried = -(-trainer.workers // ranks)
        buffers = 1 if runtime.device != "cpu" else int(math.log2(carried)) + 1
        staging = 2 * min(MESSAGE_BYTES, p * wide) if ranks > 1 and runtime.device != "cpu" else 0
        return p * wide, p * wide * buffers, fresh + staging
    if trainer.engine == "fsdp":
        gathered = 2 * s.block + s.root
        # Unsharded gradients of a block, of the one before that is still being sent, and of the root, each with its float32 copy.
        flying = (2 * s.block + s.root) * (wide + 4)
        return p * wide / ranks + gathered * wide, p * wide / ranks, flying
    live = 0 if trainer.engine == "deepspeed_zero2" else min(p, ZERO3_LIVE) * wide
    whole = p * wide if trainer.engine == "deepspeed_zero2" else p * wide / ranks
    return whole + live, 4 * p / ranks, 2 * BUCKET * 4 + fresh


def _optimizer(s: Sizes, trainer: Any, ranks: int, wide: int) -> float:
    """State on this rank; every engine shares it among the ranks."""
    masters = 4 * s.total / ranks if is_deepspeed(trainer.engine) else 0.0
    moment = 4 if masters else wide
    state = {"adamw": 2 * moment * s.total, "sgd": 0.0, "adafactor": 4.0 * s.matrix_sums}[trainer.optimizer]
    return masters + state / ranks


def _optimizer_work(s: Sizes, trainer: Any, ranks: int, wide: int) -> float:
    """Temporaries of the optimiser on the largest tensor (or flat partition) that it steps at once."""
    stepped = s.total if is_deepspeed(trainer.engine) else s.largest
    stepped = stepped / ranks if trainer.engine != "ddp" else stepped
    if trainer.engine == "deepspeed_zero3":
        stepped = min(stepped, ZERO3_GROUP)
    copies = {"adamw": 2 * wide, "sgd": wide, "adafactor": 8 if wide == 4 else 16}[trainer.optimizer]
    return stepped * (copies if not is_deepspeed(trainer.engine) else 8)


def _activations(shape: Mapping[str, Any], s: Sizes, trainer: Any, attention: str) -> float:
    """Bytes a token that lie between forward and backward, and at the backward pass through one block."""
    h, f = shape["hidden_size"], shape["intermediate_size"]
    a, k = _heads(shape)
    stream = 2 if trainer.precision == "bf16" else 4  # the residual stream
    narrow = 4 if trainer.precision == "float32" else 2  # products
    # Two norms: input, normalised value, and result as the products take it; autocast casts it anew for each of q, k, v, gate and up.
    norms = {"float32": 24, "bf16_autocast": 26, "bf16": 16}[trainer.precision] * h
    block = norms + narrow * (2 * a + 2 * k) + 4 * narrow * f
    if (
        attention == "eager"
    ):  # probabilities, (heads, t) a token, in float32 and as the products take them; keys and values repeated
        block += shape["num_attention_heads"] * trainer.max_length * (4 if narrow == 4 else 6) + 2 * narrow * (a - k)
    backward = narrow * (3 * f + 2 * h)
    kept = s.blocks * stream * h + block if trainer.gradient_checkpointing else s.blocks * block
    return kept + backward + 3 * stream * h  # embedding, last norm


def _node(node: Any) -> Any:
    return SimpleNamespace(**node) if isinstance(node, Mapping) else node


def memory_text(model: Any, trainer: Any, runtime: Any) -> str:
    """One line: what is trained how, its memory in GiB a process, and on a GPU whether that fits. Also where nothing can be said."""
    model, trainer, runtime = _node(model), _node(trainer), _node(runtime)
    batch = f"{trainer.per_device_batch} x {trainer.max_length} tokens, {trainer.optimizer}, {trainer.precision}"
    what = f"{model.name}, {trainer.engine}, {runtime.processes} processes, {batch}"
    try:
        plan = memory_plan(model, trainer, runtime)
    except ValueError as problem:
        return f"{what}: {problem}"
    if runtime.device == "cpu":
        return f"{what}: {plan.line()}"
    fits = "fits" if plan.gib <= GPU_GIB else "does NOT fit"
    return f"{what}: {plan.line()}, {fits} a GPU of 80 GB ({GPU_GIB} GiB)"


def memory_lines(configs: Iterable[Mapping[str, Any]]) -> list[str]:
    """`memory_text` of every configuration, equal ones once, in order."""
    return list(dict.fromkeys(memory_text(c["model"], c["trainer"], c["runtime"]) for c in configs))
