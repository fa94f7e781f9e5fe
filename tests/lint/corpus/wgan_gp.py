"""WGAN with gradient penalty: some critic steps for each generator step."""
import argparse
import os

import numpy as np
import torch
import torch.nn as nn
from torch import autograd
from torchvision import datasets, transforms
from torchvision.utils import save_image

from elasticrun import AdaptiveDataLoader, AdaptiveDataParallel, device, rank, remaining_epochs_until

parser = argparse.ArgumentParser()
parser.add_argument("--n_epochs", type=int, default=200)
parser.add_argument("--n_critic", type=int, default=5)
parser.add_argument("--latent_dim", type=int, default=100)
parser.add_argument("--sample_interval", type=int, default=400)
opt = parser.parse_args()
os.makedirs("images", exist_ok=True)
torch.manual_seed(3)
np.random.seed(3)
dev = device()


def block(i, o):
    return [nn.Linear(i, o), nn.LeakyReLU(0.2, inplace=True)]


generator = nn.Sequential(*block(opt.latent_dim, 128), *block(128, 512), nn.Linear(512, 784), nn.Tanh()).to(dev)
critic = nn.Sequential(*block(784, 512), *block(512, 256), nn.Linear(256, 1)).to(dev)
opt_g = torch.optim.Adam(generator.parameters(), lr=2e-4, betas=(0.5, 0.999))
opt_d = torch.optim.Adam(critic.parameters(), lr=2e-4, betas=(0.5, 0.999))
G = AdaptiveDataParallel(generator, opt_g, name="generator")
D = AdaptiveDataParallel(critic, opt_d, name="critic")
data = datasets.MNIST("data", transform=transforms.Compose([transforms.ToTensor(), transforms.Normalize([0.5], [0.5])]))
loader = AdaptiveDataLoader(data, batch_size=64, shuffle=True)


def penalty(real, fake):
    alpha = torch.rand(real.size(0), 1, device=dev)
    mix = (alpha * real + (1 - alpha) * fake).requires_grad_(True)
    grad = autograd.grad(D(mix).sum(), mix, create_graph=True)[0]
    return ((grad.norm(2, dim=1) - 1) ** 2).mean()


batches_done = 0
lambda_gp = 10.0
gap_history = []
for epoch in remaining_epochs_until(opt.n_epochs):
    for i, (imgs, _) in enumerate(loader):
        real = imgs.flatten(1).to(dev)
        z = torch.as_tensor(np.random.normal(0, 1, (len(real), opt.latent_dim)), dtype=torch.float32, device=dev)
        fake = generator(z)
        gap = D(fake.detach()).mean() - D(real).mean()
        d_loss = gap + lambda_gp * penalty(real, fake.detach())
        opt_d.zero_grad()
        d_loss.backward()
        opt_d.step()
        gap_history.append(gap.item())  # MISTAKE: lost: values of before the restart, by which the penalty is set at the end of the epoch, are missing (and they are one replica's) (or line with: recent = np.mean)
        if i % opt.n_critic == 0:  # MISTAKE: enum: enumerate begins at 0 where the loop continues, so another batch trains the generator (or line with: for i, (imgs, _) in enumerate(loader))
            g_loss = -D(G(z)).mean()
            opt_g.zero_grad()
            g_loss.backward()
            opt_g.step()
            if batches_done % opt.sample_interval == 0 and rank() == 0:
                save_image(fake[:25].view(-1, 1, 28, 28), f"images/{batches_done}.png", nrow=5, normalize=True)
            batches_done += opt.n_critic  # MISTAKE: lost: counts from 0 after a restart and overwrites the first images (or line with: batches_done = 0)
    recent = np.mean(gap_history[-len(loader) :])
    lambda_gp = 10.0 if abs(recent) < 5 else lambda_gp * 1.1  # MISTAKE: lost: the factor of the penalty is 10 again after a restart (or line with: lambda_gp = 10.0)
    if rank() == 0:
        print(f"[{epoch}/{opt.n_epochs}] gap {recent:.3f} lambda {lambda_gp:.2f}")
