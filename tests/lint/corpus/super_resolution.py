"""Sub-pixel super resolution."""
import argparse
import math
import os
from pathlib import Path

import torch
import torch.nn as nn
from PIL import Image
from torchvision import transforms

from elasticrun import Accumulator, AdaptiveDataLoader, AdaptiveDataParallel, device, rank, remaining_epochs_until


class Crops(torch.utils.data.Dataset):
    def __init__(self, folder, factor, size=256):
        self.files = sorted(p for p in Path(folder).iterdir() if p.suffix in {".png", ".jpg"})
        self.size = size - size % factor
        self.small = transforms.Resize(self.size // factor)
        self.crop = transforms.CenterCrop(self.size)
        self.tensor = transforms.ToTensor()

    def __len__(self):
        return len(self.files)

    def __getitem__(self, i):
        with Image.open(self.files[i]) as image:
            y = self.crop(image.convert("YCbCr").split()[0])
        return self.tensor(self.small(y)), self.tensor(y)


class Net(nn.Module):
    def __init__(self, factor):
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(1, 64, 5, padding=2), nn.ReLU(), nn.Conv2d(64, 32, 3, padding=1), nn.ReLU(),
            nn.Conv2d(32, factor**2, 3, padding=1), nn.PixelShuffle(factor),
        )

    def forward(self, x):
        return self.layers(x)


def checkpoint(net, epoch):
    path = f"model_epoch_{epoch}.pth"
    torch.save(net.state_dict(), path + ".tmp")
    os.replace(path + ".tmp", path)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--factor", type=int, default=3)
    parser.add_argument("--epochs", type=int, default=30)
    opt = parser.parse_args()
    torch.manual_seed(123)
    dev = device()
    train = AdaptiveDataLoader(Crops("BSDS300/train", opt.factor), batch_size=4, shuffle=True, num_workers=4)
    test = AdaptiveDataLoader(Crops("BSDS300/test", opt.factor), batch_size=10, even_batches=False)
    net = Net(opt.factor).to(dev)
    for module in net.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.orthogonal_(module.weight)
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-3)
    model = AdaptiveDataParallel(net, optimizer)
    criterion = nn.MSELoss()
    for epoch in remaining_epochs_until(opt.epochs):
        for step, (small, large) in train.enumerate():
            loss = criterion(model(small.to(dev)), large.to(dev))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if rank() == 0:
                print(f"epoch {epoch} ({step}/{len(train)}) {loss.item():.4f}")
        psnr = Accumulator()
        with torch.no_grad():
            for small, large in test:
                for a, b in zip(net(small.to(dev)), large.to(dev)):
                    psnr["db"] += 10 * math.log10(1 / criterion(a, b).item())
        with psnr.synchronized():
            mean = psnr["db"] / test.num_samples
        if rank() == 0:
            print(f"epoch {epoch}: {mean:.2f} dB")
            checkpoint(net, epoch)


if __name__ == "__main__":
    main()
