"""Trains until it is stopped; keeps checkpoints where the launcher did not say."""

from __future__ import annotations

import torch
from torch.nn.functional import mse_loss
from torch.utils.data import TensorDataset

import elasticrun

torch.manual_seed(3)
elasticrun.init("elsewhere", save_interval="off", save_every=50, keep=20)
inputs = torch.randn(96, 5)
data = TensorDataset(inputs, inputs.sum(1, keepdim=True).sin())
net = torch.nn.Linear(5, 1)
optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
model = elasticrun.AdaptiveDataParallel(net, optimizer)
loader = elasticrun.AdaptiveDataLoader(data, 8, shuffle=True, name="train")
for x, y in loader.batches():
    optimizer.zero_grad()
    mse_loss(model(x), y).backward()
    optimizer.step()
