"""Fits a net with the callbacks; ported."""
import torch
import torch.nn as nn
import torch.nn.functional as F
import torchvision
from callbacks import BestWeights, Progress, Rows
from torchvision.transforms import ToTensor

from elasticrun import Accumulator, AdaptiveDataLoader, AdaptiveDataParallel, device, remaining_epochs_until


class Run:
    def __init__(self, net, loaders):
        self.net = net.to(device())
        self.optimizer = torch.optim.Adam(self.net.parameters())
        self.model = AdaptiveDataParallel(self.net, self.optimizer)
        self.loaders = loaders
        self.best = BestWeights("kmnist.pt", "valid")
        self.callbacks = [self.best, Rows("kmnist.csv"), Progress()]
        self.epoch = None

    def fit(self, epochs, patience):
        for self.epoch in remaining_epochs_until(epochs):
            if self.best.state.wait >= patience:
                break
            for cb in self.callbacks:
                cb.on_epoch_begin(self)
            self.train()
            logs = {"valid": self.validate()}
            for cb in self.callbacks:
                cb.on_epoch_end(self, logs)

    def train(self):
        self.model.train()
        for x, y in self.loaders["train"]:
            loss = F.cross_entropy(self.model(x.to(device())), y.to(device()))
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
            for cb in self.callbacks:
                cb.on_batch_end(self, loss)

    @torch.no_grad()
    def validate(self):
        self.model.eval()
        loader, total = self.loaders["valid"], Accumulator()
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
    Run(nn.Sequential(nn.Flatten(), nn.Linear(784, 128), nn.ReLU(), nn.Linear(128, 10)), loaders).fit(30, 4)
