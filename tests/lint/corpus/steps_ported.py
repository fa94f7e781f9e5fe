"""A fixed number of batches with an evaluation within the loop's body; ported."""
import argparse

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
import torchvision
from torch.utils.data import DataLoader
from torchvision.transforms import ToTensor

from elasticrun import AdaptiveDataLoader, AdaptiveDataParallel, LogFile, Variables, device, rank, world_size


@torch.no_grad()
def evaluate(net, loader, dev):
    """A plain loader: no boundary within, the same on each replica."""
    was_training = net.training
    net.eval()
    hits = 0
    for x, y in loader:
        hits += (net(x.to(dev)).argmax(1) == y.to(dev)).sum().item()
    net.train(was_training)
    return hits / len(loader.dataset)


def mean_over_replicas(value, dev):
    t = torch.tensor([value], device=dev)
    if world_size() > 1:
        dist.all_reduce(t)
    return t.item() / world_size()


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--iters", type=int, default=20000)
    p.add_argument("--lr", type=float, default=1e-3)
    args = p.parse_args()
    torch.manual_seed(0)
    dev = device()
    train = AdaptiveDataLoader(torchvision.datasets.SVHN("data", transform=ToTensor()), batch_size=256, shuffle=True)
    test = DataLoader(torchvision.datasets.SVHN("data", split="test", transform=ToTensor()), batch_size=1000)
    net = nn.Sequential(nn.Flatten(), nn.Linear(3072, 512), nn.ReLU(), nn.Linear(512, 10)).to(dev)
    optimizer = torch.optim.Adam(net.parameters(), lr=args.lr)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, args.iters)
    model = AdaptiveDataParallel(net, optimizer, scheduler)
    log = LogFile("steps.tsv")
    state = Variables(best=0.0, smooth=0.0, done=False)
    for x, y in train.batches(args.iters):
        i = train.batch_index
        if state.done:
            break
        loss = F.cross_entropy(model(x.to(dev)), y.to(dev))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scheduler.step()
        state.smooth = 0.99 * state.smooth + 0.01 * mean_over_replicas(loss.item(), dev)
        if i % 1000 == 999:
            accuracy = evaluate(net, test, dev)
            state.best = max(state.best, accuracy)
            log.write(f"{i}\t{state.smooth:.4f}\t{accuracy:.4f}\n")
            if rank() == 0:
                print(f"{i + 1}: {accuracy:.4f} (best {state.best:.4f})")
            state.done = accuracy < state.best - 0.05


if __name__ == "__main__":
    main()
