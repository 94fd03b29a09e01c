"""The feature store: what the key depends on, what survives a kill, what is noticed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import numpy as np
import pytest

from clusterft.config import ModelConfig
from clusterft.features import FeatureContext, FeatureDamaged, FeatureMissing, FeatureStore, RowWriter, SingleProcess, compute
from clusterft.interfaces import FeatureSpec
from clusterft.records import Encoded, Example, Pool, content_id

SPEC = FeatureSpec("squares", "test_features:extract_squares", {"power": 2})
CALLS: list[list[int]] = []


def make_context(n: int = 7, order: list[int] | None = None, **changes) -> FeatureContext:
    rows = [(f"prompt {i}", f"response {i}", i) for i in (order if order is not None else range(n))]
    examples = tuple(Example(content_id(p, r), p, r) for p, r, _ in rows)
    encoded = [
        Encoded(e.id, np.array([i, i + 1, i + 2], np.int32), np.array([-100, i + 1, i + 2], np.int32))
        for e, (_, _, i) in zip(examples, rows, strict=True)
    ]
    model = ModelConfig(
        name="m", source="hub", path="org/m", revision="r1", architecture="LlamaForCausalLM", weights_dtype="float32"
    )
    settings = {
        "pool": Pool("p", examples),
        "encoded": encoded,
        "model_cfg": model,
        "tokenizer": None,
        "template": "alpaca",
        "max_length": 16,
        "token_budget": 8,
        "dist": SingleProcess(),
        "seed": 0,
        "load_model": lambda: None,
    }
    return FeatureContext(**{**settings, **changes})


def number_of(encoded: Encoded) -> int:
    return int(encoded.input_ids[0])


def extract_squares(context, spec, writer) -> None:
    """Rows (i, i**power), two rows a block; dies at row `die_at` if the environment says so."""
    pending = writer.pending
    CALLS.append([number_of(context.encoded[i]) for i in pending])
    for block in np.array_split(pending, max(1, (len(pending) + 1) // 2)):
        if len(block) == 0:
            continue
        numbers = [number_of(context.encoded[i]) for i in block]
        if "DIE_AT" in os.environ and int(os.environ["DIE_AT"]) in numbers:
            os.kill(os.getpid(), signal.SIGKILL)
        writer.put(block, np.array([[k, k ** spec.params["power"]] for k in numbers], np.float32))
        writer.add_cost(flops=10.0 * len(block), forward_passes=len(block))
    writer.put_extra(answer=np.array([42]))


@pytest.fixture(autouse=True)
def forget_calls():
    CALLS.clear()


def test_rows_come_back_in_pool_order_with_extra_and_cost(tmp_path: Path):
    feature = compute([SPEC], make_context(), FeatureStore(tmp_path))["squares"]
    np.testing.assert_array_equal(feature.rows, [[i, i * i] for i in range(7)])
    assert feature.rows.dtype == np.float32
    assert feature.extra["answer"].tolist() == [42]
    assert feature.cost.forward_passes == 7 and feature.cost.flops == 70.0
    assert feature.cost.bytes_stored > 7 * 2 * 4


def test_a_finished_feature_is_not_computed_again_and_a_permuted_pool_reuses_it(tmp_path: Path):
    store = FeatureStore(tmp_path)
    compute([SPEC], make_context(), store)
    order = [3, 1, 6, 0, 5, 2, 4]
    feature = compute([SPEC], make_context(order=order), store)["squares"]
    np.testing.assert_array_equal(feature.rows[:, 0], order)
    assert len(CALLS) == 1


def test_a_pool_in_stored_order_is_a_memory_map(tmp_path: Path):
    store, natural = FeatureStore(tmp_path), make_context()
    order = sorted(range(7), key=lambda i: natural.pool.ids[i])
    feature = compute([SPEC], make_context(order=order), store)["squares"]
    assert isinstance(feature.rows, np.memmap) and not feature.rows.flags.writeable


def test_large_rows_in_another_order_do_not_go_through_memory(tmp_path: Path, monkeypatch):
    monkeypatch.setattr("clusterft.feature_store.COPY_BYTES", 8)
    feature = compute([SPEC], make_context(), FeatureStore(tmp_path))["squares"]
    assert isinstance(feature.rows, np.memmap)
    np.testing.assert_array_equal(feature.rows[:, 1], np.arange(7.0) ** 2)


@pytest.mark.parametrize(
    "change",
    [
        {"template": "chat"},
        {"max_length": 17},
        {"model_cfg": ModelConfig("m", "hub", "org/m", "r2", architecture="LlamaForCausalLM", weights_dtype="float32")},
        {"model_cfg": ModelConfig("m", "hub", "org/m", "r1", architecture="LlamaForCausalLM", weights_dtype="bfloat16")},
    ],
)
def test_the_key_depends_on_what_changes_values(tmp_path: Path, change):
    store = FeatureStore(tmp_path)
    assert store.key(SPEC, make_context()) != store.key(SPEC, make_context(**change))


def test_the_key_depends_on_parameters_version_tokens_and_on_the_seed_only_when_asked(tmp_path: Path):
    store, context = FeatureStore(tmp_path), make_context()
    key = store.key(SPEC, context)
    assert key != store.key(FeatureSpec("squares", SPEC.extractor, {"power": 3}), context)
    assert key != store.key(FeatureSpec("squares", SPEC.extractor, {"power": 2}, version=2), context)
    changed = make_context()
    changed.encoded[0] = Encoded(changed.encoded[0].id, np.array([0, 1, 9], np.int32), changed.encoded[0].labels)
    assert key != store.key(SPEC, changed)
    assert key == store.key(SPEC, make_context(seed=1, token_budget=1))
    seeded = FeatureSpec("squares", SPEC.extractor, {"power": 2, "uses_seed": True})
    assert store.key(seeded, context) != store.key(seeded, make_context(seed=1))
    assert store.key(seeded, context) == store.key(seeded, make_context(seed=0))


def test_a_moved_model_folder_keeps_its_features_and_changed_weights_do_not(tmp_path: Path):
    def context_of(folder: Path) -> FeatureContext:
        model = ModelConfig("m", "local", str(folder), architecture="LlamaForCausalLM", weights_dtype="float32")
        return make_context(model_cfg=model)

    keys = []
    for name, weights in (("a", b"one"), ("b", b"one"), ("c", b"two")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "model.safetensors").write_bytes(weights)
        keys.append(FeatureStore(tmp_path).key(SPEC, context_of(tmp_path / name)))
    assert keys[0] == keys[1] != keys[2]


CHILD = """
    import sys
    from pathlib import Path
    sys.path.insert(0, sys.argv[2])
    from test_features import SPEC, make_context
    from clusterft.features import FeatureStore, compute
    compute([SPEC], make_context(), FeatureStore(Path(sys.argv[1])))
