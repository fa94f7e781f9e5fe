"""Prototypical networks: few-shot episodes drawn by a sampler."""
import argparse

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
from torchvision import datasets, transforms

from elasticrun import AdaptiveDataParallel, Variables, device, rank, remaining_steps_until


class EpisodeSampler:
    def __init__(self, targets, ways, shots, queries, seed):
        targets = np.asarray(targets)
        self.by_class = [np.flatnonzero(targets == c) for c in np.unique(targets)]
        self.ways, self.per_class = ways, shots + queries
        self.rng = np.random.RandomState(seed)
        self.drawn = 0

    def draw(self):
        self.drawn += 1  # ARGUABLE: only said in a print
        classes = self.rng.choice(len(self.by_class), self.ways, replace=False)  # MISTAKE: rng: a generator of its own repeats the first episodes after a restart (or line with: self.rng = np.random.RandomState) (or line with: picked = sampler.draw())
        return np.stack([self.rng.choice(self.by_class[c], self.per_class, replace=False) for c in classes])  # ARGUABLE: the same generator


def conv(i, o):
    return nn.Sequential(nn.Conv2d(i, o, 3, padding=1), nn.GroupNorm(8, o), nn.ReLU(), nn.MaxPool2d(2))


def episode(net, images, ways, shots):
    z = net(images.flatten(0, 1)).view(ways, images.size(1), -1)
    prototypes, queries = z[:, :shots].mean(1), z[:, shots:]
    logits = -torch.cdist(queries.flatten(0, 1), prototypes).pow(2)
    target = torch.arange(ways, device=images.device).repeat_interleave(queries.size(1))
    return F.cross_entropy(logits, target), (logits.argmax(1) == target).float().mean()


def fetch(data, index):
    return torch.stack([torch.stack([data[i][0] for i in row]) for row in index])


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--ways", type=int, default=20)
    p.add_argument("--shots", type=int, default=5)
    p.add_argument("--steps", type=int, default=20000)
    args = p.parse_args()
    torch.manual_seed(0)
    dev = device()
    t = transforms.Compose([transforms.Resize(28), transforms.ToTensor()])
    data = datasets.Omniglot("data", background=True, transform=t)
    heldout = datasets.Omniglot("data", background=False, transform=t)
    sampler = EpisodeSampler([c for _, c in data._flat_character_images], args.ways, args.shots, 5, seed=0)
    val_targets = [c for _, c in heldout._flat_character_images]
    net = nn.Sequential(conv(1, 64), conv(64, 64), conv(64, 64), nn.Flatten()).to(dev)
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2000, 0.5)
    model = AdaptiveDataParallel(net, optimizer, scheduler)
    record = Variables(best=0.0)
    running = None
    for step in remaining_steps_until(args.steps):
        model.train()
        picked = sampler.draw()
        loss, acc = episode(model, fetch(data, picked).to(dev), args.ways, args.shots)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scheduler.step()
        running = acc.item() if running is None else 0.99 * running + 0.01 * acc.item()  # MISTAKE: lost: the running mean, by which the learning rate is cut below, begins anew (or line with: if running > 0.99)
        if running > 0.99:
            for group in optimizer.param_groups:
                group["lr"] = 1e-5
        if step % 500 == 499:
            model.eval()
            check = EpisodeSampler(val_targets, args.ways, args.shots, 5, seed=1)
            with torch.no_grad():
                accs = [episode(net, fetch(heldout, check.draw()).to(dev), args.ways, args.shots)[1].item() for _ in range(20)]
            record.best = max(record.best, float(np.mean(accs)))
            if rank() == 0:
                print(f"{step}: {sampler.drawn} drawn, running {running:.3f}, best {record.best:.3f}")


if __name__ == "__main__":
    main()
