"""DCGAN on a folder of faces."""
import argparse
import os

import torch
import torch.nn as nn
import torchvision.utils as vutils
from torchvision import datasets, transforms

from elasticrun import AdaptiveDataLoader, AdaptiveDataParallel, device, rank, remaining_epochs_until

parser = argparse.ArgumentParser()
parser.add_argument("--dataroot", default="celeba")
parser.add_argument("--niter", type=int, default=25)
parser.add_argument("--nz", type=int, default=100)
parser.add_argument("--ngf", type=int, default=64)
parser.add_argument("--outf", default="out")
opt = parser.parse_args()

os.makedirs(opt.outf, exist_ok=True)
dev = device()

transform = transforms.Compose(
    [transforms.Resize(64), transforms.CenterCrop(64), transforms.ToTensor(), transforms.Normalize((0.5,) * 3, (0.5,) * 3)]
)
dataset = datasets.ImageFolder(opt.dataroot, transform)
loader = AdaptiveDataLoader(dataset, batch_size=64, shuffle=True, num_workers=4)


def up(i, o, k, s, p):
    return nn.Sequential(nn.ConvTranspose2d(i, o, k, s, p, bias=False), nn.BatchNorm2d(o), nn.ReLU(True))


def down(i, o):
    return nn.Sequential(nn.Conv2d(i, o, 4, 2, 1, bias=False), nn.BatchNorm2d(o), nn.LeakyReLU(0.2, True))


def weights_init(m):
    name = m.__class__.__name__
    if "Conv" in name:
        nn.init.normal_(m.weight, 0.0, 0.02)
    elif "BatchNorm" in name:
        nn.init.normal_(m.weight, 1.0, 0.02)
        nn.init.zeros_(m.bias)


g = opt.ngf
gen = nn.Sequential(up(opt.nz, g * 8, 4, 1, 0), up(g * 8, g * 4, 4, 2, 1), up(g * 4, g * 2, 4, 2, 1), up(g * 2, g, 4, 2, 1), nn.ConvTranspose2d(g, 3, 4, 2, 1), nn.Tanh()).to(dev)
dis = nn.Sequential(nn.Conv2d(3, 64, 4, 2, 1), nn.LeakyReLU(0.2), down(64, 128), down(128, 256), down(256, 512), nn.Conv2d(512, 1, 4), nn.Flatten(0)).to(dev)
optG = torch.optim.Adam(gen.parameters(), lr=2e-4, betas=(0.5, 0.999))
optD = torch.optim.Adam(dis.parameters(), lr=2e-4, betas=(0.5, 0.999))
netG = AdaptiveDataParallel(gen, optG, name="G")
netD = AdaptiveDataParallel(dis, name="D")  # MISTAKE: unreg: optD's moments are not saved (or line with: optD = torch.optim.Adam)
gen.apply(weights_init)  # MISTAKE: zoneP: each start initialises the loaded weights again
dis.apply(weights_init)  # MISTAKE: zoneP: each start initialises the loaded weights again

criterion = nn.BCEWithLogitsLoss()
fixed_noise = torch.randn(64, opt.nz, 1, 1, device=dev)  # MISTAKE: data: nothing is seeded, so the noise that should be fixed is another one after a restart

for epoch in remaining_epochs_until(opt.niter):
    for i, (real, _) in loader.enumerate():
        real = real.to(dev)
        noise = torch.randn(real.size(0), opt.nz, 1, 1, device=dev)
        fake = netG(noise)
        out_real, out_fake = netD(real), netD(fake.detach())
        errD = criterion(out_real, torch.ones_like(out_real)) + criterion(out_fake, torch.zeros_like(out_fake))
        optD.zero_grad()
        errD.backward()
        optD.step()
        out = netD(fake)
        errG = criterion(out, torch.ones_like(out))
        optG.zero_grad()
        errG.backward()
        optG.step()
        if i % 100 == 0 and rank() == 0:
            print(f"[{epoch}/{opt.niter}][{i}/{len(loader)}] D {errD.item():.4f} G {errG.item():.4f}")
            with torch.no_grad():
                vutils.save_image(gen(fixed_noise), f"{opt.outf}/fake_{epoch:03d}.png", normalize=True)
    if rank() == 0:
        torch.save(gen.state_dict(), f"{opt.outf}/netG_{epoch}.pth")
