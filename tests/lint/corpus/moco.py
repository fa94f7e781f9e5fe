"""Momentum contrast with a queue of keys."""
import copy

import torch
import torch.nn as nn
import torch.nn.functional as F
import torchvision
from torchvision import transforms as T

from elasticrun import AdaptiveDataLoader, AdaptiveDataParallel, device, rank, remaining_epochs_until

K, DIM, M, TEMP = 4096, 128, 0.999, 0.2


class TwoCrops:
    def __init__(self, base):
        self.base = base

    def __call__(self, x):
        return self.base(x), self.base(x)


def encoder():
    net = torchvision.models.resnet18(num_classes=DIM)
    net.fc = nn.Sequential(nn.Linear(512, 512), nn.ReLU(), net.fc)
    return net


class Queue:
    def __init__(self, dev):
        self.keys = F.normalize(torch.randn(DIM, K, device=dev), dim=0)
        self.ptr = 0

    def push(self, k):
        n = len(k)
        index = (torch.arange(n, device=k.device) + self.ptr) % K
        self.keys[:, index] = k.T
        self.ptr = (self.ptr + n) % K  # ARGUABLE: part of the queue, which is marked where it is made


def main():
    torch.manual_seed(0)
    dev = device()
    augment = T.Compose([T.RandomResizedCrop(32), T.RandomHorizontalFlip(), T.ColorJitter(0.4, 0.4, 0.4, 0.1), T.ToTensor()])
    data = torchvision.datasets.CIFAR10("data", transform=TwoCrops(augment))
    loader = AdaptiveDataLoader(data, batch_size=256, shuffle=True, drop_last=True, num_workers=4, seed_each="sample")
    query = encoder().to(dev)
    key = copy.deepcopy(query).requires_grad_(False)  # MISTAKE: unreg: the momentum encoder is not registered, after a restart it is a copy of fresh weights (or line with: pk.lerp_)
    queue = Queue(dev)  # MISTAKE: unreg: the queue is random again after a restart, and each replica has one of its own (or line with: self.keys)
    optimizer = torch.optim.SGD(query.parameters(), lr=0.03, momentum=0.9, weight_decay=1e-4)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 200)
    model = AdaptiveDataParallel(query, optimizer, scheduler)
    for epoch in remaining_epochs_until(200):
        for (im_q, im_k), _ in loader:
            q = F.normalize(model(im_q.to(dev)), dim=1)
            with torch.no_grad():
                for pq, pk in zip(query.parameters(), key.parameters()):
                    pk.lerp_(pq, 1 - M)
                k = F.normalize(key(im_k.to(dev)), dim=1)
            pos = (q * k).sum(1, keepdim=True)
            neg = q @ queue.keys.clone()
            logits = torch.cat([pos, neg], 1) / TEMP
            loss = F.cross_entropy(logits, torch.zeros(len(q), dtype=torch.long, device=dev))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            queue.push(k)
        scheduler.step()
        if rank() == 0:
            torch.save(query.state_dict(), "moco.pt")
            print("epoch", epoch, "lr", scheduler.get_last_lr()[0])


if __name__ == "__main__":
    main()
