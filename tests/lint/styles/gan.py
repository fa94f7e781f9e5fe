"""A GAN: two nets, two optimizers, one loop, images at the end of an epoch."""

import os

import torch
from torch import nn
from torchvision.utils import save_image

from elasticrun import AdaptiveDataLoader, Variables, rank, register
from elasticrun import remaining_epochs_until as epochs_until


def weights_init(module):
    if isinstance(module, nn.Linear):
        nn.init.normal_(module.weight, 0.0, 0.02)
        nn.init.zeros_(module.bias)


class Generator(nn.Module):
    def __init__(self, nz):
        super().__init__()
        self.main = nn.Sequential(nn.Linear(nz, 64), nn.ReLU(), nn.Linear(64, 784))

    def forward(self, z):
        return self.main(z)


class Discriminator(nn.Module):
    def __init__(self):
        super().__init__()
        self.main = nn.Sequential(nn.Linear(784, 64), nn.ReLU(), nn.Linear(64, 1))

    def forward(self, x):
        return self.main(x).squeeze(1)


def main(dataset, nz=100, num_epochs=25):
    torch.manual_seed(999)
    net_g, net_d = Generator(nz), Discriminator()
    net_g.apply(weights_init)
    net_d.apply(weights_init)
    opt_g = torch.optim.Adam(net_g.parameters(), lr=2e-4, betas=(0.5, 0.999))
    opt_d = torch.optim.Adam(net_d.parameters(), lr=2e-4, betas=(0.5, 0.999))
    register(net_g=net_g, net_d=net_d, opt_g=opt_g, opt_d=opt_d)
    loader = AdaptiveDataLoader(dataset, batch_size=128, shuffle=True)
    fixed_noise = torch.randn(64, nz, generator=torch.Generator().manual_seed(7))
    counts = Variables(iterations=0)
    criterion = nn.BCEWithLogitsLoss()
    os.makedirs("samples", exist_ok=True)
    for epoch in epochs_until(num_epochs):
        for i, (real, _) in enumerate(loader):
            noise = torch.randn(real.size(0), nz)
            fake = net_g(noise)
            opt_d.zero_grad()
            real_loss = criterion(net_d(real.flatten(1)), torch.ones(real.size(0)))
            fake_loss = criterion(net_d(fake.detach()), torch.zeros(real.size(0)))
            (real_loss + fake_loss).backward()
            opt_d.step()
            opt_g.zero_grad()
            loss_g = criterion(net_d(fake), torch.ones(real.size(0)))
            loss_g.backward()
            opt_g.step()
            counts.iterations += 1
            if i % 100 == 0:
                print(f"[{epoch}][{i}/{len(loader)}] {loss_g.item():.4f}")
        if rank() == 0:
            with torch.no_grad():
                save_image(net_g(fixed_noise), f"samples/{epoch}.png")
