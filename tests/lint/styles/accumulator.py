"""Sums in Accumulators, and effects that happen once."""

import requests
import torch

from elasticrun import (
    Accumulator,
    AdaptiveDataLoader,
    AdaptiveDataParallel,
    once,
    rank,
    remaining_epochs_until,
)


def main(train_set, valid_set, hook):
    torch.manual_seed(0)
    net = torch.nn.Linear(4, 3)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
    model = AdaptiveDataParallel(net, optimizer, scheduler)
    train = AdaptiveDataLoader(train_set, batch_size=64, shuffle=True)
    valid = AdaptiveDataLoader(valid_set, batch_size=64, even_batches=False)
    stats = Accumulator()
    if once("announce") and rank() == 0:
        requests.post(hook, json={"text": "started"}, timeout=10)
    for epoch in remaining_epochs_until(50):
        for x, y in train:
            loss = torch.nn.functional.cross_entropy(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            stats["train_loss"] += loss.item() * train.num_valid
        for x, y in valid:
            with torch.no_grad():
                stats["loss"] += torch.nn.functional.cross_entropy(model(x), y).item()
            stats["total"] += len(y)
        with stats.synchronized():
            mean = stats["loss"] / stats["total"]
            print(epoch, mean)
        scheduler.step(mean)
