"""A feature context with a real (tiny, random) model, a real tokenizer and a real prompt format."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from clusterft.feature_context import FeatureContext, SingleProcess
from clusterft.models import load_model, load_tokenizer
from clusterft.prompting import encode_pool
from clusterft.records import Example, Pool, content_id
from clusterft.seeding import generator

TINY = OmegaConf.load(Path(__file__).parents[1] / "conf" / "model" / "tiny.yaml")
WORDS = (
    "add",
    "two",
    "numbers",
    "return",
    "their",
    "sum",
    "list",
    "of",
    "even",
    "squares",
    "in",
    "order",
    "or",
    "say",
    "why",
    "not",
)


def example(number: int) -> Example:
    rng = generator(0, "tiny-example", number)
    words = rng.choice(WORDS, size=int(rng.integers(3, 12))).tolist()
    prompt, response = f"Task {number}: {' '.join(words[:3])}?", " ".join(words)
    return Example(content_id(prompt, response), prompt, response, source="made up", line=number + 1)


def tiny_context(n: int = 16, *, order: list[int] | None = None, max_length: int = 512, **changes: Any) -> FeatureContext:
    """n made-up rows, alpaca format, one process. `changes` replace fields of the context."""
    tokenizer = load_tokenizer(TINY)
    pool = Pool("tiny", tuple(example(i) for i in (order if order is not None else range(n))))
    pool, encoded = encode_pool(pool, tokenizer, "alpaca", max_length)
    settings = {
        "pool": pool,
        "encoded": encoded,
        "model_cfg": TINY,
        "tokenizer": tokenizer,
        "template": "alpaca",
        "max_length": max_length,
        "token_budget": 1024,
        "dist": SingleProcess(),
        "seed": 0,
        "load_model": lambda: load_model(TINY),
    }
    return FeatureContext(**{**settings, **changes})
