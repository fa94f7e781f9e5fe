"""Fits a model with callbacks."""
import json
import os

import torch
import torch.nn as nn
import torch.nn.functional as F
import torchvision
from callbacks import EarlyStopping, History, ModelCheckpoint, Notifier
from torchvision.transforms import ToTensor

from elasticrun import Accumulator, AdaptiveDataLoader, AdaptiveDataParallel, device, rank, remaining_epochs_until


class Run:
    def __init__(self, net, optimizer, loaders, callbacks):
        self.net, self.optimizer, self.loaders, self.callbacks = net, optimizer, loaders, callbacks
        self.model = AdaptiveDataParallel(net, optimizer)
        self.stop = False
        self.epoch = -1

    def fit(self, epochs):
        for self.epoch in remaining_epochs_until(epochs):
            for cb in self.callbacks:
                cb.on_epoch_begin(self)
            self.train()
            for cb in self.callbacks:
                cb.on_train_end(self)
            logs = {"val_loss": self.validate()}
            for cb in self.callbacks:
                cb.on_epoch_end(self, logs)
            if self.stop:
                break  # ARGUABLE: a restart after this break might go on with the next epoch

    def train(self):
        self.model.train()
        for x, y in self.loaders["train"]:
            loss = F.cross_entropy(self.model(x.to(device())), y.to(device()))
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()

    @torch.no_grad()
    def validate(self):
        self.model.eval()
        total = Accumulator()
        loader = self.loaders["valid"]
        for x, y in loader:
            losses = F.cross_entropy(self.model(x.to(device())), y.to(device()), reduction="none")
            total["loss"] += losses[: loader.num_valid].sum()
        with total.synchronized():
            return total["loss"] / loader.num_samples


if __name__ == "__main__":
    torch.manual_seed(0)
    loaders = {
        "train": AdaptiveDataLoader(torchvision.datasets.KMNIST("data", transform=ToTensor()), batch_size=64, shuffle=True),
        "valid": AdaptiveDataLoader(torchvision.datasets.KMNIST("data", train=False, transform=ToTensor()), batch_size=500),
    }
    net = nn.Sequential(nn.Flatten(), nn.Linear(784, 128), nn.ReLU(), nn.Linear(128, 10)).to(device())
    history = History()
    url = os.environ.get("CHAT_URL", "http://localhost/hook")
    run = Run(net, torch.optim.Adam(net.parameters()), loaders, [EarlyStopping("val_loss", 3), ModelCheckpoint("ckpt"), Notifier(url), history])
    run.fit(30)
    if rank() == 0:
        with open("summary.json", "w") as f:
            json.dump(history.rows, f)
