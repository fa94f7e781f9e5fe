"""Curriculum set from the number of the epoch, and samples from its seed. Ported."""
import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import Dataset

from elasticrun import Accumulator, AdaptiveDataLoader, AdaptiveDataParallel, device, rank, remaining_epochs_until


class Waves(Dataset):
    def __init__(self, size, length=128):
        self.size, self.length = size, length
        self.prepare(epoch=0, noise=0.0)

    def prepare(self, epoch, noise):
        """All of the data set's contents follow from the two arguments."""
        rng = np.random.default_rng([17, epoch])
        self.kinds = rng.integers(0, 4, self.size)
        freq = rng.uniform(1, 5, (self.size, 1))
        t = np.linspace(0, 1, self.length)[None]
        shapes = [np.sin, np.cos, lambda v: np.sign(np.sin(v)), lambda v: np.abs(np.sin(v))]
        waves = np.stack([shapes[k](2 * np.pi * f * t[0]) for k, f in zip(self.kinds, freq)])
        self.waves = (waves + noise * rng.standard_normal(waves.shape)).astype(np.float32)

    def __len__(self):
        return self.size

    def __getitem__(self, i):
        return torch.from_numpy(self.waves[i]), int(self.kinds[i])


def difficulty(epoch, epochs):
    return min(1.0, 2.0 * epoch / epochs)


def main(epochs=40):
    torch.manual_seed(1)
    dev = device()
    train_set, valid_set = Waves(5000), Waves(1000)
    valid_set.prepare(epoch=10**6, noise=1.0)
    train = AdaptiveDataLoader(train_set, batch_size=64, shuffle=True)
    valid = AdaptiveDataLoader(valid_set, batch_size=200)
    net = nn.Sequential(nn.Linear(128, 256), nn.ReLU(), nn.Dropout(0.1), nn.Linear(256, 4)).to(dev)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
    model = AdaptiveDataParallel(net, optimizer)
    history = []
    for epoch in remaining_epochs_until(epochs):
        level = difficulty(epoch, epochs)
        train_set.prepare(epoch, noise=level)
        net[2].p = 0.1 + 0.3 * level
        for group in optimizer.param_groups:
            group["lr"] = 1e-3 * (1 - 0.9 * epoch / epochs)
        model.train()
        history.clear()
        for x, y in train:
            loss = F.cross_entropy(model(x.to(dev)), y.to(dev))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        model.eval()
        total = Accumulator()
        with torch.no_grad():
            for x, y in valid:
                total["hits"] += (model(x.to(dev)).argmax(1) == y.to(dev))[: valid.num_valid].sum()
        with total.synchronized():
            history.append(total["hits"] / valid.num_samples)
        if rank() == 0:
            print(f"{epoch}: noise {level:.2f}, accuracy {history[-1]:.4f}")


if __name__ == "__main__":
    main()
