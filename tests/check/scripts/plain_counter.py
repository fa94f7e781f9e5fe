"""The warm-up counts steps in a plain variable."""

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

num_steps = 0
for _epoch in remaining_epochs_until(3):
    for x, y in train:
        num_steps += 1
        for group in optimizer.param_groups:
            group["lr"] = 0.05 * min(1.0, num_steps / 10)
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()
