"""DeepSpeed's configuration, generated from the trainer's: the one place that says how the two correspond.

engine                    zero_optimization.stage 2 or 3
precision                 bf16: bf16.enabled, with float32 master weights and float32 gradient sums; float32 and bf16_autocast: neither (the
                          loss module casts)
max_grad_norm             gradient_clipping (0: off)
per_device_batch          train_micro_batch_size_per_gpu
global_batch              not said: the number of micro-batches differs from step to step and rank to rank (short last steps, unequal clusters), so the
                          accumulation is ours (managed_gradient_accumulation: false) and the optimiser is stepped once a global step
optimizer, learning_rate  not said: the optimiser is handed over, the same torch one as everywhere
"""

from __future__ import annotations

from typing import Any


def deepspeed_config(trainer: Any, *, on_gpu: bool) -> dict[str, Any]:
    """The dictionary that `deepspeed.initialize` gets. `trainer`: a TrainerConfig with one of the DeepSpeed engines."""
    stage = {"deepspeed_zero2": 2, "deepspeed_zero3": 3}[trainer.engine]
    zero: dict[str, Any] = {
        "stage": stage,
        "contiguous_gradients": True,
        "overlap_comm": on_gpu and stage == 2,  # with own accumulation DeepSpeed overlaps in stage 2 only
        "reduce_scatter": True,
        "reduce_bucket_size": 50_000_000,
    }
    if stage == 2:
        zero["allgather_bucket_size"] = 50_000_000
    else:
        zero |= {"stage3_prefetch_bucket_size": 50_000_000, "stage3_param_persistence_threshold": 100_000}
        zero |= {"stage3_max_live_parameters": 1_000_000_000, "sub_group_size": 1_000_000_000}
    half = trainer.precision == "bf16"
    return {
        "train_micro_batch_size_per_gpu": trainer.per_device_batch,
        "gradient_accumulation_steps": 1,
        "managed_gradient_accumulation": False,
        "zero_optimization": zero,
        "bf16": {"enabled": half},
        "data_types": {"grad_accum_dtype": "fp32"},
        "communication_data_type": "fp32",
        "gradient_clipping": trainer.max_grad_norm or 0.0,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "steps_per_print": 2**31,
    }
