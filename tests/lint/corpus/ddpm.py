"""Denoising diffusion with an exponential mean of the weights."""
import copy
import os

import torch
import torch.nn as nn
import torch.nn.functional as F
from torchvision import datasets, transforms
from torchvision.utils import save_image

from elasticrun import AdaptiveDataLoader, AdaptiveDataParallel, device, rank, remaining_epochs_until

T = 1000


class EMA:
    def __init__(self, model, beta=0.995):
        self.beta = beta
        self.model = copy.deepcopy(model).eval().requires_grad_(False)
        self.step = 0

    def update(self, model):
        self.step += 1  # ARGUABLE: belongs to the EMA, marked where it is made
        if self.step < 2000:
            self.model.load_state_dict(model.state_dict())
            return
        for a, b in zip(self.model.parameters(), model.parameters()):
            a.lerp_(b, 1 - self.beta)


class Denoiser(nn.Module):
    def __init__(self, c=64):
        super().__init__()
        self.time = nn.Embedding(T, c)
        self.inp = nn.Conv2d(3, c, 3, padding=1)
        self.mid = nn.Sequential(nn.GroupNorm(8, c), nn.SiLU(), nn.Conv2d(c, c, 3, padding=1), nn.GroupNorm(8, c), nn.SiLU())
        self.out = nn.Conv2d(c, 3, 3, padding=1)

    def forward(self, x, t):
        return self.out(self.mid(self.inp(x) + self.time(t)[:, :, None, None]))


class Diffusion:
    def __init__(self, dev):
        self.dev = dev
        beta = torch.linspace(1e-4, 0.02, T, device=dev)
        self.alpha = 1 - beta
        self.alpha_hat = torch.cumprod(self.alpha, 0)

    def noise(self, x, t):
        eps = torch.randn_like(x)
        a = self.alpha_hat[t][:, None, None, None]
        return a.sqrt() * x + (1 - a).sqrt() * eps, eps

    @torch.no_grad()
    def sample(self, model, x):
        for i in reversed(range(1, T)):
            t = torch.full((len(x),), i, device=self.dev)
            z = torch.randn_like(x) if i > 1 else 0
            a, ah = self.alpha[i], self.alpha_hat[i]
            x = (x - (1 - a) / (1 - ah).sqrt() * model(x, t)) / a.sqrt() + (1 - a).sqrt() * z
        return x


def main():
    torch.manual_seed(0)
    dev = device()
    os.makedirs("samples", exist_ok=True)
    data = datasets.CIFAR10("data", transform=transforms.Compose([transforms.ToTensor(), transforms.Normalize((0.5,) * 3, (0.5,) * 3)]))
    loader = AdaptiveDataLoader(data, batch_size=128, shuffle=True, max_local_batch_size=32)
    net = Denoiser().to(dev)
    ema = EMA(net)  # MISTAKE: unreg: the averaged weights and their counter begin anew after a restart (or line with: ema.update(net))
    optimizer = torch.optim.AdamW(net.parameters(), lr=3e-4)
    model = AdaptiveDataParallel(net, optimizer)
    diffusion = Diffusion(dev)
    start_noise = torch.randn(16, 3, 32, 32, device=dev)
    for epoch in remaining_epochs_until(300):
        for images, _ in loader:
            images = images.to(dev)
            t = torch.randint(1, T, (len(images),), device=dev)
            x_t, eps = diffusion.noise(images, t)
            loss = F.mse_loss(model(x_t, t), eps)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            ema.update(net)  # MISTAKE: cut: with max_local_batch_size this acts once for each micro-batch, so more often with fewer replicas; test loader.is_step
        if epoch % 10 == 0:
            images = diffusion.sample(ema.model, start_noise)
            if rank() == 0:
                save_image(images, f"samples/{epoch}.png", normalize=True)
        if rank() == 0:
            with open("samples/log.txt", "w") as f:
                f.write(f"finished epoch {epoch}\n")


main()
