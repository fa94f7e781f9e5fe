"""The trainer with patience, ported: its early stopping is registered."""
import torch
import torch.nn as nn
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch.utils.data import TensorDataset

from elasticrun import (
    Accumulator,
    AdaptiveDataLoader,
    AdaptiveDataParallel,
    LogFile,
    device,
    rank,
    register,
    remaining_epochs_until,
)


class EarlyStopping:
    """Counts epochs without a better score; has the two methods that register wants."""

    def __init__(self, patience):
        self.patience = patience
        self.best = float("-inf")
        self.bad = 0

    def update(self, score):
        if score > self.best:
            self.best = score
            self.bad = 0
            return True
        self.bad += 1
        return False

    @property
    def done(self):
        return self.bad >= self.patience

    def state_dict(self):
        return {"best": self.best, "bad": self.bad}

    def load_state_dict(self, state):
        self.best, self.bad = state["best"], state["bad"]


class Trainer:
    def __init__(self, net, train_set, valid_set, epochs=50, patience=5):
        self.device = device()
        self.net = net.to(self.device)
        self.optimizer = torch.optim.Adam(self.net.parameters(), lr=1e-3)
        self.model = AdaptiveDataParallel(self.net, self.optimizer)
        self.loaders = {
            "train": AdaptiveDataLoader(train_set, batch_size=32, shuffle=True, name="train"),
            "valid": AdaptiveDataLoader(valid_set, batch_size=64, name="valid"),
        }
        self.epochs = epochs
        self.stopping = EarlyStopping(patience)
        register(stopping=self.stopping)
        self.log = LogFile("digits.log")
        self.last = None

    def run_phase(self, phase):
        loader, training = self.loaders[phase], phase == "train"
        self.model.train(training)
        total = Accumulator()
        with torch.set_grad_enabled(training):
            for x, y in loader:
                x, y = x.to(self.device), y.to(self.device)
                out = self.model(x)
                if training:
                    loss = F.cross_entropy(out, y)
                    self.optimizer.zero_grad()
                    loss.backward()
                    self.optimizer.step()
                total["hits"] += (out.argmax(1) == y)[: loader.num_valid].sum()
        with total.synchronized():
            return total["hits"] / loader.num_samples

    def fit(self):
        for epoch in remaining_epochs_until(self.epochs):
            if self.stopping.done:
                break
            self.last = {phase: self.run_phase(phase) for phase in ("train", "valid")}
            self.log.write(f"{epoch} {self.last['train']:.4f} {self.last['valid']:.4f}\n")
            if self.stopping.update(self.last["valid"]) and rank() == 0:
                torch.save(self.net.state_dict(), "digits.pt")
        if rank() == 0:
            print("best", self.stopping.best)


if __name__ == "__main__":
    digits = load_digits()
    x, y = torch.tensor(digits.data, dtype=torch.float32) / 16, torch.tensor(digits.target)
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
    Trainer(net, TensorDataset(x[:1500], y[:1500]), TensorDataset(x[1500:], y[1500:])).fit()
