"""Nothing wrong, but seldom: once(), late flushes, gradients of two batches, breaks."""

import os

import torch
from torch import nn
from torch.utils.data import TensorDataset

from elasticrun import (
    AdaptiveDataLoader,
    AdaptiveDataParallel,
    Variables,
    once,
    rank,
    remaining_epochs_until,
)

torch.manual_seed(0)
inputs = torch.randn(61, 4)
net = nn.Linear(4, 1)
optimizer = torch.optim.SGD(net.parameters(), 0.05)
model = AdaptiveDataParallel(net, optimizer)
train = AdaptiveDataLoader(TensorDataset(inputs), 8, shuffle=True)
counts = Variables(steps=0, folder=os.getcwd())
log = None
if rank() == 0:
    log = open("log.csv", "a")  # noqa: SIM115
    if log.tell() == 0:
        log.write("epoch,steps\n")

for _epoch in remaining_epochs_until(1):
    if once("warm-up") and log:
        log.write("warm-up\n")
    for (x,) in train:
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

for epoch in remaining_epochs_until(10):
    for number, (x,) in train.enumerate():
        if counts.steps >= 3:
            break
        (model(x).square().mean() / 2).backward()
        if number % 2:
            optimizer.step()
            optimizer.zero_grad()
            counts.steps += 1
    if log:
        log.write(f"{epoch},{counts.steps}\n")
