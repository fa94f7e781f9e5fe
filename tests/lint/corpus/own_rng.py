"""Masked reconstruction with generators of one's own."""
import argparse
import random

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import TensorDataset

from elasticrun import Accumulator, AdaptiveDataLoader, AdaptiveDataParallel, Variables, device, rank, remaining_epochs_until


class Masked(nn.Module):
    def __init__(self, dim=64, hidden=128):
        super().__init__()
        self.token = nn.Parameter(torch.zeros(dim))
        self.net = nn.Sequential(nn.Linear(dim, hidden), nn.GELU(), nn.Linear(hidden, dim))

    def forward(self, x, mask):
        return self.net(torch.where(mask, self.token, x))


def make_data(n, seed):
    rng = np.random.default_rng(seed)
    base = rng.standard_normal((n, 8)) @ rng.standard_normal((8, 64))
    return torch.tensor(base, dtype=torch.float32)


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--ratio", type=float, default=0.5)
    p.add_argument("--epochs", type=int, default=20)
    args = p.parse_args()
    torch.manual_seed(0)
    dev = device()
    train = AdaptiveDataLoader(TensorDataset(make_data(8000, 1)), batch_size=128, shuffle=True)
    valid = AdaptiveDataLoader(TensorDataset(make_data(1000, 2)), batch_size=250)
    net = Masked().to(dev)
    optimizer = torch.optim.Adam(net.parameters(), 1e-3)
    model = AdaptiveDataParallel(net, optimizer)
    masks = torch.Generator().manual_seed(5)
    pick = random.Random(9)
    noise = np.random.RandomState(11)
    best = Variables(error=1e9)
    for epoch in remaining_epochs_until(args.epochs):
        ratio = pick.uniform(0.3, 0.7)  # MISTAKE: rng: drawn once an epoch from a generator that a restart puts back to its beginning (or line with: pick = random.Random(9))
        check = torch.Generator().manual_seed(epoch)
        model.train()
        for (x,) in train:
            mask = torch.rand(x.shape, generator=masks) < ratio  # MISTAKE: rng: the generator of masks begins anew after a restart (or line with: masks = torch.Generator)
            loss = F.mse_loss(model(x.to(dev), mask.to(dev)), x.to(dev))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        model.eval()
        total = Accumulator()
        with torch.no_grad():
            for (x,) in valid:
                mask = torch.rand(x.shape, generator=check) < args.ratio  # MISTAKE: rng: the epoch's generator is made again in front of the loop, but where the loop continues it is at its beginning (or line with: check = torch.Generator)
                error = (model(x.to(dev), mask.to(dev)).cpu() - x).square().mean(1)
                total["error"] += error[: valid.num_valid].sum()
        with total.synchronized():
            error = total["error"] / valid.num_samples
        best.error = min(best.error, error)
        with torch.no_grad():
            for p_ in net.net[0].parameters():
                p_.add_(torch.tensor(noise.normal(0, 1e-4, tuple(p_.shape)), dtype=p_.dtype, device=dev))  # MISTAKE: rng: weights get noise from a generator that repeats itself after a restart (or line with: noise = np.random.RandomState)
        if rank() == 0:
            print(f"{epoch}: ratio {ratio:.2f} error {error:.4f} best {best.error:.4f}")


main()