"""


def run_child(root: Path, **environment: str) -> subprocess.CompletedProcess:
    command = [sys.executable, "-c", textwrap.dedent(CHILD), str(root), str(Path(__file__).parent)]
    return subprocess.run(command, env={**os.environ, **environment}, capture_output=True, text=True)


def test_after_sigkill_no_row_is_lost_and_none_computed_twice(tmp_path: Path):
    killed = run_child(tmp_path, DIE_AT="4")
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    store, context = FeatureStore(tmp_path), make_context()
    with pytest.raises(FeatureMissing, match="not complete"):
        store.load(SPEC, context)
    feature = compute([SPEC], context, store)["squares"]
    assert CALLS == [[4, 5, 6]]  # blocks were 0 1 | 2 3 | 4 5 | 6
    np.testing.assert_array_equal(feature.rows, [[i, i * i] for i in range(7)])
    assert not list(store.path(SPEC, context).glob("shard-*"))


def test_a_row_whose_bytes_were_lost_after_its_bit_was_set_is_computed_again(tmp_path: Path):
    run_child(tmp_path, DIE_AT="4")
    store, context = FeatureStore(tmp_path), make_context()
    (shard,) = store.path(SPEC, context).glob("shard-0.npy")
    place = sorted(context.pool.ids).index(context.pool.ids[2])
    with shard.open("r+b") as file:
        file.seek(shard.stat().st_size - (7 - place) * 8)
        file.write(bytes(8))
    feature = compute([SPEC], context, store)["squares"]
    assert CALLS == [[2, 4, 5, 6]]
    np.testing.assert_array_equal(feature.rows[:, 1], np.arange(7.0) ** 2)


def test_truncated_and_changed_files_are_noticed(tmp_path: Path):
    store, context = FeatureStore(tmp_path), make_context()
    compute([SPEC], context, store)
    path = store.path(SPEC, context) / "rows.npy"
    whole = path.read_bytes()
    path.write_bytes(whole[:-1])
    with pytest.raises(FeatureDamaged, match=rf"has {len(whole) - 1} bytes, its manifest says {len(whole)}; delete"):
        store.load(SPEC, context)
    path.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    with pytest.raises(FeatureDamaged, match="checksum"):
        store.load(SPEC, context)
    path.unlink()
    with pytest.raises(FeatureDamaged, match="is gone"):
        store.load(SPEC, context)


def test_merging_does_not_hold_all_rows_in_memory(tmp_path: Path, monkeypatch):
    import tracemalloc

    monkeypatch.setattr("clusterft.feature_shards.MERGE_BYTES", 1 << 19)
    rows = np.random.default_rng(0).normal(size=(20_000, 256)).astype(np.float32)  # 20 MB
    writer = RowWriter(tmp_path, np.arange(20_000), 0)
    for start in range(0, 20_000, 500):
        writer.put(np.arange(start, start + 500), rows[start : start + 500])
    writer.close()
    tracemalloc.start()
    writer.merge()
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 4 << 20
    np.testing.assert_array_equal(np.load(tmp_path / "rows.npy"), rows)


def extract_half(context, spec, writer) -> None:
    writer.put([0], np.zeros((1, 2), np.float32))


def extract_nan(context, spec, writer) -> None:
    writer.put([0, 1], np.array([[0, 1], [np.nan, 1]], np.float32))


def test_missing_rows_and_values_that_are_not_finite_are_errors(tmp_path: Path):
    with pytest.raises(ValueError, match=r"'half'.*6 rows.*missing"):
        compute([FeatureSpec("half", "test_features:extract_half")], make_context(), FeatureStore(tmp_path))
    with pytest.raises(ValueError, match="not finite, the first at pool position 1"):
        compute([FeatureSpec("nan", "test_features:extract_nan")], make_context(), FeatureStore(tmp_path))


def test_bad_specs_and_contexts_are_refused(tmp_path: Path):
    store = FeatureStore(tmp_path)
    with pytest.raises(ValueError, match="must differ"):
        compute([SPEC, SPEC], make_context(), store)
    with pytest.raises(ValueError, match=r"package\.module:function"):
        compute([FeatureSpec("x", "nonsense")], make_context(), store)
    with pytest.raises(ValueError, match="names a folder"):
        store.path(FeatureSpec("../x", SPEC.extractor), make_context())
    context = make_context()
    with pytest.raises(ValueError, match="position 0"):
        make_context(encoded=context.encoded[::-1])
    with pytest.raises(ValueError, match="3 encoded rows for the 7"):
        make_context(encoded=context.encoded[:3])


def test_the_model_is_loaded_once_also_through_copies_of_the_context(tmp_path: Path):
    from dataclasses import replace

    loads = []
    context = make_context(load_model=lambda: loads.append(1) or "model")
    assert replace(context, seed=3).load_model() == context.load_model() == "model"
    assert loads == [1]


def extract_slowly(context, spec, writer) -> None:
    CALLS.append([0])
    time.sleep(0.5)
    writer.put(writer.pending, np.ones((len(writer.pending), 1), np.float32))


def test_two_runs_that_want_one_feature_compute_it_once(tmp_path: Path, monkeypatch):
    from concurrent.futures import ThreadPoolExecutor

    monkeypatch.setattr("clusterft.features.POLL_SECONDS", 0.05)
    spec = FeatureSpec("slow", "test_features:extract_slowly")
    with ThreadPoolExecutor(2) as threads:
        jobs = [threads.submit(compute, [spec], make_context(), FeatureStore(tmp_path)) for _ in range(2)]
        for job in jobs:
            assert job.result()["slow"].rows.sum() == 7
    assert len(CALLS) == 1
