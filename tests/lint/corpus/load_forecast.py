"""Stateful LSTM for hourly electricity load, forecasts plotted after each epoch."""
import csv
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import Dataset

from elasticrun import Accumulator, AdaptiveDataLoader, AdaptiveDataParallel, Variables, device, rank, remaining_epochs_until

EPOCHS = 60
WINDOW, HORIZON = 168, 24
BATCH = 48
OUT = Path("forecast")


class Windows(Dataset):
    """Row i of a batch continues row i of the batch before, so that the state can be carried."""

    def __init__(self, series, rows):
        self.series, self.rows = torch.as_tensor(series, dtype=torch.float32), rows
        self.per_row = (len(series) // rows - HORIZON) // WINDOW
        self.stride = len(series) // rows

    def __len__(self):
        return self.per_row * self.rows

    def __getitem__(self, i):
        step, row = divmod(i, self.rows)
        begin = row * self.stride + step * WINDOW
        x = self.series[begin : begin + WINDOW]
        y = self.series[begin + HORIZON : begin + HORIZON + WINDOW]
        return x[:, None], y[:, None]


class Forecaster(nn.Module):
    def __init__(self, hidden=128, layers=2):
        super().__init__()
        self.lstm = nn.LSTM(1, hidden, layers, batch_first=True)
        self.out = nn.Linear(hidden, 1)

    def forward(self, x, hidden=None):
        h, hidden = self.lstm(x, hidden)
        return self.out(h), hidden


def load(path="load.csv"):
    with open(path) as f:
        values = np.array([float(row["MW"]) for row in csv.DictReader(f)])
    cut = int(0.85 * len(values))
    mean, std = values[:cut].mean(), values[:cut].std()
    values = (values - mean) / std
    return values[:cut], values[cut:], std


def plot(net, dataset, path):
    x, y = dataset[0]
    with torch.no_grad():
        guess, _ = net(x[None].to(device()))
    fig, ax = plt.subplots(figsize=(10, 3))
    ax.plot(y[:, 0], label="load")
    ax.plot(guess[0, :, 0].cpu(), label="forecast")
    ax.legend()
    fig.savefig(path)
    plt.close(fig)


fit, held, std = load()
train = AdaptiveDataLoader(Windows(fit, BATCH), batch_size=BATCH, drop_last=True, device=device())
valid_set = Windows(held, 8)
valid = AdaptiveDataLoader(valid_set, batch_size=64, even_batches=False, device=device())
net = Forecaster().to(device())
optimizer = torch.optim.Adam(net.parameters(), lr=1e-3)
plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=3)  # MISTAKE: unreg: the scheduler's counts are in no checkpoint (or line with: model = AdaptiveDataParallel(net, optimizer)) (or line with: plateau.step(rmse))
model = AdaptiveDataParallel(net, optimizer)
state = Variables(best=float("inf"), waited=0)
OUT.mkdir(exist_ok=True)

for epoch in remaining_epochs_until(EPOCHS):
    model.train()
    hidden = None
    for x, y in train:
        guess, hidden = model(x, hidden)  # MISTAKE: lost: the carried state is None again where the loop goes on (or line with: hidden = None) (or line with: hidden = tuple(h.detach())
        hidden = tuple(h.detach() for h in hidden)
        loss = F.mse_loss(guess, y)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

    model.eval()
    total = Accumulator()
    with torch.no_grad():
        for x, y in valid:
            guess, _ = model(x)
            total["squared"] += F.mse_loss(guess, y, reduction="sum")
            total["count"] += y.numel()
    with total.synchronized():
        rmse = float(std * (total["squared"] / total["count"]) ** 0.5)
    plateau.step(rmse)
    if rank() == 0:
        plot(net, valid_set, OUT / f"epoch_{epoch:03d}.png")
        with open(OUT / "metrics.csv", "a") as f:  # MISTAKE: effect: rows written after the checkpoint come twice (or line with: csv.writer(f).writerow)
            csv.writer(f).writerow([epoch, optimizer.param_groups[0]["lr"], rmse])
        print(f"epoch {epoch}: rmse {rmse:.1f} MW")
    state.waited = 0 if rmse < state.best else state.waited + 1
    state.best = min(state.best, rmse)
    if state.waited > 10:
        break
if rank() == 0:
    torch.save(net.state_dict(), OUT / "final.pt")
