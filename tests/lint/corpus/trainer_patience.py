"""A trainer class with patience, best score and a history."""
import json
from dataclasses import dataclass, field

import torch
import torch.nn as nn
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch.utils.data import TensorDataset

from elasticrun import Accumulator, AdaptiveDataLoader, AdaptiveDataParallel, device, rank, remaining_epochs_until


@dataclass
class TrainState:
    best_score: float = float("-inf")
    bad_epochs: int = 0
    history: list = field(default_factory=list)


class Trainer:
    def __init__(self, net, train_set, valid_set, epochs=50, patience=5, lr=1e-3):
        self.device = device()
        self.net = net.to(self.device)
        self.optimizer = torch.optim.Adam(self.net.parameters(), lr=lr)
        self.model = AdaptiveDataParallel(self.net, self.optimizer)
        self.train_loader = AdaptiveDataLoader(train_set, batch_size=32, shuffle=True)
        self.valid_loader = AdaptiveDataLoader(valid_set, batch_size=64)
        self.epochs, self.patience = epochs, patience
        self.state = TrainState()
        self.epoch_loss = 0.0

    def train_epoch(self):
        self.model.train()
        self.epoch_loss = 0.0
        for x, y in self.train_loader:
            loss = F.cross_entropy(self.model(x.to(self.device)), y.to(self.device))
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
            self.epoch_loss += loss.item() / len(self.train_loader)  # MISTAKE: sum: summed in an attribute, the part of before the restart is missing; and of one replica (or line with: self.epoch_loss = 0.0) (or line with: self.state.history.append)

    def validate(self):
        self.model.eval()
        total = Accumulator()
        with torch.no_grad():
            for x, y in self.valid_loader:
                hits = self.model(x.to(self.device)).argmax(1) == y.to(self.device)
                total["hits"] += hits[: self.valid_loader.num_valid].sum()
        with total.synchronized():
            return total["hits"] / self.valid_loader.num_samples

    def fit(self):
        for epoch in remaining_epochs_until(self.epochs):
            self.train_epoch()
            score = self.validate()
            self.state.history.append({"epoch": epoch, "loss": self.epoch_loss, "score": score})  # MISTAKE: lost: a dataclass that nobody registers; earlier rows are missing in history.json (or line with: self.state = TrainState()) (or line with: history: list)
            if score > self.state.best_score:
                self.state.best_score = score  # MISTAKE: lost: the best score is forgotten (or line with: self.state = TrainState()) (or line with: best_score: float) (or line with: if score > self.state.best_score)
                self.state.bad_epochs = 0
                self.save("best.pt")
            else:
                self.state.bad_epochs += 1  # MISTAKE: lost: patience begins anew with each restart (or line with: self.state = TrainState()) (or line with: bad_epochs: int) (or line with: if self.state.bad_epochs >= self.patience)
            if self.state.bad_epochs >= self.patience:
                break  # ARGUABLE: a restart after this break might go on with the next epoch
        if rank() == 0:
            with open("history.json", "w") as f:
                json.dump(self.state.history, f, indent=2)

    def save(self, path):
        if rank() == 0:
            torch.save(self.net.state_dict(), path)


def main():
    digits = load_digits()
    x = torch.tensor(digits.data, dtype=torch.float32) / 16
    y = torch.tensor(digits.target)
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
    x, y = x[order], y[order]
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
    Trainer(net, TensorDataset(x[:1500], y[:1500]), TensorDataset(x[1500:], y[1500:])).fit()


if __name__ == "__main__":
    main()
