"""A configuration of dataclasses, in the manner of hydra."""
import dataclasses
import json
import shutil
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path

import torch
import torch.nn as nn
import torch.nn.functional as F
import torchvision
from torchvision.transforms import ToTensor

from elasticrun import Accumulator, AdaptiveDataLoader, AdaptiveDataParallel, device, rank, remaining_epochs_until


@dataclass
class OptimConfig:
    lr: float = 1e-3
    weight_decay: float = 1e-2


@dataclass
class Config:
    epochs: int = 20
    batch_size: int = 128
    root: str = "outputs"
    optim: OptimConfig = field(default_factory=OptimConfig)
    clean: bool = True
    seed: int = 1


class Experiment:
    def __init__(self, cfg):
        self.cfg = cfg
        stamp = datetime.now().strftime("%Y-%m-%d/%H-%M-%S")  # MISTAKE: name: the folder is named by the time, so each start, and each replica, has another one (or line with: self.dir = Path)
        self.dir = Path(cfg.root) / stamp
        self.dir.mkdir(parents=True, exist_ok=True)
        if cfg.clean and rank() == 0:
            shutil.rmtree("cache", ignore_errors=True)  # ARGUABLE: emptied again by each start; it is only a cache
        if rank() == 0:
            (self.dir / "config.json").write_text(json.dumps(dataclasses.asdict(cfg)))
        torch.manual_seed(cfg.seed)
        dev = self.dev = device()
        self.net = nn.Sequential(nn.Flatten(), nn.Linear(784, 300), nn.ReLU(), nn.Linear(300, 10)).to(dev)
        self.optimizer = torch.optim.AdamW(self.net.parameters(), **dataclasses.asdict(cfg.optim))
        self.model = AdaptiveDataParallel(self.net, self.optimizer)
        self.train = AdaptiveDataLoader(torchvision.datasets.MNIST("data", transform=ToTensor()), batch_size=cfg.batch_size, shuffle=True)
        self.test = AdaptiveDataLoader(torchvision.datasets.MNIST("data", train=False, transform=ToTensor()), batch_size=500)
        self.metrics = {}

    def run(self):
        for epoch in remaining_epochs_until(self.cfg.epochs):
            self.model.train()
            for x, y in self.train:
                loss = F.cross_entropy(self.model(x.to(self.dev)), y.to(self.dev))
                self.optimizer.zero_grad()
                loss.backward()
                self.optimizer.step()
            self.write(f"epoch {epoch} trained")
            accuracy = self.evaluate()
            self.metrics[epoch] = accuracy  # MISTAKE: lost: metrics of epochs before the restart are missing in metrics.json (or line with: self.metrics = {}) (or line with: json.dumps(self.metrics))
            if rank() == 0:
                (self.dir / "metrics.json").write_text(json.dumps(self.metrics))

    def write(self, text):
        if rank() == 0:
            with (self.dir / "train.log").open("a") as f:  # MISTAKE: effect: between the loops, appended again if the restart comes in the evaluation (or line with: f.write(text) (or line with: self.write(f"epoch)
                f.write(text + "\n")

    def evaluate(self):
        self.model.eval()
        total = Accumulator()
        with torch.no_grad():
            for x, y in self.test:
                hits = self.model(x.to(self.dev)).argmax(1) == y.to(self.dev)
                total["hits"] += hits[: self.test.num_valid].sum()
        with total.synchronized():
            return total["hits"] / self.test.num_samples


if __name__ == "__main__":
    Experiment(Config()).run()
