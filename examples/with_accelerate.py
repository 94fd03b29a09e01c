"""The same loop under accelerate:  accelerate launch examples/with_accelerate.py FOLDER"""

import sys
from pathlib import Path

import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader

from clusterft import ClusterBatchSampler, weighted_loss
from clusterft.api import open_folder
from clusterft.integrations import WeightedCollator, WeightedRows, batch_denominator

data = open_folder(Path(sys.argv[1])).training_data()
accelerator = Accelerator()
sampler = ClusterBatchSampler(data.clusters, global_batch=8, seed=0, world=accelerator.num_processes)
loader = DataLoader(
    WeightedRows(data.rows, data.weights), batch_sampler=sampler.interleaved(), collate_fn=WeightedCollator(data.collate)
)
model = data.model().train()
model, optimizer, loader = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=5e-5), loader)
for _ in range(2):
    for batch in loader:
        divisor = accelerator.reduce(batch_denominator([batch], "sample").float().to(accelerator.device))  # over all processes
        weights, labels = batch.pop("row_weights"), batch.pop("labels")
        loss = weighted_loss(model(**batch), labels, weights, denominator=divisor, scale=accelerator.num_processes)
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
print(f"last loss {loss.item():.4f}")
