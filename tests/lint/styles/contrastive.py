"""Contrastive learning: a momentum encoder in the loop, a queue in a buffer."""

import copy
import time

import torch
import torch.nn.functional as F
from torch import nn

import elasticrun
from elasticrun import AdaptiveDataLoader, AdaptiveDataParallel


class Contrastive(nn.Module):
    def __init__(self, encoder, dim=128, size=4096, momentum=0.999):
        super().__init__()
        self.query = encoder
        self.key = copy.deepcopy(encoder)
        self.momentum = momentum
        self.register_buffer("queue", F.normalize(torch.randn(dim, size), dim=0))
        for parameter in self.key.parameters():
            parameter.requires_grad = False

    @torch.no_grad()
    def update_key(self):
        for q, k in zip(self.query.parameters(), self.key.parameters(), strict=True):
            k.data.mul_(self.momentum).add_(q.data, alpha=1 - self.momentum)

    def forward(self, x, y):
        q = F.normalize(self.query(x), dim=1)
        with torch.no_grad():
            k = F.normalize(self.key(y), dim=1)
        return torch.cat([(q * k).sum(1, keepdim=True), q @ self.queue], dim=1)


def main(dataset, epochs=100):
    torch.manual_seed(0)
    net = Contrastive(nn.Linear(32, 128))
    optimizer = torch.optim.SGD(net.query.parameters(), lr=0.03)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, epochs)
    model = AdaptiveDataParallel(net, optimizer, scheduler)
    loader = AdaptiveDataLoader(dataset, batch_size=256, shuffle=True, drop_last=True)
    began = time.monotonic()
    for epoch in elasticrun.remaining_epochs_until(epochs):
        for x, y in loader:
            net.update_key()
            logits = model(x, y)
            loss = F.cross_entropy(logits, torch.zeros(len(x), dtype=torch.long))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if loader.batch_index % 50 == 0:
                print(epoch, loader.batch_index, loss.item())
        scheduler.step()
        print(f"epoch {epoch} after {time.monotonic() - began:.0f} s")
        if epoch % 10 == 9 and elasticrun.rank() == 0:
            torch.save(net.query.state_dict(), f"encoder-{epoch}.pt")
