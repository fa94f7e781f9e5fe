"""Siamese network on MNIST pairs."""
import random

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import Dataset
from torchvision import datasets

from elasticrun import Accumulator, AdaptiveDataLoader, AdaptiveDataParallel, device, rank, remaining_epochs_until


class Pairs(Dataset):
    def __init__(self, root, train):
        self.base = datasets.MNIST(root, train=train)
        self.data = self.base.data.unsqueeze(1).float() / 255.0
        self.by_class = [np.where(self.base.targets.numpy() == c)[0] for c in range(10)]
        self.rng = np.random.default_rng(0 if train else 1)

    def __len__(self):
        return len(self.data)

    def __getitem__(self, index):
        first = self.rng.integers(10)  # MISTAKE: rng: the data set's own generator begins anew with each start and in each worker (or line with: self.rng = np.random.default_rng)
        same = index % 2 == 0
        second = first if same else (first + self.rng.integers(1, 10)) % 10  # ARGUABLE: the same generator as above
        a = self.rng.choice(self.by_class[first])  # ARGUABLE: the same generator as above
        b = self.rng.choice(self.by_class[second])  # ARGUABLE: the same generator as above
        return self.data[a], self.data[b], torch.tensor(float(same))


class SiameseNetwork(nn.Module):
    def __init__(self):
        super().__init__()
        self.features = nn.Sequential(nn.Conv2d(1, 32, 5, 2), nn.ReLU(), nn.Conv2d(32, 64, 5, 2), nn.ReLU(), nn.Flatten())
        self.fc = nn.Sequential(nn.Linear(2048, 256), nn.ReLU(), nn.Linear(256, 1))

    def forward(self, a, b):
        return self.fc(torch.cat([self.features(a), self.features(b)], 1)).squeeze(1)


def train(model, loader, optimizer, dev, epoch):
    model.train()
    for a, b, y in loader:
        optimizer.zero_grad()
        loss = F.binary_cross_entropy_with_logits(model(a.to(dev), b.to(dev)), y.to(dev))
        loss.backward()
        optimizer.step()
    if rank() == 0:
        print(f"epoch {epoch} last loss {loss.item():.4f}")  # MISTAKE: leftover: loss does not exist if the restart came after the last batch of the loop


def test(model, loader, dev):
    model.eval()
    total = Accumulator()
    with torch.no_grad():
        for a, b, y in loader:
            pred = model(a.to(dev), b.to(dev)) > 0
            total["hits"] += (pred == y.to(dev).bool())[: loader.num_valid].sum()
    if rank() == 0:
        with total.synchronized():  # MISTAKE: collective: a synchronized block is for all replicas, rank 0 alone waits for ever
            print(f"accuracy {total['hits'] / loader.num_samples:.4f}")


def main():
    random.seed(0)
    torch.manual_seed(0)
    dev = device()
    train_loader = AdaptiveDataLoader(Pairs("data", True), batch_size=64, shuffle=True)
    test_loader = AdaptiveDataLoader(Pairs("data", False), batch_size=1000)
    net = SiameseNetwork().to(dev)
    optimizer = torch.optim.Adadelta(net.parameters(), lr=1.0)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.7)
    model = AdaptiveDataParallel(net, optimizer, scheduler)
    for epoch in remaining_epochs_until(14):
        train(model, train_loader, optimizer, dev, epoch)
        test(model, test_loader, dev)
        scheduler.step()


main()
