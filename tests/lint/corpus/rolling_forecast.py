"""Forecasts demand by walk-forward validation: a new model for each window of years."""
import argparse
import csv
from typing import Iterator, List, NamedTuple, Tuple

import numpy as np
import pandas as pd
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import Dataset

from elasticrun import Accumulator, AdaptiveDataLoader, AdaptiveDataParallel, LogFile, device, rank, remaining_epochs_until


class Window(NamedTuple):
    begin: int
    middle: int
    end: int


class Sequences(Dataset):
    def __init__(self, values: np.ndarray, past: int, ahead: int):
        self.values = torch.from_numpy(values.astype(np.float32))
        self.past, self.ahead = past, ahead

    def __len__(self) -> int:
        return len(self.values) - self.past - self.ahead + 1

    def __getitem__(self, i: int) -> Tuple[torch.Tensor, torch.Tensor]:
        x = self.values[i : i + self.past]
        return x, self.values[i + self.past : i + self.past + self.ahead, 0]


class Forecaster(nn.Module):
    def __init__(self, inputs: int, hidden: int, ahead: int):
        super().__init__()
        self.rnn = nn.GRU(inputs, hidden, num_layers=2, batch_first=True, dropout=0.1)
        self.head = nn.Linear(hidden, ahead)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        _, last = self.rnn(x)
        return self.head(last[-1])


class StandardScaler:
    def fit(self, values: np.ndarray) -> "StandardScaler":
        self.mean, self.std = values.mean(0), values.std(0) + 1e-8
        return self

    def transform(self, values: np.ndarray) -> np.ndarray:
        return (values - self.mean) / self.std


def rolling_windows(length: int, train: int, test: int) -> Iterator[Window]:
    begin = 0
    while begin + train + test <= length:
        yield Window(begin, begin + train, begin + train + test)
        begin += test


def fit_and_score(k: int, window: Window, values: np.ndarray, args: argparse.Namespace, dev: torch.device) -> float:
    scaler = StandardScaler().fit(values[window.begin : window.middle])
    past = scaler.transform(values[window.begin : window.middle])
    future = scaler.transform(values[window.middle - args.past : window.end])
    train = AdaptiveDataLoader(Sequences(past, args.past, args.ahead), batch_size=args.batch_size, shuffle=True, seed=k, name=f"train{k}")
    test = AdaptiveDataLoader(Sequences(future, args.past, args.ahead), batch_size=512, name=f"test{k}")
    torch.manual_seed(k)
    net = Forecaster(values.shape[1], 64, args.ahead).to(dev)
    optimizer = torch.optim.Adam(net.parameters(), lr=args.lr)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.95)
    model = AdaptiveDataParallel(net, optimizer, scheduler, name=f"window{k}")
    for _ in remaining_epochs_until((k + 1) * args.epochs):
        model.train()
        for x, y in train:
            loss = F.smooth_l1_loss(model(x.to(dev)), y.to(dev))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        scheduler.step()
    net.eval()
    errors = Accumulator(name=f"errors{k}")
    with torch.no_grad():
        for x, y in test:
            difference = (net(x.to(dev)).cpu() - y).abs().mean(1)[: test.num_valid]
            errors["mae"] += difference.sum()
            errors["n"] += test.num_valid
    with errors.synchronized():
        return float(scaler.std[0]) * errors["mae"] / errors["n"]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--data", default="demand.csv")
    parser.add_argument("--past", type=int, default=168)
    parser.add_argument("--ahead", type=int, default=24)
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--batch-size", type=int, default=256)
    parser.add_argument("--lr", type=float, default=1e-3)
    args = parser.parse_args()
    dev = device()
    frame = pd.read_csv(args.data, parse_dates=["time"]).sort_values("time")
    frame["hour"] = np.sin(2 * np.pi * frame["time"].dt.hour / 24)
    values = frame[["demand", "temperature", "hour"]].to_numpy()
    rows = csv.writer(LogFile("walk_forward.csv"))
    rows.writerow(["window", "begin", "end", "mae"])
    scores: List[float] = []
    for k, window in enumerate(rolling_windows(len(values), 2 * 8760, 2190)):
        mae = fit_and_score(k, window, values, args, dev)
        scores.append(mae)
        rows.writerow([k, window.middle, window.end, f"{mae:.3f}"])
        if rank() == 0:
            print(f"window {k}: mae {mae:.3f}")  # ARGUABLE: printed again by a restart in a later window
    if rank() == 0:
        print(f"mean {np.mean(scores):.3f} +- {np.std(scores):.3f}")


if __name__ == "__main__":
    main()
