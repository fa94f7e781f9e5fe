"""Rows in a LogFile, ported; an auxiliary file is replaced as a whole."""
import csv
import json
import os

import torch
import torch.nn as nn
import torch.nn.functional as F
from sklearn.datasets import fetch_california_housing
from torch.utils.data import TensorDataset

from elasticrun import (
    Accumulator,
    AdaptiveDataLoader,
    AdaptiveDataParallel,
    LogFile,
    Variables,
    once,
    rank,
    remaining_epochs_until,
)


def replace_json(path, value):
    with open(path + ".new", "w") as f:
        json.dump(value, f)
    os.replace(path + ".new", path)


def data():
    raw = fetch_california_housing()
    x = torch.tensor(raw.data, dtype=torch.float32)
    x = (x - x.mean(0)) / x.std(0)
    y = torch.tensor(raw.target, dtype=torch.float32)
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(99))
    return TensorDataset(x[order[:16000]], y[order[:16000]]), TensorDataset(x[order[16000:]], y[order[16000:]])


def main():
    torch.manual_seed(2)
    train_set, valid_set = data()
    train = AdaptiveDataLoader(train_set, batch_size=64, shuffle=True)
    valid = AdaptiveDataLoader(valid_set, batch_size=512, even_batches=False)
    net = nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 1), nn.Flatten(0))
    optimizer = torch.optim.Adam(net.parameters(), 1e-3)
    model = AdaptiveDataParallel(net, optimizer)
    rows = csv.writer(LogFile("housing.csv"))
    rows.writerow(["epoch", "batch", "loss", "valid"])
    best = Variables(loss=1e9, epoch=-1)
    for epoch in remaining_epochs_until(30):
        rows.writerow([epoch, "", "begins", ""])
        if once("note") and rank() == 0:
            with open("notes.txt", "a") as f:
                f.write(f"epoch {epoch}\n")
        for batch, (x, y) in train.enumerate():
            loss = F.mse_loss(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if batch % 50 == 0:
                rows.writerow([epoch, batch, f"{loss.item():.5f}", ""])
        total = Accumulator()
        with torch.no_grad():
            for x, y in valid:
                total["se"] += (net(x) - y).square().sum()
        with total.synchronized():
            mse = total["se"] / valid.num_samples
        rows.writerow([epoch, "", "", f"{mse:.5f}"])
        if mse < best.loss:
            best.loss, best.epoch = mse, epoch
        if rank() == 0:
            replace_json("status.json", {"epoch": epoch, "best": best.loss, "best_epoch": best.epoch})


if __name__ == "__main__":
    main()
