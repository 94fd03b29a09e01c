"""transformers.Trainer on a selection:  python examples/hf_trainer.py FOLDER OUTPUT"""

import sys
from pathlib import Path

import torch
from transformers import Trainer, TrainingArguments

from clusterft.api import open_folder
from clusterft.integrations import ClusterTrainerMixin


class BalancedTrainer(ClusterTrainerMixin, Trainer):
    """Trainer with the selection's steps and loss weights."""


data = open_folder(Path(sys.argv[1])).training_data()
args = TrainingArguments(
    output_dir=sys.argv[2],
    per_device_train_batch_size=4,
    gradient_accumulation_steps=2,
    num_train_epochs=2,
    learning_rate=5e-5,
    use_cpu=not torch.cuda.is_available(),
    report_to=[],
)
trainer = BalancedTrainer(model=data.model(), args=args, train_dataset=data.rows, data_collator=data.collate)
trainer.balance(data.clusters, data.weights)
print(f"mean loss {trainer.train().training_loss:.4f}")
