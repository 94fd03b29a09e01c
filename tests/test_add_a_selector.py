"""docs/add-a-selector.md, followed to the letter: its two files are taken from the page, composed, and run on real features."""

from __future__ import annotations

import importlib
import re
import sys
from pathlib import Path

import numpy as np
import pytest
from hydra.utils import instantiate
from omegaconf import OmegaConf
from selector_cases import permuted
from tiny_feature_context import tiny_context

from clusterft.features import FeatureStore, compute
from clusterft.interfaces import Selector
from clusterft.seeding import generator

PAGE = Path(__file__).parents[1] / "docs" / "add-a-selector.md"


@pytest.fixture
def selector(tmp_path, monkeypatch):
    """The page's selector, its module standing where the page says, made as a run makes it."""
    text = PAGE.read_text(encoding="utf-8")
    (python,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    (yaml,) = re.findall(r"```yaml\n(.*?)```", text, re.DOTALL)
    (name,) = re.findall(r"^`baselines/(\w+)\.py`:$", text, re.MULTILINE)
    assert f"`conf/selector/{name}.yaml`:" in text
    package = importlib.import_module("baselines")
    (tmp_path / f"{name}.py").write_text(python, encoding="utf-8")
    monkeypatch.setattr(package, "__path__", [*package.__path__, str(tmp_path)])
    monkeypatch.delitem(sys.modules, f"baselines.{name}", raising=False)
    root = OmegaConf.create({"selector": OmegaConf.create(yaml), "trainer": {"precision": "float32"}})
    yield instantiate(OmegaConf.to_container(root, resolve=True)["selector"], _convert_="all")
    sys.modules.pop(f"baselines.{name}", None)


def test_the_page_s_selector_works_on_real_features(selector, tmp_path):
    context = tiny_context(14)
    features = compute(selector.feature_specs(), context, FeatureStore(tmp_path))
    assert isinstance(selector, Selector)
    chosen = selector.choose(context.pool, features, 5, generator(0, "choose"))
    chosen.check_against(context.pool)
    rows = features["response_losses"].rows.astype(float)
    scores = rows[:, 0] * np.log1p(rows[:, 1])
    assert set(chosen.ids) == {context.pool.ids[i] for i in np.argsort(-scores)[:5]}
    assert set(chosen.ids) < set(selector.choose(context.pool, features, 9, generator(0, "choose")).ids)
    for budget in (0, 15):
        with pytest.raises(ValueError, match=rf"{budget}.*14"):
            selector.choose(context.pool, features, budget, generator(0, "choose"))


def test_a_permuted_pool_gives_the_same_choice(selector, tmp_path):
    context = tiny_context(14)
    store = FeatureStore(tmp_path)
    pick = lambda c: selector.choose(c.pool, compute(selector.feature_specs(), c, store), 5, generator(0, "choose")).ids  # noqa: E731
    order = [context.pool.ids.index(i) for i in permuted(context.pool).ids]
    assert pick(context) == pick(tiny_context(14, order=order))
    assert len(list(tmp_path.glob("response_losses-*"))) == 1


def test_a_row_without_an_answer_has_a_reason(selector):
    from clusterft.interfaces import Feature

    pool = tiny_context(3).pool
    rows = np.array([[1.0, 4.0], [0.0, 0.0], [2.0, 4.0]], np.float32)
    chosen = selector.choose(pool, {"response_losses": Feature(rows)}, 2, generator(0, "choose"))
    assert chosen.rejected == {pool.ids[1]: "no_target_tokens"}
