"""The typed schema of conf/: what may be said, with types and units. Values live in the YAML files, never here.

`run.py` composes with Hydra and freezes the result into `config.yaml` of the run directory; every stage and every worker reads
that file back with `load_frozen`. Nothing below imports torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from omegaconf import MISSING, DictConfig, OmegaConf


@dataclass
class ValidationConfig:
    """Rows that a gradient-matching selector may look at; never rows that are scored."""

    kind: str = MISSING  # heldout | code_subtasks | medical_subtasks
    rows: int = MISSING  # heldout: rows cut off the held-out ones; else rows a subtask
    is_tested: str | None = None  # medical_subtasks: function that tells whether a PubMed id is an official test question


@dataclass
class DataConfig:
    """A source of instruction rows."""

    name: str = MISSING
    kind: str = MISSING  # hub | files | stdlib | medical_smoke
    path: Any = None  # hub id, or one or several local files
    revision: str | None = None  # hub only
    split: str | None = None  # hub only
    file_format: str = MISSING  # auto | alpaca | instruction_response | problem_solution | sharegpt | messages
    fields: dict[str, str] = MISSING  # our name (prompt, response, input) -> column; {} means by file_format
    template: str = MISSING  # magicoder | alpaca | chat
    instruction_prefix: str = MISSING  # text put before every instruction (Magicoder's lead-in), "" for none
    max_rows: int | None = None  # keep at most so many rows, chosen by content hash
    max_row_tokens: int | None = None  # keep rows of at most so many tokens after templating (a stated laptop limit)
    holdout_rows: int = MISSING  # rows set apart by content hash for the held-out loss
    group_field: str | None = None  # meta field that names a row's family (macro averages, table 17)
    expected_rows: int | None = None  # a different count is reported
    validation: ValidationConfig = MISSING


@dataclass
class ModelConfig:
    """A causal language model: hub id, local folder or GGUF file."""

    name: str = MISSING
    source: str = MISSING  # hub | local | gguf | tiny
    path: str = MISSING  # hub id, folder, or folder of the GGUF file
    revision: str | None = None
    gguf_file: str | None = None
    sha256: str | None = None  # of the GGUF file or of model.safetensors; checked when given
    architecture: str = MISSING  # class name, for example LlamaForCausalLM
    shape: dict[str, Any] = (
        MISSING  # hidden_size, num_hidden_layers, ...: the real shape, checked against config.json and used for plans
    )
    weights_dtype: str = MISSING  # float32 | bfloat16
    attention: str = MISSING  # eager | sdpa | flash_attention_2
    trust_remote_code: bool = False
    use_safetensors: bool | None = None  # null: safetensors only | false: pickled weights too, where there are no others


@dataclass
class SamplerConfig:
    """How the selected rows are ordered into steps."""

    kind: str = MISSING  # cluster_balanced | shuffled | auto (balanced where the selection has clusters)
    weights: str = MISSING  # selection (w = K pi_c) | none | sqrt
    reselect_every_epochs: int | None = None  # choose anew with the current model; None: one selection before training
    reselect_every_steps: int | None = None  # the same, counted in global steps


@dataclass
class TrainerConfig:
    """One fine-tuning run. `workers` is W of the paper; how many processes carry them is runtime.processes."""

    workers: int = MISSING
    epochs: int = MISSING
    global_batch: int = MISSING  # samples an optimiser step, over all workers
    per_device_batch: int = MISSING  # samples a micro-batch
    max_length: int = MISSING  # tokens
    optimizer: str = MISSING  # adafactor | adamw | sgd
    learning_rate: float = MISSING
    schedule: str = MISSING  # linear | cosine | constant
    warmup_steps: int = MISSING
    weight_decay: float = MISSING
    max_grad_norm: float | None = None  # None: no clipping, as in the paper
    precision: str = MISSING  # float32 | bf16_autocast | bf16
    tf32: bool = MISSING
    loss_reduction: str = MISSING  # sample: mean over a row's tokens first | token: mean over all tokens
    engine: str = MISSING  # ddp | fsdp | deepspeed_zero2 | deepspeed_zero3
    gradient_checkpointing: bool = MISSING
    checkpoint_every_steps: int | None = None
    keep_last: int = MISSING


@dataclass
class ClusteringConfig:
    """Clusters of the gradient proxies. Shared: every selector whose budget matches CluSTER's needs them."""

    n_clusters: int = MISSING  # K
    capacity_factor: float = MISSING  # alpha
    solver: str = MISSING  # exact | released | min_cost_flow
    n_init: int = MISSING
    proxy: dict[str, Any] = MISSING  # parameters of the gradient-proxy pass


@dataclass
class RuntimeConfig:
    """Where and how, never what: nothing here may change a result, so nothing here is part of a run's id."""

    runs_dir: str = MISSING
    cache_dir: str = MISSING
    assets_dir: str = MISSING
    device: str = MISSING  # cpu | cuda; asked for, not guessed
    processes: int = MISSING  # real processes; trainer.workers / processes virtual workers in each
    threads_per_process: int = MISSING
    feature_processes: int = MISSING
    feature_threads: int = MISSING
    evaluation_processes: int = MISSING  # processes that generate answers together, of feature_threads threads each
    token_budget: int = MISSING  # tokens a batch in feature passes
    nodes: int = MISSING  # of the SLURM job; more than 1 needs launcher srun
    launcher: str = MISSING  # spawn | torchrun | srun
    keep_model: bool = MISSING  # keep the trained weights after evaluation
    progress: bool = MISSING
    results_dir: str = "results"  # of tables; below it a folder for each scale
    wandb: str = MISSING  # auto (offline where it is installed) | online | offline | disabled


@dataclass
class RunConfig:
    """One cell: everything that run_one needs."""

    data: DataConfig = MISSING
    model: ModelConfig = MISSING
    selector: Any = MISSING  # ratio, budget, rows, and the method's own parameters with its _target_
    clustering: ClusteringConfig = MISSING
    sampler: SamplerConfig = MISSING
    trainer: TrainerConfig = MISSING
    evaluators: Any = MISSING  # name -> evaluator node with _target_
    baseline_sizes: Any = MISSING
    runtime: RuntimeConfig = MISSING
    seed: int = MISSING
    domain: Any = None
    scale: Any = None  # name and facts of the scale file
    experiment: Any = None  # the table or figure, see experiments/spec.py
    cell: int | None = None  # run only this cell of the experiment
    plan: bool = False  # print what would run, and stop
    status: bool = False  # print what is done, running, queued, failed and missing, and stop
    check: bool = False  # render from the committed records; fail if a committed result would change
    render: bool = False  # render from the committed records and write; run nothing
    explain: Any = None  # [line, column]: name the runs behind a value


def load_frozen(path: Path) -> DictConfig:
    """Reads a frozen config.yaml; read-only and closed to unknown keys. Raises FileNotFoundError."""
    cfg = OmegaConf.load(path)
    assert isinstance(cfg, DictConfig)
    OmegaConf.set_struct(cfg, True)
    OmegaConf.set_readonly(cfg, True)
    return cfg
