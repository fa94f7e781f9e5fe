"""Now and then an evaluation, decided in passing."""
import random

import torch
import torch.nn as nn
import torch.nn.functional as F
import torchvision
from torchvision.transforms import ToTensor

from elasticrun import Accumulator, AdaptiveDataLoader, AdaptiveDataParallel, Variables, device, rank, remaining_epochs_until


class Job:
    def __init__(self):
        random.seed(0)
        torch.manual_seed(0)
        self.dev = device()
        self.train_loader = AdaptiveDataLoader(torchvision.datasets.SVHN("data", transform=ToTensor()), batch_size=128, shuffle=True)
        self.test_loader = AdaptiveDataLoader(torchvision.datasets.SVHN("data", split="test", transform=ToTensor()), batch_size=500)
        self.net = nn.Sequential(nn.Flatten(), nn.Linear(3072, 256), nn.ReLU(), nn.Linear(256, 10)).to(self.dev)
        self.optimizer = torch.optim.Adam(self.net.parameters(), 1e-3)
        self.model = AdaptiveDataParallel(self.net, self.optimizer)
        self.kept = Variables(accuracy=0.0)
        self.since = 0

    def train(self):
        self.model.train()
        for x, y in self.train_loader:
            loss = F.cross_entropy(self.model(x.to(self.dev)), y.to(self.dev))
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()

    def test(self):
        self.model.eval()
        total = Accumulator()
        with torch.no_grad():
            for x, y in self.test_loader:
                hits = self.model(x.to(self.dev)).argmax(1) == y.to(self.dev)
                total["hits"] += hits[: self.test_loader.num_valid].sum()
        with total.synchronized():
            self.kept.accuracy = total["hits"] / self.test_loader.num_samples

    def run(self, epochs):
        for epoch in remaining_epochs_until(epochs):
            self.train()
            self.since += 1  # MISTAKE: lost: counts epochs since the last test in an attribute, 0 after a restart, and loops of the epoch depend on it (or line with: self.since = 0) (or line with: if self.since)
            if self.since >= 5 or random.random() < 0.1:  # MISTAKE: order: drawn in front of a loop; in a replay the draw may be another one, and then the interrupted loop does not come
                self.test()
                self.since = 0
            if rank() == 0:
                print(f"epoch {epoch}: accuracy {self.kept.accuracy:.4f}")


if __name__ == "__main__":
    Job().run(40)
