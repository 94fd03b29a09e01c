"""Entries for other trainers and the data card: llama_factory/dataset_info.json, axolotl.yaml, trl_example.py, dataset/README.md.

In: the folder, the configuration, the header. Out: files with fixed names. Where a text of the data appears (a file's path), it
is quoted by the format's own writer, or cleaned for Markdown.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml
from omegaconf import DictConfig

from clusterft.atomic import write_atomic

ROLE_TAGS = {
    "role_tag": "role",
    "content_tag": "content",
    "user_tag": "user",
    "assistant_tag": "assistant",
    "system_tag": "system",
}

TRL_EXAMPLE = '''"""Fine-tune on this subset with TRL, balanced over clusters and weighted:  python trl_example.py MODEL OUT

Takes the last answer of each conversation as its target. The tokenizer of MODEL needs a chat template.
"""

import sys
from pathlib import Path

import torch
from datasets import load_from_disk
from trl import SFTConfig, SFTTrainer

from clusterft.integrations import ClusterTrainerMixin


class BalancedTrainer(ClusterTrainerMixin, SFTTrainer):
    """SFTTrainer with this subset's steps and loss weights."""


def main(model: str, output: str) -> None:
    data = load_from_disk(str(Path(__file__).parent / "dataset"))
    rows = data.map(lambda r: {"prompt": r["messages"][:-1], "completion": r["messages"][-1:]}, remove_columns=data.column_names)
    gpu = torch.cuda.is_available()
    args = SFTConfig(
        output_dir=output,
        use_cpu=not gpu,
        bf16=gpu,
        per_device_train_batch_size=4,
        gradient_accumulation_steps=8,
        learning_rate=5e-5,
        num_train_epochs=@EPOCHS@,
        max_length=@MAX_LENGTH@,
        seed=@SEED@,
        report_to=[],
    )
    trainer = BalancedTrainer(model=model, args=args, train_dataset=rows)
    trainer.balance(None if None in data["cluster"] else data["cluster"], data["weight"])
    trainer.train()
    trainer.save_model(output)


if __name__ == "__main__":
    main(*sys.argv[1:3])
'''

CARD = """# {rows} of {pool} rows, chosen by `{method}`

Chosen for fine-tuning by the package `clusterft` {version}. Load it with `datasets.load_from_disk("dataset")`.

| fact | value |
|---|---|
| rows kept | {rows} of {pool} ({share:.1%}) |
| rows held out for the loss after training | {heldout} |
| further rows held out for selectors that match rows | {validation} |
| rows set aside before the choice | {rejected} (see `rejected.jsonl`) |
| model whose gradients were looked at | {model} |
| prompt format | {template}, at most {max_length} tokens |
| seed | {seed} |
| fingerprint of the pool | `{fingerprint}` |

## Columns

`id` (hash of the content), `prompt`, `input`, `response`, `messages` (role and content), `cluster` (null for methods without
clusters), `weight` (loss weight, mean 1), `distance` (to the cluster's centre), `file` and `line` (where the row stands).

## Sources

{sources}

## Before you use it

- The licence is that of the sources; this card knows nothing about it.
- Train with the weights (`weight`): the clusters were thinned to equal sizes, and the weights undo that in the loss.
- Rows were not checked for truth, safety or personal data.
"""


def write_recipes(folder: Path, cfg: DictConfig, header: Mapping[str, Any]) -> None:
    """The three entries. Loss weights are known to the TRL example only; the others train every row with weight 1."""
    target = folder / "llama_factory"
    target.mkdir(exist_ok=True)
    write_atomic(target / "dataset_info.json", json.dumps(llama_factory_entry(header), indent=2) + "\n")
    text = "# Every row counts alike here: axolotl knows no loss weights. Set base_model, then run axolotl from this folder.\n"
    write_atomic(folder / "axolotl.yaml", text + yaml.safe_dump(axolotl_entry(cfg), sort_keys=False))
    write_atomic(folder / "trl_example.py", trl_example(cfg))


def llama_factory_entry(header: Mapping[str, Any]) -> dict[str, Any]:
    """The entry of LLaMA-Factory's `dataset_info.json`; file_name is relative to that file's folder."""
    name = f"clusterft_{header['method']}_{header['run_id']}"
    columns = {"messages": "messages"}
    return {name: {"file_name": "../messages.jsonl", "formatting": "sharegpt", "columns": columns, "tags": ROLE_TAGS}}


def axolotl_entry(cfg: DictConfig) -> dict[str, Any]:
    """The data part of an axolotl configuration."""
    return {
        "base_model": "SET_ME" if cfg.model.source in ("tiny", "gguf") else cfg.model.path,
        "datasets": [
            {
                "path": "messages.jsonl",  # with `data_files` axolotl would look for a hub data set
                "ds_type": "json",
                "split": "train",
                "type": "chat_template",
                "field_messages": "messages",
                "message_property_mappings": {"role": "role", "content": "content"},
                "roles_to_train": ["assistant"],
            }
        ],
        "sequence_len": cfg.trainer.max_length,
        "num_epochs": cfg.trainer.epochs,
        "learning_rate": cfg.trainer.learning_rate,
        "seed": cfg.seed,
        "train_on_inputs": False,
    }


def trl_example(cfg: DictConfig) -> str:
    """The TRL script with this run's numbers; only integers are put in."""
    values = {"@EPOCHS@": cfg.trainer.epochs, "@MAX_LENGTH@": cfg.trainer.max_length, "@SEED@": cfg.seed}
    text = TRL_EXAMPLE
    for mark, value in values.items():
        text = text.replace(mark, str(int(value)))
    return text


def write_card(path: Path, header: Mapping[str, Any]) -> None:
    """The data card."""
    files = header["data"]["files"]
    sources = "\n".join(f"- {markdown(f['path'])}, {f['bytes']:,} bytes, SHA-256 `{f['sha256']}`" for f in files)
    text = CARD.format(
        rows=f"{header['budget']:,}",
        pool=f"{header['pool_rows']:,}",
        share=header["share"],
        method=header["method"],
        version=header["versions"].get("clusterft", "from a checkout"),
        heldout=header["heldout_rows"],
        validation=header["validation_rows"],
        rejected=header["rejected"],
        model=markdown(header["model"]["name"]),
        template=header["template"]["name"],
        max_length=header["template"]["max_length"],
        seed=header["seed"],
        fingerprint=header["pool_fingerprint"],
        sources=sources,
    )
    write_atomic(path, text)


def markdown(text: str) -> str:
    """A text as inline code on one line: nothing in it can end the code span or start a table cell."""
    one_line = "".join(c if c.isprintable() else "?" for c in text).replace("`", "'").replace("|", "/")
    return f"`{one_line}`"
