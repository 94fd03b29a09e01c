"""Run by an interpreter that has LLaMA-Factory or axolotl: loads an exported folder with that library's own code and prints its rows.

python trainer_loading.py llamafactory|axolotl FOLDER MODEL SCRATCH  ►  one line "ROWS <json>": [whole text, text that carries loss] of each row
"""

import json
import sys
from pathlib import Path


def llamafactory(folder: Path, model: str, scratch: str):
    from llamafactory.data import get_dataset, get_template_and_fix_tokenizer
    from llamafactory.hparams import get_train_args
    from llamafactory.model import load_tokenizer

    (name,) = json.loads((folder / "llama_factory" / "dataset_info.json").read_text())
    settings = {
        "stage": "sft",
        "do_train": True,
        "model_name_or_path": model,
        "dataset": name,
        "dataset_dir": str(folder / "llama_factory"),
        "template": "default",
        "finetuning_type": "full",
        "cutoff_len": 4096,
        "output_dir": scratch,
        "cache_dir": f"{scratch}/cache",
        "use_cpu": True,
        "report_to": "none",
    }
    model_args, data_args, training_args, _, _ = get_train_args(settings)
    tokenizer = load_tokenizer(model_args)["tokenizer"]
    template = get_template_and_fix_tokenizer(tokenizer, data_args)
    module = get_dataset(template, model_args, data_args, training_args, stage="sft", tokenizer=tokenizer)
    return tokenizer, module["train_dataset"]


def axolotl(folder: Path, model: str, scratch: str):
    import os

    import yaml
    from axolotl.cli.args import TrainerCliArgs
    from axolotl.cli.config import load_cfg
    from axolotl.common.datasets import load_datasets
    from axolotl.loaders import load_tokenizer

    settings = yaml.safe_load((folder / "axolotl.yaml").read_text())
    own = {"base_model": model, "output_dir": scratch, "dataset_prepared_path": f"{scratch}/prepared", "micro_batch_size": 1}
    config = Path(scratch) / "axolotl.yaml"
    config.write_text(
        yaml.safe_dump(settings | own | {"gradient_accumulation_steps": 1, "optimizer": "adamw_torch", "bf16": False})
    )
    os.chdir(folder)  # as the snippet says: run from this folder
    cfg = load_cfg(str(config))
    return load_tokenizer(cfg), load_datasets(cfg=cfg, cli_args=TrainerCliArgs()).train_dataset


if __name__ == "__main__":
    library, where, base, out = sys.argv[1:]
    Path(out).mkdir(parents=True, exist_ok=True)
    reader, rows = {"llamafactory": llamafactory, "axolotl": axolotl}[library](Path(where), base, out)
    told = [[reader.decode(r["input_ids"]), reader.decode([i for i in r["labels"] if i != -100])] for r in rows]
    print("\nROWS " + json.dumps(told))
