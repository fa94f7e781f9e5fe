"""Iterations instead of epochs, with an endless iterator."""
import argparse
import itertools

import torch
import torch.nn as nn
import torch.nn.functional as F
import torchvision
from torchvision.transforms import ToTensor

from elasticrun import AdaptiveDataLoader, AdaptiveDataParallel, device, rank, request_checkpoint


def infinite(loader):
    while True:
        for batch in loader:
            yield batch


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--iters", type=int, default=20000)
    p.add_argument("--save-every", type=int, default=1000)
    args = p.parse_args()
    torch.manual_seed(0)
    dev = device()
    train = AdaptiveDataLoader(torchvision.datasets.SVHN("data", transform=ToTensor()), batch_size=128, shuffle=True)
    extra = AdaptiveDataLoader(torchvision.datasets.SVHN("data", split="extra", transform=ToTensor()), batch_size=128, shuffle=True)
    net = nn.Sequential(nn.Flatten(), nn.Linear(3072, 512), nn.ReLU(), nn.Linear(512, 10)).to(dev)
    optimizer = torch.optim.Adam(net.parameters())
    model = AdaptiveDataParallel(net, optimizer)
    batches = infinite(train)
    more = itertools.cycle(extra)  # MISTAKE: loop: cycle over an elastic loader has no boundaries and keeps all batches; extra.batches (or line with: next(more))
    it = 0
    while it < args.iters:
        x, y = next(batches)  # MISTAKE: loop: batches by next from an endless generator cannot be continued; train.batches(iters) (or line with: batches = infinite(train)) (or line with: for batch in loader) (or line with: while it < args.iters)
        x2, y2 = next(more)
        x, y = torch.cat([x, x2]).to(dev), torch.cat([y, y2]).to(dev)
        loss = F.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        it += 1  # MISTAKE: lost: the count of iterations begins at 0 with each start (or line with: it = 0)
        if it % args.save_every == 0:
            request_checkpoint()
            if rank() == 0:
                print(f"iteration {it}, loss {loss.item():.4f}")


if __name__ == "__main__":
    main()
