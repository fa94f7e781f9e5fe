"""A counter, a best value and an averaged model that are in no checkpoint."""

import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel
from torch.utils.data import TensorDataset

from elasticrun import (
    AdaptiveDataLoader,
    AdaptiveDataParallel,
    Variables,
    remaining_epochs_until,
)

torch.manual_seed(0)
inputs = torch.randn(61, 4)
targets = inputs.sum(dim=1, keepdim=True)
net = nn.Linear(4, 1)
optimizer = torch.optim.SGD(net.parameters(), 0.05, 0.9)

model = AdaptiveDataParallel(net, optimizer)
train = AdaptiveDataLoader(TensorDataset(inputs, targets), 8, shuffle=True)
average = AveragedModel(net)
saved = Variables(epochs=[])

num_steps = 0
best = float("inf")
for epoch in remaining_epochs_until(3):
    for x, y in train:
        num_steps += 1
        for group in optimizer.param_groups:
            group["lr"] = 0.05 * min(1.0, num_steps / 10)
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()
        average.update_parameters(net)
    with torch.no_grad():
        error = float(nn.functional.mse_loss(average(inputs), targets))
    error += 10.0 * epoch  # It gets worse, so that only the first one is saved.
    if error < best:
        best = error
        saved.epochs.append(epoch)
