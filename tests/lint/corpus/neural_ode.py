"""Learns the dynamics of a spiral with a neural ODE, by steps."""
import argparse
import os
import time

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import torch
import torch.nn as nn

from elasticrun import AdaptiveDataParallel, Variables, device, rank, remaining_steps_until

parser = argparse.ArgumentParser("ODE demo")
parser.add_argument("--data-size", type=int, default=1000)
parser.add_argument("--batch-time", type=int, default=10)
parser.add_argument("--batch-size", type=int, default=20)
parser.add_argument("--niters", type=int, default=2000)
parser.add_argument("--test-freq", type=int, default=20)
parser.add_argument("--viz", action="store_true")
args = parser.parse_args()


class Lambda(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("a", torch.tensor([[-0.1, 2.0], [-2.0, -0.1]]))

    def forward(self, t, y):
        return y**3 @ self.a


class ODEFunc(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(2, 50), nn.Tanh(), nn.Linear(50, 2))
        self.nfe = 0
        for m in self.net.modules():
            if isinstance(m, nn.Linear):
                nn.init.normal_(m.weight, mean=0, std=0.1)
                nn.init.constant_(m.bias, val=0)

    def forward(self, t, y):
        self.nfe += 1  # ARGUABLE: printed only
        return self.net(y**3)


def odeint(func, y0, t):
    """Runge-Kutta of fourth order on the given times."""
    values = [y0]
    for t0, t1 in zip(t[:-1], t[1:]):
        y, h = values[-1], t1 - t0
        k1 = func(t0, y)
        k2 = func(t0 + h / 2, y + h * k1 / 2)
        k3 = func(t0 + h / 2, y + h * k2 / 2)
        k4 = func(t1, y + h * k3)
        values.append(y + h * (k1 + 2 * k2 + 2 * k3 + k4) / 6)
    return torch.stack(values)


class Solver(nn.Module):
    def __init__(self, func):
        super().__init__()
        self.func = func

    def forward(self, y0, t):
        return odeint(self.func, y0, t)


class RunningAverageMeter:
    """Computes and stores the average and current value."""

    def __init__(self, momentum=0.99):
        self.momentum = momentum
        self.val, self.avg = None, 0.0

    def update(self, val):
        self.avg = val if self.val is None else self.avg * self.momentum + val * (1 - self.momentum)  # ARGUABLE: printed only
        self.val = val  # ARGUABLE: printed only


def get_batch(true_y, t):
    s = torch.randperm(args.data_size - args.batch_time)[: args.batch_size]
    batch_y = torch.stack([true_y[s + i] for i in range(args.batch_time)])
    return true_y[s], t[: args.batch_time], batch_y


def visualize(true_y, pred_y, step):
    fig, ax = plt.subplots(figsize=(4, 4))
    ax.plot(*true_y[:, 0].cpu().T, "g-")
    ax.plot(*pred_y[:, 0].cpu().T, "b--")
    fig.savefig(f"png/{step:04d}")
    plt.close(fig)


def main():
    torch.manual_seed(rank())  # each replica draws starts of its own
    dev = device()
    os.makedirs("png", exist_ok=True)
    true_y0 = torch.tensor([[2.0, 0.0]])
    t = torch.linspace(0.0, 25.0, args.data_size)
    with torch.no_grad():
        true_y = odeint(Lambda(), true_y0, t)
    net = Solver(ODEFunc()).to(dev)
    optimizer = torch.optim.RMSprop(net.parameters(), lr=1e-3)
    model = AdaptiveDataParallel(net, optimizer)
    found = Variables(best=float("inf"), step=-1)
    meter, end = RunningAverageMeter(0.97), time.time()
    for step in remaining_steps_until(args.niters):
        y0, batch_t, batch_y = get_batch(true_y, t)
        optimizer.zero_grad()
        loss = (model(y0.to(dev), batch_t.to(dev)) - batch_y.to(dev)).abs().mean()
        loss.backward()
        optimizer.step()
        meter.update(loss.item())
        if (step + 1) % args.test_freq == 0:
            with torch.no_grad():
                pred_y = net(true_y0.to(dev), t.to(dev))
                error = (pred_y.cpu() - true_y).abs().mean().item()
            if error < found.best:
                found.best, found.step = error, step  # ARGUABLE: each replica computes it from the same weights
                if rank() == 0:
                    torch.save(net.state_dict(), "png/best.pt")
            if rank() == 0:
                print(f"Iter {step + 1:04d} | loss {meter.avg:.6f} | total {error:.6f} | nfe {net.func.nfe} | {time.time() - end:.1f} s")  # ARGUABLE: printed only
                if args.viz:
                    visualize(true_y, pred_y, step + 1)
            end = time.time()


if __name__ == "__main__":
    main()
