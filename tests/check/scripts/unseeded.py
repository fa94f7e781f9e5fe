"""Not even two runs without a restart are the same."""

import random

import torch
from torch import nn
from torch.utils.data import TensorDataset

from elasticrun import (
    AdaptiveDataLoader,
    AdaptiveDataParallel,
    remaining_epochs_until,
)

torch.manual_seed(0)
inputs = torch.randn(61, 4)
targets = inputs.sum(dim=1, keepdim=True)
net = nn.Linear(4, 1)
optimizer = torch.optim.SGD(net.parameters(), 0.05, 0.9)

model = AdaptiveDataParallel(net, optimizer)
train = AdaptiveDataLoader(TensorDataset(inputs, targets), 8, shuffle=True)

for _epoch in remaining_epochs_until(3):
    for x, y in train:
        optimizer.zero_grad()
        (random.random() * nn.functional.mse_loss(model(x), y)).backward()
        optimizer.step()
