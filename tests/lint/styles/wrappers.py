"""Generators, closures and wrappers around loaders."""

from contextlib import contextmanager
from functools import partial

import torch
from torch import nn
from tqdm import tqdm

from elasticrun import (
    Accumulator,
    AdaptiveDataLoader,
    AdaptiveDataParallel,
    remaining_epochs_until,
)


def to_device(loader, device):
    for batch in loader:
        yield [part.to(device, non_blocking=True) for part in batch]


class Prefetcher:
    def __init__(self, loader, device):
        self.loader = loader
        self.device = device

    def __len__(self):
        return len(self.loader)

    def __iter__(self):
        for x, y in self.loader:
            yield x.to(self.device), y.to(self.device)


@contextmanager
def evaluating(net):
    was_training = net.training
    net.eval()
    try:
        yield net
    finally:
        net.train(was_training)


def make_step(model, optimizer, criterion):
    def step(x, y):
        optimizer.zero_grad()
        loss = criterion(model(x), y)
        loss.backward()
        optimizer.step()
        return loss

    return step


def main(train_set, valid_set, device="cpu"):
    net = nn.Linear(8, 2)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.95)
    model = AdaptiveDataParallel(net, optimizer, schedule)
    train = AdaptiveDataLoader(train_set, batch_size=32, shuffle=True)
    valid = Prefetcher(AdaptiveDataLoader(valid_set, batch_size=32), device)
    step = make_step(model, optimizer, nn.CrossEntropyLoss())
    measure = partial(nn.functional.cross_entropy, reduction="sum")
    sums = Accumulator()
    for epoch in tqdm(remaining_epochs_until(10), total=10):
        for x, y in tqdm(to_device(train, device), total=len(train), leave=False):
            step(x, y)
        with evaluating(model), torch.no_grad():
            for x, y in valid:
                sums["loss"] += measure(model(x), y) * valid.loss_weight
        with sums.synchronized():
            tqdm.write(f"{epoch}: {sums['loss'] / len(valid):.3f}")
            sums.clear()
        schedule.step()
