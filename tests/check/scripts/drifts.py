"""A plain DDP whose last layer is unfrozen too late: each replica trains its own."""

import random

import torch
import torch.distributed as dist
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel

import elasticrun
from elasticrun import AdaptiveDataLoader, register, remaining_epochs_until

torch.manual_seed(0)
random.seed(0)
elasticrun.init()
net = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 1))
net[1].requires_grad_(False)
model = DistributedDataParallel(net) if dist.is_initialized() else net
net[1].requires_grad_(True)
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
register(model=net, optimizer=optimizer)
data = torch.utils.data.TensorDataset(torch.randn(32, 4))
train = AdaptiveDataLoader(data, batch_size=8, shuffle=True)

for _ in remaining_epochs_until(3):
    scale = 1 + random.random()
    for (x,) in train:
        optimizer.zero_grad()
        loss = mse_loss(model(x), x.sum(1, keepdim=True) * scale) * train.loss_weight
        loss.backward()
        optimizer.step()
