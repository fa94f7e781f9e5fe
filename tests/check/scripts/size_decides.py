"""The learning rate depends on the number of replicas."""

import torch
from torch import nn
from torch.utils.data import TensorDataset

from elasticrun import (
    AdaptiveDataLoader,
    AdaptiveDataParallel,
    remaining_epochs_until,
    world_size,
)

torch.manual_seed(0)
inputs = torch.randn(61, 4)
net = nn.Linear(4, 1)
optimizer = torch.optim.SGD(net.parameters(), 0.05 * world_size())
model = AdaptiveDataParallel(net, optimizer)
train = AdaptiveDataLoader(TensorDataset(inputs), 8)

for _epoch in remaining_epochs_until(2):
    for (x,) in train:
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
