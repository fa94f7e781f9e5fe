"""Would have other batches in each run, if its sizes were decided in a check."""

import random

import torch
from torch import nn
from torch.utils.data import TensorDataset

from elasticrun import (
    AdaptiveDataLoader,
    AdaptiveDataParallel,
    remaining_epochs_until,
    request_checkpoint,
)

torch.manual_seed(0)
net = nn.Linear(2, 1)
optimizer = torch.optim.SGD(net.parameters(), 0.1)
model = AdaptiveDataParallel(net, optimizer, measure_noise=True)
train = AdaptiveDataLoader(TensorDataset(torch.randn(32, 2)), 2, shuffle=True)
train.autoscale(8)
train._autoscaler.choose = lambda: random.SystemRandom().randint(2, 8)

for _ in remaining_epochs_until(2):
    for (x,) in train:
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
        request_checkpoint()
