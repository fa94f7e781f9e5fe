"""WGAN-GP: critic several times a batch, samples by a fixed generator, FID at times."""
import os
from argparse import ArgumentParser
from pathlib import Path

import torch
import torch.autograd as autograd
from torch import nn
from torch.utils.tensorboard import SummaryWriter
from torchvision.utils import make_grid, save_image

import elasticrun
from elasticrun import AdaptiveDataLoader, Variables, register
from networks import Critic, Generator
from data import celeba


def gradient_penalty(critic, real, fake):
    eps = torch.rand(real.size(0), 1, 1, 1, device=real.device)
    mixed = (eps * real + (1 - eps) * fake).requires_grad_(True)
    score = critic(mixed)
    grad, = autograd.grad(score.sum(), mixed, create_graph=True)
    return ((grad.flatten(1).norm(2, dim=1) - 1) ** 2).mean()


class WGAN:
    def __init__(self, hp):
        self.hp = hp
        self.device = elasticrun.device()
        self.G = Generator(hp.z).to(self.device)
        self.C = Critic().to(self.device)
        self.opt_g = torch.optim.Adam(self.G.parameters(), hp.lr, betas=(0.0, 0.9))
        self.opt_c = torch.optim.Adam(self.C.parameters(), hp.lr, betas=(0.0, 0.9))
        register(G=self.G, C=self.C, opt_g=self.opt_g, opt_c=self.opt_c)
        self.state = Variables(iteration=0)
        gen = torch.Generator().manual_seed(hp.seed)
        self.z_fixed = torch.randn(64, hp.z, 1, 1, generator=gen).to(self.device)

    def critic_step(self, real):
        z = torch.randn(real.size(0), self.hp.z, 1, 1, device=self.device)
        fake = self.G(z).detach()
        loss = self.C(fake).mean() - self.C(real).mean()
        loss = loss + self.hp.gp * gradient_penalty(self.C, real, fake)
        self.opt_c.zero_grad(set_to_none=True)
        loss.backward()
        self.opt_c.step()
        return loss.item()

    def generator_step(self, n):
        z = torch.randn(n, self.hp.z, 1, 1, device=self.device)
        loss = -self.C(self.G(z)).mean()
        self.opt_g.zero_grad(set_to_none=True)
        loss.backward()
        self.opt_g.step()
        return loss.item()

    def sample(self):
        with torch.no_grad():
            return self.G(self.z_fixed).cpu()

    def fit(self, loader, epochs, out: Path, writer=None):
        for epoch in elasticrun.remaining_epochs_until(epochs):
            for real, _ in loader:
                real = real.to(self.device)
                for _ in range(self.hp.n_critic):
                    c_loss = self.critic_step(real)
                g_loss = self.generator_step(len(real))
                self.state.iteration += 1
                if writer and self.state.iteration % 50 == 0:
                    writer.add_scalar("loss/critic", c_loss, self.state.iteration)
                    writer.add_scalar("loss/generator", g_loss, self.state.iteration)
            images = self.sample()
            if elasticrun.rank() == 0:
                save_image(images, out / f"{epoch:04d}.png", normalize=True)
                if writer:
                    writer.add_image("samples", make_grid(images), epoch)
                    writer.flush()


if __name__ == "__main__":
    parser = ArgumentParser()
    parser.add_argument("--z", type=int, default=128)
    parser.add_argument("--lr", type=float, default=1e-4)
    parser.add_argument("--gp", type=float, default=10.0)
    parser.add_argument("--n-critic", dest="n_critic", type=int, default=5)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--epochs", type=int, default=100)
    parser.add_argument("--out", type=Path, default=Path("out"))
    hp = parser.parse_args()
    torch.manual_seed(hp.seed)
    elasticrun.init(hp.out / "ckpt")
    os.makedirs(hp.out, exist_ok=True)
    loader = AdaptiveDataLoader(celeba(), batch_size=64, shuffle=True, drop_last=True)
    writer = SummaryWriter(hp.out / "tb") if elasticrun.rank() == 0 else None
    WGAN(hp).fit(loader, hp.epochs, hp.out, writer)
