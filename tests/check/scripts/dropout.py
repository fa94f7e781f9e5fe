"""Dropout draws other masks with another number of replicas, restarted or not."""

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
net = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 1))
optimizer = torch.optim.SGD(net.parameters(), 0.05)
schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
model = AdaptiveDataParallel(net, optimizer, schedule)
train = AdaptiveDataLoader(TensorDataset(inputs), 8, shuffle=True)
score = Variables(error=0.0)

for _epoch in remaining_epochs_until(3):
    net.train()
    for (x,) in train:
        optimizer.zero_grad()
        (model(x) - x.sum(1, keepdim=True)).square().mean().backward()
        optimizer.step()
    net.eval()
    with torch.no_grad():
        score.error = float(net(inputs).square().mean())
    schedule.step()
