"""WGAN-GP on CelebA. Based on the DCGAN example, ported from plain PyTorch."""
import argparse
import os

import torch
import torchvision.transforms as transforms
import torchvision.utils as vutils
from torch import autograd, nn, optim
from torchvision.datasets import ImageFolder

from elasticrun import AdaptiveDataLoader, AdaptiveDataParallel, device, rank, remaining_epochs_until

parser = argparse.ArgumentParser()
parser.add_argument("--dataroot", required=True)
parser.add_argument("--nz", type=int, default=100)
parser.add_argument("--ngf", type=int, default=64)
parser.add_argument("--epochs", type=int, default=25)
parser.add_argument("--batch-size", type=int, default=128)
parser.add_argument("--critic-iters", type=int, default=5)
parser.add_argument("--gp", type=float, default=10.0)
parser.add_argument("--outf", default="wgan")
opt = parser.parse_args()


def up(a, b):
    return [nn.ConvTranspose2d(a, b, 4, 2, 1, bias=False), nn.BatchNorm2d(b), nn.ReLU(True)]


def down(a, b):
    return [nn.Conv2d(a, b, 4, 2, 1), nn.InstanceNorm2d(b, affine=True), nn.LeakyReLU(0.2, True)]


class Generator(nn.Module):
    def __init__(self, nz, n):
        super().__init__()
        first = [nn.ConvTranspose2d(nz, n * 8, 4, 1, 0, bias=False), nn.BatchNorm2d(n * 8), nn.ReLU(True)]
        last = [nn.ConvTranspose2d(n, 3, 4, 2, 1), nn.Tanh()]
        self.main = nn.Sequential(*first, *up(n * 8, n * 4), *up(n * 4, n * 2), *up(n * 2, n), *last)

    def forward(self, z):
        return self.main(z)


class Critic(nn.Module):
    def __init__(self, n):
        super().__init__()
        self.main = nn.Sequential(*down(3, n), *down(n, n * 2), *down(n * 2, n * 4), *down(n * 4, n * 8), nn.Conv2d(n * 8, 1, 4))

    def forward(self, x):
        return self.main(x).view(-1)


def init_weights(m):
    if isinstance(m, (nn.Conv2d, nn.ConvTranspose2d)):
        nn.init.normal_(m.weight, 0.0, 0.02)


def gradient_penalty(critic, real, fake):
    eps = torch.rand(len(real), 1, 1, 1, device=real.device)
    mixed = (eps * real + (1 - eps) * fake).requires_grad_(True)
    (grad,) = autograd.grad(critic(mixed).sum(), mixed, create_graph=True)
    return ((grad.flatten(1).norm(2, 1) - 1) ** 2).mean()


os.makedirs(opt.outf, exist_ok=True)
transform = transforms.Compose(
    [transforms.Resize(64), transforms.CenterCrop(64), transforms.ToTensor(), transforms.Normalize((0.5,) * 3, (0.5,) * 3)]
)
dataset = ImageFolder(opt.dataroot, transform)
train = AdaptiveDataLoader(
    dataset, batch_size=opt.batch_size, shuffle=True, drop_last=True, num_workers=6, device=device()
)

netG = Generator(opt.nz, opt.ngf).to(device())
netD = Critic(opt.ngf).to(device())
netG.apply(init_weights)
netD.apply(init_weights)
optG = optim.Adam(netG.parameters(), lr=1e-4, betas=(0.0, 0.9))
optD = optim.Adam(netD.parameters(), lr=1e-4, betas=(0.0, 0.9))
G = AdaptiveDataParallel(netG, optG)
D = AdaptiveDataParallel(netD, optD)  # MISTAKE: name: both models are called "model" (or line with: G = AdaptiveDataParallel(netG, optG))
fixed = torch.randn(64, opt.nz, 1, 1, generator=torch.Generator().manual_seed(0)).to(device())

g_losses, d_losses = [], []
for epoch in remaining_epochs_until(opt.epochs):
    for i, (real, _) in enumerate(train):  # MISTAKE: enum: counts from 0 again after a restart, and decides when the generator is trained (or line with: if i % opt.critic_iters == 0) (or line with: if i % 500 == 0)
        noise = torch.randn(len(real), opt.nz, 1, 1, device=device())
        fake = G(noise).detach()
        optD.zero_grad()
        loss_d = D(fake).mean() - D(real).mean() + opt.gp * gradient_penalty(D, real, fake)
        loss_d.backward()
        optD.step()

        if i % opt.critic_iters == 0:
            optG.zero_grad()
            loss_g = -netD(G(noise)).mean()
            loss_g.backward()
            optG.step()
            g_losses.append(loss_g.item())  # MISTAKE: lost: what was appended is gone after a restart (or line with: g_losses, d_losses = [], []) (or line with: d_losses.append(loss_d.item())) (or line with: torch.save({"g": g_losses)
            d_losses.append(loss_d.item())
        if i % 500 == 0:
            if rank() == 0:
                print(f"[{epoch}/{opt.epochs}][{i}/{len(train)}] D {loss_d.item():.3f} G {loss_g.item():.3f}")  # ARGUABLE: rank 0's share, only printed
            with torch.no_grad():
                picture = netG(fixed)
            vutils.save_image(picture, f"{opt.outf}/fake_{epoch:02d}_{i:05d}.png", normalize=True)  # MISTAKE: everyrank: all replicas write the same file
    if rank() == 0:
        torch.save(netG.state_dict(), f"{opt.outf}/netG_{epoch}.pth")
        torch.save(netD.state_dict(), f"{opt.outf}/netD_{epoch}.pth")

if rank() == 0:
    torch.save({"g": g_losses, "d": d_losses}, f"{opt.outf}/losses.pt")
