"""trl.SFTTrainer on a selection, with the tokens that the selection was made from:  python examples/trl_sft.py FOLDER OUTPUT

`trl_example.py` in the output folder lets TRL do the tokenising instead.
"""

import sys
from pathlib import Path

import datasets
import torch
from trl import SFTConfig, SFTTrainer

from clusterft.api import open_folder
from clusterft.integrations import ClusterTrainerMixin


class BalancedTrainer(ClusterTrainerMixin, SFTTrainer):
    """SFTTrainer with the selection's steps and loss weights."""


data = open_folder(Path(sys.argv[1])).training_data()
rows = datasets.Dataset.from_list([{"input_ids": r.input_ids.tolist(), "labels": r.labels.tolist()} for r in data.rows])
gpu = torch.cuda.is_available()
args = SFTConfig(
    output_dir=sys.argv[2],
    per_device_train_batch_size=4,
    gradient_accumulation_steps=2,
    num_train_epochs=2,
    learning_rate=5e-5,
    max_length=None,
    use_cpu=not gpu,
    bf16=gpu,
    report_to=[],
)
trainer = BalancedTrainer(model=data.model(), args=args, train_dataset=rows, processing_class=data.tokenizer)
trainer.balance(data.clusters, data.weights)
print(f"mean loss {trainer.train().training_loss:.4f}")
