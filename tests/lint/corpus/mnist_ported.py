"""MNIST with a held-out set; ported."""
import argparse

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import random_split
from torchvision import datasets, transforms

from elasticrun import (
    Accumulator,
    AdaptiveDataLoader,
    AdaptiveDataParallel,
    Variables,
    device,
    rank,
    remaining_epochs_until,
)


def build():
    return nn.Sequential(nn.Flatten(), nn.Linear(784, 256), nn.ReLU(), nn.Dropout(0.2), nn.Linear(256, 10))


def train_epoch(model, optimizer, loader, dev):
    model.train()
    total = Accumulator()
    for x, y in loader:
        x, y = x.to(dev), y.to(dev)
        loss = F.cross_entropy(model(x), y)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        total["loss"] += loss.item() * loader.num_valid
    with total.synchronized():
        return total["loss"] / loader.num_samples


@torch.no_grad()
def evaluate(model, loader, dev):
    model.eval()
    total = Accumulator()
    for x, y in loader:
        hits = model(x.to(dev)).argmax(1) == y.to(dev)
        total["correct"] += hits[: loader.num_valid].sum()
    with total.synchronized():
        return total["correct"] / loader.num_samples


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--lr", type=float, default=1e-3)
    args = parser.parse_args()
    torch.manual_seed(0)
    dev = device()
    full = datasets.MNIST("data", train=True, transform=transforms.ToTensor())
    train_set, valid_set = random_split(full, [55000, 5000], generator=torch.Generator().manual_seed(3))
    net = build().to(dev)
    optimizer = torch.optim.Adam(net.parameters(), lr=args.lr)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, args.epochs)
    model = AdaptiveDataParallel(net, optimizer, scheduler)
    train = AdaptiveDataLoader(train_set, batch_size=128, shuffle=True, num_workers=2)
    valid = AdaptiveDataLoader(valid_set, batch_size=500)
    best = Variables(accuracy=0.0, epoch=-1)
    for group in optimizer.param_groups:
        group["weight_decay"] = 1e-4
    for epoch in remaining_epochs_until(args.epochs):
        loss = train_epoch(model, optimizer, train, dev)
        accuracy = evaluate(model, valid, dev)
        scheduler.step()
        if accuracy > best.accuracy:
            best.accuracy, best.epoch = accuracy, epoch
            if rank() == 0:
                torch.save(net.state_dict(), "best.pt")
        if rank() == 0:
            print(f"{epoch}: loss {loss:.4f} accuracy {accuracy:.4f} best {best.accuracy:.4f}")


if __name__ == "__main__":
    main()
