"""The last value of a finished loop is missing after a restart."""

import torch
from torch import nn
from torch.utils.data import TensorDataset

from elasticrun import AdaptiveDataLoader, AdaptiveDataParallel, remaining_epochs_until

torch.manual_seed(0)
inputs = torch.randn(61, 4)
net = nn.Linear(4, 1)
optimizer = torch.optim.SGD(net.parameters(), 0.05)
model = AdaptiveDataParallel(net, optimizer)
train = AdaptiveDataLoader(TensorDataset(inputs), 8)
valid = AdaptiveDataLoader(TensorDataset(inputs), 16)

for _epoch in remaining_epochs_until(2):
    for (x,) in train:
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
    for (x,) in valid:
        with torch.no_grad():
            model(x)
    print(float(loss))
