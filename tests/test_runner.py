"""One cell from configuration to record, at smoke scale with every real part; and what `table2` makes of the records."""

import json

import pytest
from composed import composed, smoke

from clusterft import stages
from clusterft.preflight import PreflightError, preflight
from clusterft.runner import run_one
from clusterft.selection_io import read_selection
from clusterft.store import RunStore, StoreError, run_id
from experiments.recordstore import load_records


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("smoke")


def results(record):
    """What must be equal when a run is made twice: everything but times."""
    train = {
        k: v for k, v in record.train.items() if k in ("steps", "tokens", "target_tokens", "first_loss", "last_loss", "mean_loss")
    }
    return record.run_id, record.selection, train, record.metrics


def test_the_plain_configuration_is_the_papers():
    cfg = composed()
    assert (cfg.model.name, cfg.data.name, cfg.selector.ratio) == ("codellama_python_7b", "magicoder_oss_instruct_75k", "1.00")
    trainer = cfg.trainer
    assert (trainer.workers, trainer.global_batch, trainer.per_device_batch, trainer.epochs) == (4, 512, 1, 2)
    assert (trainer.optimizer, trainer.learning_rate, trainer.schedule, trainer.warmup_steps) == ("adafactor", 5e-5, "linear", 15)
    assert (trainer.max_length, trainer.max_grad_norm, trainer.precision, trainer.tf32) == (1216, None, "bf16", True)
    assert (cfg.clustering.n_clusters, cfg.clustering.capacity_factor, cfg.clustering.n_init) == (4, 1.5, 10)
    assert (cfg.selector.within, cfg.selector.allocation, cfg.selector.weights) == ("peripheral", "equal", "balanced")
    assert list(composed("+experiment=table2").experiment.seeds) == [0, 1, 2]


@pytest.mark.slow
@pytest.mark.parametrize("selector", ["full", "random", "cluster"])
def test_a_cell_runs_from_nothing_to_a_complete_record(folder, selector):
    cfg = smoke(folder, f"selector={selector}")
    preflight(cfg)
    record = run_one(cfg)
    assert record.status == "complete"
    assert RunStore(folder / "runs").read(record.run_id) == record
    names = {f"{m.task}/{m.name}" for m in record.metrics}
    assert {"humaneval/pass@1", "heldout/nll_micro", "heldout/nll_macro"} <= names
    if selector == "full":
        assert record.selection["data_usage"] == 1.0
    run_dir = folder / "runs" / record.run_id
    lines = [json.loads(line) for line in (run_dir / "train/metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == list(range(1, record.train["steps"] + 1))
    assert not (run_dir / "train/model").exists()


@pytest.mark.slow
def test_random_keeps_as_many_rows_as_cluster_and_weights_average_one(folder):
    kept = {}
    for selector in ("random", "cluster"):
        cfg = smoke(folder, f"selector={selector}")
        kept[selector] = read_selection(folder / "runs" / run_one(cfg).run_id / "selection")
    assert kept["random"].budget == kept["cluster"].budget
    sizes, rows = kept["cluster"].info["cluster_sizes"], kept["cluster"].info["cluster_kept"]
    assert len(set(rows)) == 1 and rows[0] == min(sizes)
    assert kept["cluster"].weights.mean() == pytest.approx(1, abs=1e-12)
    assert kept["random"].weights is None


@pytest.mark.slow
def test_a_complete_run_is_not_made_again_and_a_deleted_record_gives_the_same_run(folder):
    cfg = smoke(folder, "selector=cluster")
    first = run_one(cfg)
    record_file = folder / "runs" / first.run_id / "record.json"
    before = record_file.stat().st_mtime_ns
    assert run_one(cfg) == first
    assert record_file.stat().st_mtime_ns == before
    record_file.unlink()  # the weights are gone as well: a complete run gives them up
    assert results(run_one(cfg)) == results(first)


@pytest.mark.slow
def test_a_finished_run_does_not_stand_for_files_or_settings_that_have_changed(tmp_path):
    """Fault: the same command after an edit of the data gave the old numbers without a word."""
    data = tmp_path / "d.jsonl"
    lines = [json.dumps({"instruction": f"Say {i}.", "output": f"Answer {i} it is."}) for i in range(30)]
    data.write_text("\n".join(lines))
    cfg = smoke(tmp_path, "selector=full", "data=jsonl", "data.holdout_rows=6", f"data.path={data}")
    first = run_one(cfg)
    assert list(first.inputs) == [str(data)]
    data.write_text(data.read_text().replace("Answer", "Reply "))
    with pytest.raises(StoreError, match=rf"run {first.run_id}: {data} has changed since this run was made from it; give"):
        run_one(cfg)
    assert load_records([tmp_path / "runs"], check_inputs=True).run(first.run_id).state == "conflict"
    data.write_text("\n".join(lines))
    assert run_one(cfg) == first
    frozen = tmp_path / "runs" / first.run_id / "config.yaml"
    frozen.write_text(frozen.read_text().replace("global_batch: 8", "global_batch: 4"))
    with pytest.raises(StoreError, match=r"differs in trainer\.global_batch"):
        run_one(cfg)
    assert RunStore(tmp_path / "runs").read(first.run_id) == first


@pytest.mark.slow
def test_four_processes_and_one_that_carries_four_workers_give_the_same_run(folder, tmp_path):
    one = run_one(smoke(folder, "selector=cluster"))
    layout = ["runtime.processes=4", "runtime.threads_per_process=1", "runtime.evaluation_processes=2"]
    four = run_one(smoke(tmp_path, "selector=cluster", *layout))
    assert results(four)[0] == results(one)[0]
    assert four.train["last_loss"] == pytest.approx(one.train["last_loss"], abs=1e-6)
    assert {m.name: m.value for m in four.metrics} == pytest.approx({m.name: m.value for m in one.metrics}, abs=1e-5)
    generated = tmp_path / "runs" / four.run_id / "eval" / "humaneval"
    assert len(list(generated.glob("generated-*.jsonl"))) == 2, "both ranks wrote a share of the answers"
    whole = folder / "runs" / one.run_id / "eval" / "humaneval" / "samples.jsonl"
    assert (generated / "samples.jsonl").read_bytes() == whole.read_bytes()


@pytest.mark.slow
@pytest.mark.parametrize("change", ["selector.proxy.proxy=output_gradient", "selector.solver=released"])
def test_another_signal_or_solver_chooses_as_many_rows_as_the_paper_s(folder, change):
    """`clustering` sets the number of rows, also for a selector that clusters by itself in another way; its own work alone is counted."""
    paper = run_one(smoke(folder, "selector=cluster"))
    cfg = smoke(folder, "selector=cluster", change)
    other = run_one(cfg)
    assert other.run_id != paper.run_id
    assert other.selection["budget"] == paper.selection["budget"]
    assert other.cost["forward_passes"] == paper.cost["forward_passes"] == paper.selection["pool_rows"]
    kept = [set(read_selection(folder / "runs" / r.run_id / "selection").ids) for r in (paper, other)]
    assert kept[0] != kept[1] and len(kept[0]) == len(kept[1])
    whole = {spec.name for spec in stages.needed_features(cfg)}
    assert whole == {"gradient_proxy"} and len(stages.needed_features(cfg)) == (1 if "solver" in change else 2)


def test_a_failed_stage_leaves_a_failed_record_with_the_reason(tmp_path):
    cfg = smoke(tmp_path, "clustering.n_clusters=500")
    with pytest.raises(ValueError, match="500"):
        run_one(cfg)
    record = RunStore(tmp_path / "runs").read(run_id(cfg))
    assert record.status == "failed" and "500" in record.error
    assert not (tmp_path / "runs" / record.run_id / "selection").exists()


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["selector.ratio='2'"], "outside"),
        (["selector.ratio='0'"], "outside"),
        (["selector.budget=everything"], "known are match_cluster"),
        (["selector.budget=rows"], "give an integer from 1 to"),
        (["selector.within=middle"], "known are peripheral"),
    ],
)
def test_bad_numbers_and_names_are_refused_with_the_alternatives(tmp_path, overrides, words):
    cfg = smoke(tmp_path, *overrides)
    with pytest.raises(ValueError, match=words):
        ready = stages.prepare(cfg)
        stages.make_selector(cfg)
        run_id(cfg)
        stages.budget_rows(cfg, ready, {})


