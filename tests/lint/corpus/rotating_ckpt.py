"""Keeps files of weights, rotates them, keeps the best."""
import os
from pathlib import Path

import torch
import torch.nn as nn
import torch.nn.functional as F
import torchvision
from torchvision.transforms import ToTensor

from elasticrun import Accumulator, AdaptiveDataLoader, AdaptiveDataParallel, Variables, device, rank, remaining_epochs_until

FOLDER = Path("weights")
KEEP = 3


class Rotation:
    def __init__(self, folder, keep):
        self.folder, self.keep = folder, keep
        self.written = []

    def shift(self):
        """last.2 <- last.1 <- last.0"""
        for k in range(self.keep - 1, 0, -1):
            newer = self.folder / f"last.{k - 1}.pt"
            if newer.exists():
                newer.replace(self.folder / f"last.{k}.pt")  # MISTAKE: effect: called in front of the test loop, a restart there shifts the files once more (or line with: rotation.shift())

    def save(self, net, tag):
        path = self.folder / f"{tag}.pt"
        torch.save(net.state_dict(), path)
        self.written.append(path)  # MISTAKE: lost: the list of written files is empty after a restart, so files of before are never removed (or line with: self.written = []) (or line with: self.written.pop)
        if len(self.written) > self.keep:
            os.remove(self.written.pop(0))


def accuracy(model, loader, dev):
    model.eval()
    total = Accumulator()
    with torch.no_grad():
        for x, y in loader:
            total["hits"] += (model(x.to(dev)).argmax(1) == y.to(dev))[: loader.num_valid].sum()
    with total.synchronized():
        return total["hits"] / loader.num_samples


def main():
    torch.manual_seed(0)
    dev = device()
    if rank() == 0:
        FOLDER.mkdir(exist_ok=True)
        for old in FOLDER.glob("*.pt"):
            old.unlink()  # MISTAKE: effect: each start removes all files that were written before the restart, the best too
    train = AdaptiveDataLoader(torchvision.datasets.EMNIST("data", "letters", transform=ToTensor()), batch_size=128, shuffle=True)
    test = AdaptiveDataLoader(torchvision.datasets.EMNIST("data", "letters", train=False, transform=ToTensor()), batch_size=500)
    net = nn.Sequential(nn.Flatten(), nn.Linear(784, 256), nn.ReLU(), nn.Linear(256, 27)).to(dev)
    optimizer = torch.optim.Adam(net.parameters(), 1e-3)
    model = AdaptiveDataParallel(net, optimizer)
    best = Variables(accuracy=0.0)
    rotation = Rotation(FOLDER, KEEP)
    for epoch in remaining_epochs_until(40):
        model.train()
        for x, y in train:
            loss = F.cross_entropy(model(x.to(dev)), y.to(dev))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        if rank() == 0:
            rotation.shift()
            torch.save(net.state_dict(), FOLDER / "last.0.pt")
        score = accuracy(model, test, dev)
        if score > best.accuracy:
            best.accuracy = score
            if rank() == 0:
                rotation.save(net, f"best-{epoch:03d}")


main()
