"""Validation rows are never rows that are scored, and are only fetched for a selector that uses them."""

import pytest
from composed import composed, smoke

from clusterft import stages
from clusterft.distributed import single_process


def test_the_matched_rows_are_cut_off_the_scored_ones(tmp_path):
    ready = stages.prepare(smoke(tmp_path, "selector=less"))
    matched, scored = {r.id for r in ready.validation["heldout"]}, {r.id for r in ready.heldout}
    assert len(matched) == 3 and scored
    assert not matched & scored
    assert not (matched | scored) & set(ready.pool.ids)
    assert [r.id for r in ready.heldout] == list(ready.heldout_pool.ids)
    assert len(ready.heldout_groups) == len(ready.heldout)


def test_only_a_selector_that_matches_gradients_is_given_rows(tmp_path):
    for selector, expected in (("less", 1), ("ifd", 0), ("cluster", 0)):
        cfg = smoke(tmp_path, f"selector={selector}")
        assert len(stages.feature_context(cfg, stages.prepare(cfg), single_process("cpu")).validation) == expected


def test_too_few_held_out_rows_refuse_only_the_selector_that_needs_them(tmp_path):
    few = ["data.holdout_rows=2", "data.validation.rows=2"]
    cfg = smoke(tmp_path, "selector=less", *few)
    ready = stages.prepare(cfg)
    with pytest.raises(ValueError, match=r"holdout_rows=2 must be above data\.validation\.rows, now 2"):
        stages.feature_context(cfg, ready, single_process("cpu"))
    other = smoke(tmp_path, "selector=cluster", *few)
    assert stages.feature_context(other, stages.prepare(other), single_process("cpu")).validation == {}


def test_paper_scale_takes_benchmark_rows_that_no_test_contains():
    assert composed("+experiment=table2").data.validation.kind == "code_subtasks"
    medical = composed("+experiment=table3").data.validation
    assert (medical.kind, medical.is_tested) == ("medical_subtasks", "eval.pubmedqa.is_official")


def test_an_unknown_kind_lists_the_known_ones(tmp_path):
    with pytest.raises(ValueError, match="known are heldout"):
        stages.prepare(smoke(tmp_path, "data.validation.kind=nope"))
