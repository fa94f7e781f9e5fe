"""Metrics go to a data base."""
import argparse
import sqlite3

import torch
import torch.nn as nn
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch.utils.data import TensorDataset

from elasticrun import Accumulator, AdaptiveDataLoader, AdaptiveDataParallel, device, once, rank, remaining_epochs_until


class Database:
    def __init__(self, path):
        self.connection = sqlite3.connect(path)
        self.connection.execute("CREATE TABLE IF NOT EXISTS metrics (epoch INTEGER, name TEXT, value REAL)")
        self.connection.execute("CREATE TABLE IF NOT EXISTS runs (name TEXT PRIMARY KEY, lr REAL)")

    def insert(self, epoch, name, value):
        self.connection.execute("INSERT INTO metrics VALUES (?, ?, ?)", (epoch, name, value))
        self.connection.commit()


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--lr", type=float, default=1e-3)
    args = p.parse_args()
    torch.manual_seed(0)
    dev = device()
    digits = load_digits()
    x = torch.tensor(digits.data, dtype=torch.float32) / 16
    y = torch.tensor(digits.target)
    train = AdaptiveDataLoader(TensorDataset(x[:1400], y[:1400]), batch_size=32, shuffle=True)
    test = AdaptiveDataLoader(TensorDataset(x[1400:], y[1400:]), batch_size=100)
    net = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10)).to(dev)
    optimizer = torch.optim.Adam(net.parameters(), args.lr)
    model = AdaptiveDataParallel(net, optimizer)
    db = Database("runs.db") if rank() == 0 else None
    if once("run") and db:
        db.connection.execute("INSERT INTO runs VALUES (?, ?)", ("digits", args.lr))
        db.connection.commit()
    for epoch in remaining_epochs_until(20):
        total = Accumulator()
        for a, b in train:
            loss = F.cross_entropy(model(a.to(dev)), b.to(dev))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            total["loss"] += loss.item() * train.num_valid
        with total.synchronized():
            mean = total["loss"] / train.num_samples
        if db:
            db.insert(epoch, "loss", mean)  # MISTAKE: effect: in front of the test loop, so a restart there inserts a second row (or line with: self.connection.execute("INSERT INTO metrics)
        with torch.no_grad():
            for a, b in test:
                total["hits"] += (net(a.to(dev)).argmax(1) == b.to(dev))[: test.num_valid].sum()
        with total.synchronized():
            accuracy = total["hits"] / test.num_samples
        if db:
            db.insert(epoch, "accuracy", accuracy)


main()
