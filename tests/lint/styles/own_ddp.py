"""A DDP of one's own, with micro-batches."""

from contextlib import nullcontext

import torch
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel

import elasticrun
from elasticrun import AdaptiveDataLoader, register, remaining_epochs_until


def main(train_set):
    elasticrun.init()
    net = torch.nn.Linear(16, 4).to(elasticrun.device())
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
    ddp = DistributedDataParallel(net)
    register(model=net, optimizer=optimizer)
    train = AdaptiveDataLoader(
        train_set, batch_size=512, shuffle=True, max_local_batch_size=64
    )
    for epoch in remaining_epochs_until(5):
        for x, y in train:
            with nullcontext() if train.is_step else ddp.no_sync():
                loss = F.cross_entropy(ddp(x), y) * train.loss_weight
                loss.backward()
            if train.is_step:
                optimizer.step()
                optimizer.zero_grad()
        if elasticrun.rank() == 0:
            torch.save(net.state_dict(), f"epoch-{epoch}.pt")
