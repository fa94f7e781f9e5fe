"""BYOL, ported: the target net is a part of the registered module."""
import copy
import math

import torch
import torch.nn as nn
import torch.nn.functional as F
import torchvision
from torchvision import transforms as T

from elasticrun import (
    Accumulator,
    AdaptiveDataLoader,
    AdaptiveDataParallel,
    LogFile,
    device,
    register,
    remaining_epochs_until,
)


def mlp(i, h, o):
    return nn.Sequential(nn.Linear(i, h), nn.LayerNorm(h), nn.ReLU(), nn.Linear(h, o))


class Online(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = nn.Sequential(torchvision.models.resnet18(num_classes=512), mlp(512, 1024, 256))
        self.predictor = mlp(256, 1024, 256)

    def forward(self, x):
        return self.predictor(self.encoder(x))


class TwoViews(torch.utils.data.Dataset):
    def __init__(self, base, transform):
        self.base, self.transform = base, transform

    def __len__(self):
        return len(self.base)

    def __getitem__(self, i):
        image = self.base[i][0]
        return self.transform(image), self.transform(image)


def regression(p, z):
    return 2 - 2 * F.cosine_similarity(p, z.detach(), dim=1)


EPOCHS = 100
torch.manual_seed(11)
dev = device()
augment = T.Compose([T.RandomResizedCrop(32), T.RandomHorizontalFlip(), T.RandomGrayscale(0.2), T.ToTensor()])
base = torchvision.datasets.CIFAR10("data")
loader = AdaptiveDataLoader(TwoViews(base, augment), batch_size=256, shuffle=True, num_workers=4, seed_each="sample")
online = Online().to(dev)
target = copy.deepcopy(online.encoder).requires_grad_(False)
optimizer = torch.optim.Adam(online.parameters(), lr=3e-4)
model = AdaptiveDataParallel(online, optimizer)
register(target=target)
log = LogFile("byol.csv")
log.write("epoch,loss\n")


def momentum(step, total):
    return 1 - 0.004 * (math.cos(math.pi * step / total) + 1) / 2


for epoch in remaining_epochs_until(EPOCHS):
    model.train()
    log.write(f"# epoch {epoch}\n")
    total = Accumulator()
    for step, (a, b) in loader.enumerate():
        a, b = a.to(dev), b.to(dev)
        pa, pb = model(torch.cat([a, b])).chunk(2)
        with torch.no_grad():
            za, zb = target(torch.cat([a, b])).chunk(2)
        losses = regression(pa, zb) + regression(pb, za)
        loss = losses.mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        tau = momentum(epoch * len(loader) + step, EPOCHS * len(loader))
        with torch.no_grad():
            for t, o in zip(target.parameters(), online.encoder.parameters()):
                t.mul_(tau).add_(o, alpha=1 - tau)
        total["loss"] += losses.detach()[: loader.num_valid].sum()
    with total.synchronized():
        log.write(f"{epoch},{total['loss'] / loader.num_samples:.5f}\n")
