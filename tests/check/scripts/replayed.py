"""Replayed code changes what is kept: weights in P, a list in A, a file in B."""

import torch
from torch import nn
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
valid = AdaptiveDataLoader(TensorDataset(inputs, targets), 16)
history = Variables(epochs=[])
first_weights = {name: torch.zeros_like(v) for name, v in net.state_dict().items()}
net.load_state_dict(first_weights)

for epoch in remaining_epochs_until(3):
    history.epochs.append(epoch)
    for x, y in train:
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()
    with open("log.txt", "a") as file:
        file.write(f"epoch {epoch} trained\n")
    for x, _ in valid:
        with torch.no_grad():
            model(x)
