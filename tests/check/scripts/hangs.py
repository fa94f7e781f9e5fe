"""After a restart, two replicas wait for each other in different collectives."""

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import TensorDataset

from elasticrun import (
    AdaptiveDataLoader,
    AdaptiveDataParallel,
    generation,
    rank,
    remaining_epochs_until,
)

torch.manual_seed(0)
inputs = torch.randn(61, 4)
net = nn.Linear(4, 1)
optimizer = torch.optim.SGD(net.parameters(), 0.05)
model = AdaptiveDataParallel(net, optimizer)
train = AdaptiveDataLoader(TensorDataset(inputs), 8)

for _epoch in remaining_epochs_until(2):
    for (x,) in train:
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
    if generation() > 0:
        if rank() == 0:
            dist.barrier()
        else:
            dist.recv(torch.zeros(1), src=0)