def test_preflight_names_what_is_missing(tmp_path):
    with pytest.raises(PreflightError, match=r"wants 4 CUDA devices.*scale=laptop"):
        preflight(composed("+experiment=table2"))
    with pytest.raises(PreflightError, match=r"1 \.\.\. trainer\.workers"):
        preflight(smoke(tmp_path, "runtime.processes=9"))
    with pytest.raises(PreflightError, match="each needs a row"):
        preflight(smoke(tmp_path, "trainer.global_batch=2"))


def test_a_directory_of_another_configuration_is_left_alone(tmp_path):
    cfg = smoke(tmp_path)
    store = RunStore(tmp_path / "runs")
    frozen = store.begin(cfg) / "config.yaml"
    frozen.write_text(frozen.read_text().replace("n_clusters: 4", "n_clusters: 5"))
    with pytest.raises(StoreError, match="n_clusters"):
        run_one(cfg)
    assert not (frozen.parent / "record.json").exists()


@pytest.mark.parametrize(
    "asked, said",
    [
        (("selector.budget=match_cluster", "clustering.n_clusters=500"), "cannot be divided into 500 clusters"),
        (("selector.budget=fraction", "clustering.n_clusters=500"), "cannot be divided into 500 clusters"),
        (
            ("selector.budget=rows", "selector.rows=3", "clustering.n_clusters=4"),
            "a budget of 3 rows cannot give each of 4 clusters",
        ),
        (("selector.budget=rows", "selector.rows=100000"), "give an integer from 1 to"),
    ],
)
def test_what_cannot_be_chosen_is_refused_before_any_model_work(tmp_path, monkeypatch, asked, said):
    cfg = smoke(tmp_path, "selector=cluster", *asked)
    ready = stages.prepare(cfg)
    monkeypatch.setattr(stages, "features", lambda *_: pytest.fail("model work began"))
    with pytest.raises(ValueError, match=said):
        stages.select(cfg, ready, tmp_path / "run")
