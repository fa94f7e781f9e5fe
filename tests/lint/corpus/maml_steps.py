"""First-order MAML on sine waves; each task follows from the number of the step. Ported."""
import copy
import math

import torch
import torch.nn as nn
import torch.nn.functional as F

from elasticrun import AdaptiveDataParallel, LogFile, device, rank, remaining_steps_until

META_STEPS = 10000
INNER_LR = 0.01


def task(step, number, dev):
    gen = torch.Generator().manual_seed(step * 1000 + number)
    amplitude = 0.1 + 4.9 * torch.rand(1, generator=gen)
    phase = math.pi * torch.rand(1, generator=gen)
    x = 10 * torch.rand(20, 1, generator=gen) - 5
    y = amplitude * torch.sin(x + phase)
    return x.to(dev), y.to(dev)


def build():
    return nn.Sequential(nn.Linear(1, 40), nn.ReLU(), nn.Linear(40, 40), nn.ReLU(), nn.Linear(40, 1))


def adapt(net, x, y, inner_steps=5):
    fast = copy.deepcopy(net)
    inner = torch.optim.SGD(fast.parameters(), lr=INNER_LR)
    for _ in range(inner_steps):
        loss = F.mse_loss(fast(x), y)
        inner.zero_grad()
        loss.backward()
        inner.step()
    return fast


def main():
    torch.manual_seed(0)
    dev = device()
    net = build().to(dev)
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-3)
    model = AdaptiveDataParallel(net, optimizer)
    log = LogFile("maml.txt")
    for step in remaining_steps_until(META_STEPS):
        offsets = []
        total = 0.0
        for number in range(4):
            x, y = task(step, number, dev)
            fast = adapt(net, x[:10], y[:10])
            # The fast weights' gain as a constant offset: first order.
            offsets.append([(f - p).detach() for f, p in zip(fast.parameters(), net.parameters())])
            total += F.mse_loss(fast(x[10:]), y[10:]).item()
        x, y = task(step, 99, dev)
        loss = F.mse_loss(model(x), y)
        for parts in zip(net.parameters(), *offsets):
            loss = loss - 0.01 * (parts[0] * torch.stack(parts[1:]).mean(0)).sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 100 == 0:
            log.write(f"{step} {total / 4:.5f}\n")
        if step % 1000 == 999 and rank() == 0:
            torch.save(net.state_dict(), f"maml_{step + 1}.pt")


if __name__ == "__main__":
    main()
