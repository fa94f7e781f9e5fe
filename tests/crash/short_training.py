"""A short training, sharded or not, which ckpt-chaos kills and starts again."""

from __future__ import annotations

import logging
import sys

import torch
from torch import nn
from torch.nn.functional import mse_loss
from torch.utils.data import TensorDataset

import elasticrun
from elasticrun import (
    AdaptiveDataLoader,
    AdaptiveDataParallel,
    Variables,
    atomic_save,
    register,
)


def main(directory: str, kind: str) -> None:
    logging.getLogger("elasticrun").setLevel(logging.INFO)
    torch.set_num_threads(1)
    torch.manual_seed(0)
    elasticrun.init(directory, save_interval="off", save_every=4, keep=1000)
    net: nn.Module = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 1))
    if kind == "sharded":
        from torch.distributed.fsdp import fully_shard  # takes seconds

        fully_shard(net)
    optimizer = torch.optim.Adam(net.parameters(), lr=0.05)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    if kind == "sharded":
        register(model=net, optimizer=optimizer, scheduler=scheduler)
    else:
        net = AdaptiveDataParallel(net, optimizer, scheduler)
    counted = Variables(steps=0)
    data = TensorDataset(torch.randn(30, 5), torch.randn(30, 1))
    train = AdaptiveDataLoader(data, 8, shuffle=True, name="train")
    for _ in elasticrun.remaining_epochs_until(2):
        for x, y in train:
            weight = train.loss_weight if kind == "sharded" else 1.0
            (mse_loss(net(x), y) * weight).backward()
            optimizer.step()
            optimizer.zero_grad()
            counted.steps += 1
        scheduler.step()
    whole = [
        (each.full_tensor() if kind == "sharded" else each).detach()
        for each in net.parameters()
    ]
    if elasticrun.rank() == 0:
        atomic_save([*whole, counted.steps], f"{directory}/final.pt")


if __name__ == "__main__":
    main(*sys.argv[1:])
