"""The schedule is stepped in zone B, after the training loop."""

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

schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
model = AdaptiveDataParallel(net, optimizer, schedule)
train = AdaptiveDataLoader(TensorDataset(inputs, targets), 8, shuffle=True)
valid = AdaptiveDataLoader(TensorDataset(inputs, targets), 16)

for _epoch in remaining_epochs_until(3):
    for x, y in train:
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()
    schedule.step()
    for x, _ in valid:
        with torch.no_grad():
            model(x)
