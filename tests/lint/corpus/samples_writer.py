"""A generator of images whose samples are written for each epoch; ported."""
import os
import urllib.request
from pathlib import Path

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import TensorDataset

from elasticrun import Accumulator, AdaptiveDataLoader, AdaptiveDataParallel, device, rank, remaining_epochs_until

URL = "http://localhost:8000/sprites.npz"
OUT = Path("sprites")


def fetch():
    with urllib.request.urlopen(URL) as reply:
        blob = reply.read()
    mine = Path(f"sprites-{rank()}.tmp")
    mine.write_bytes(blob)
    os.replace(mine, f"sprites-{rank()}.npz")
    return np.load(f"sprites-{rank()}.npz")["images"]


class AutoEncoder(nn.Module):
    def __init__(self, pixels, code=16):
        super().__init__()
        self.enc = nn.Sequential(nn.Linear(pixels, 256), nn.ReLU(), nn.Linear(256, code))
        self.dec = nn.Sequential(nn.Linear(code, 256), nn.ReLU(), nn.Linear(256, pixels))

    def forward(self, x):
        return self.dec(self.enc(x))


def write_atomically(path, array):
    temporary = path.with_suffix(".part")
    with open(temporary, "wb") as f:
        np.save(f, array)
        f.flush()
        os.fsync(f.fileno())
    os.replace(temporary, path)


def main():
    torch.manual_seed(3)
    dev = device()
    images = torch.from_numpy(fetch()).float().flatten(1) / 255
    pixels = images.shape[1]
    loader = AdaptiveDataLoader(TensorDataset(images), batch_size=64, shuffle=True)
    net = AutoEncoder(pixels).to(dev)
    optimizer = torch.optim.Adam(net.parameters(), 1e-3)
    model = AdaptiveDataParallel(net, optimizer)
    codes = torch.randn(16, 16, generator=torch.Generator().manual_seed(0)).to(dev)
    OUT.mkdir(exist_ok=True)
    for epoch in remaining_epochs_until(50):
        if rank() == 0:
            (OUT / "running.txt").write_text(f"epoch {epoch}\n")
        total = Accumulator()
        for (x,) in loader:
            x = x.to(dev)
            loss = F.mse_loss(model(x), x)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            total["loss"] += loss.item() * loader.num_valid
        with total.synchronized():
            mean = total["loss"] / loader.num_samples
        with torch.no_grad():
            samples = net.dec(codes).cpu().numpy()
        if rank() == 0:
            write_atomically(OUT / f"{epoch:03d}.npy", samples)
            print(f"epoch {epoch}: {mean:.5f}")


if __name__ == "__main__":
    main()
