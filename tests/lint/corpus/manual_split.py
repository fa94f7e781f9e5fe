"""From a torchrun script: the distributed parts were kept."""
import math

import torch
import torch.nn as nn
import torch.nn.functional as F
import torchvision
from torch.utils.data import Subset
from torch.utils.data.distributed import DistributedSampler
from torchvision.transforms import ToTensor

from elasticrun import Accumulator, AdaptiveDataLoader, AdaptiveDataParallel, device, rank, remaining_epochs_until, world_size


def build():
    return nn.Sequential(nn.Flatten(), nn.Linear(784, 256), nn.ReLU(), nn.Linear(256, 10))


def main():
    torch.manual_seed(0)
    dev = device()
    train_set = torchvision.datasets.MNIST("data", transform=ToTensor())
    test_set = torchvision.datasets.MNIST("data", train=False, transform=ToTensor())
    sampler = DistributedSampler(train_set, num_replicas=world_size(), rank=rank())  # MISTAKE: world: the loader cuts the batches itself; a sampler for one rank is another on each replica and shares twice (or line with: sampler=sampler)
    train = AdaptiveDataLoader(train_set, batch_size=128, sampler=sampler)
    mine = Subset(test_set, range(rank(), len(test_set), world_size()))  # MISTAKE: world: the data set is cut by hand, but it must be whole and the same on all replicas (or line with: test = AdaptiveDataLoader)
    test = AdaptiveDataLoader(mine, batch_size=500, even_batches=False)
    net = build().to(dev)
    optimizer = torch.optim.SGD(net.parameters(), 0.1, momentum=0.9)
    steps = 10 * math.ceil(len(train_set) / 128)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    model = AdaptiveDataParallel(net, optimizer, scheduler)
    for epoch in remaining_epochs_until(10):
        model.train()
        for x, y in train:
            loss = F.cross_entropy(model(x.to(dev)), y.to(dev)) / world_size()  # MISTAKE: world: the gradient is weighed already, so it shrinks with the number of replicas
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            scheduler.step()
        net.eval()
        total = Accumulator()
        with torch.no_grad():
            for x, y in test:
                total["hits"] += (net(x.to(dev)).argmax(1) == y.to(dev)).sum()
                total["n"] += len(y)
        with total.synchronized():
            if rank() == 0:
                print(f"epoch {epoch}: {total['hits'] / total['n']:.4f}")
    if rank() == 0:
        torch.save(net.state_dict(), "mnist.pt")


main()
