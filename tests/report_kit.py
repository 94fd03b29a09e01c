"""A made-up pool for the report tests: three topics with their own words, hostile rows among them, proxies around three directions."""

from __future__ import annotations

import dataclasses
import functools

import numpy as np

from clusterft.cluster import ClusterSelector, usable_rows
from clusterft.interfaces import Feature
from clusterft.records import IGNORE_INDEX, Cost, Encoded, Example, Pool, Rejection, content_id
from clusterft.report import gather
from clusterft.report.samples import Sampler
from clusterft.seeding import generator

COMMAND = 'clusterft select "data/<my file>.jsonl" --model m --keep 0.5'
COST = Cost(12.5, peak_memory_gib=1.25)
HOSTILE = (
    "<script>window.hacked = 1; document.title = 'taken'</script>",
    "</template></style></pre></article><img src=x onerror='window.hacked=1'>",
    "--> ]]> </title></svg></textarea> {{ 7*7 }} {% raw %} ${1+1}",
    "```\n# not a heading\n[click](javascript:window.hacked=1) https://evil.example/x.png ![i](https://evil.example/y.png)",
    "nul \x00 bell \x07 escape \x1b[31m override \u202ereversed\u202c isolate \u2066x\u2069 lone \ud800 end",
    '" onmouseover="window.hacked=1" x=\'y\' & &amp; &lt;b&gt;',
    "مرحبا بالعالم وهذا نص عربي טקסט בעברית",
    "\n\nstarts with empty lines and has\ttabs and " + "averylongwordwithoutanyspace" * 20,
)
TOPICS = (
    "Write a {} function that sorts an array and returns the sorted list in python code",
    "What is the usual dose of {} for a patient with fever and which side effects does the medicine have",
    "Translate the {} sentence into French and explain the grammar of the verb",
)
WORDS = ("short", "simple", "quick", "plain", "common", "careful", "long", "strange", "second", "usual")


def example(topic: int, i: int, rng: np.random.Generator) -> Example:
    prompt = TOPICS[topic].format(" ".join(rng.choice(WORDS, 3))) + f" ({i})"
    response = " ".join(rng.choice(WORDS, int(rng.integers(1, 30)))) + f" answer {i}."
    if i < len(HOSTILE):
        response = HOSTILE[i] + " " + response
    source = "data/<b>odd`|name</b>.jsonl" if i == 0 else "data/train.jsonl"
    return Example(content_id(prompt, response), prompt, response, source=source, line=i + 1)


def make_pool(n: int = 240, h: int = 12, seed: int = 0):
    """(pool, encoded, proxies (n, h) float32, losses (n,)). Topic 0 has half of the rows; one proxy is zero; two rows are near-duplicates."""
    rng = np.random.default_rng(seed)
    topics = np.repeat([0, 1, 2], [n // 2, n // 3, n - n // 2 - n // 3])
    examples = tuple(example(int(t), i, rng) for i, t in enumerate(topics))
    rejected = (
        Rejection("data/train.jsonl", 990, "empty_response", "<script>alert(1)</script> the answer is empty"),
        Rejection("data/train.jsonl", 991, "empty_response", "the answer is empty"),
        Rejection("data/train.jsonl", 1000, "not_json", "Expecting ',' delimiter"),
    )
    encoded = []
    for i, one in enumerate(examples):
        prompt, answer = len(one.prompt.split()) * 2, len(one.response.split()) * 2
        labels = np.array([IGNORE_INDEX] * prompt + [5] * answer, dtype=np.int32)
        encoded.append(Encoded(one.id, np.full(prompt + answer, 5, np.int32), labels, truncated=i % 40 == 0))
    proxies = rng.normal(size=(3, h))[topics] * 1.5 + rng.normal(size=(n, h)) * 0.8
    proxies[n - 1] = 0.0
    losses = rng.gamma(4.0, 0.4, n)
    losses[3] = np.nan
    return Pool("odd <i>pool</i>", examples, rejected), tuple(encoded), proxies.astype(np.float32), losses


def select(pool: Pool, proxies: np.ndarray, ratio: str = "0.5", k: int = 3, seed: int = 0):
    """(selection by the real selector, labels of every usable row)."""
    selector = ClusterSelector(
        n_clusters=k,
        capacity_factor=2.0,
        solver="exact",
        n_init=2,
        within="peripheral",
        allocation="equal",
        weights="balanced",
        proxy={},
    )
    have = {"gradient_proxy": Feature(proxies)}
    ids, usable, _ = usable_rows(pool, proxies)
    labels = selector.cluster(usable, generator(seed, "choose")).labels
    budget = selector.budget(pool, have, ratio, generator(seed, "choose"))
    return selector.choose(pool, have, budget, generator(seed, "choose")), dict(zip(ids.tolist(), labels.tolist(), strict=True))


@functools.cache
def made():
    """(pool, encoded, proxies, losses, selection, labels)."""
    pool, encoded, proxies, losses = make_pool()
    return pool, encoded, proxies, losses, *select(pool, proxies)


def facts_of(parts, **more):
    pool, encoded, proxies, losses, selection, labels = parts
    usual = {"labels": labels, "command": COMMAND, "cost": COST, "losses": losses, "near_threshold": 0.97}
    return gather(pool, encoded, selection, proxies, **usual | more)


@functools.cache
def facts():
    return facts_of(made(), others={"seed <b>1</b>": dataclasses.replace(made()[4], seed=1)})


@functools.cache
def everything():
    """Facts in which every hostile row is an example, whatever the selection took; five clusters, so that one is folded."""
    pool, encoded, _, _, selection, _ = made()
    sampler = Sampler(pool, encoded, selection, None)
    shown = tuple(sampler.one(i) for i in range(len(HOSTILE)))
    clusters = facts().clusters
    first = dataclasses.replace(clusters[0], kept_samples=shown, terms=("<u>term</u>", "x\u202ey"))
    more = tuple(dataclasses.replace(clusters[1], number=n) for n in (3, 4))
    return dataclasses.replace(facts(), clusters=(first, *clusters[1:], *more), clusters_with_samples=5)
