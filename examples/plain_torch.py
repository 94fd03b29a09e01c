"""A training loop of your own on a selection, balanced and weighted:  python examples/plain_torch.py FOLDER"""

import sys
from pathlib import Path

import torch
from torch.utils.data import DataLoader

from clusterft import ClusterBatchSampler, weighted_loss
from clusterft.api import open_folder
from clusterft.integrations import WeightedCollator, WeightedRows

data = open_folder(Path(sys.argv[1])).training_data()
sampler = ClusterBatchSampler(data.clusters, global_batch=8, seed=0)  # every batch holds equally many rows of each cluster
loader = DataLoader(WeightedRows(data.rows, data.weights), batch_sampler=sampler, collate_fn=WeightedCollator(data.collate))
model = data.model().train()
optimizer = torch.optim.AdamW(model.parameters(), lr=5e-5)
for _ in range(2):
    for batch in loader:
        weights, labels = batch.pop("row_weights"), batch.pop("labels")
        loss = weighted_loss(model(**batch), labels, weights)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
print(f"last loss {loss.item():.4f}")
