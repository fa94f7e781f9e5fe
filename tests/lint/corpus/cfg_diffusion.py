"""Class-conditional diffusion with guidance without a classifier, and a mean of weights."""
import argparse
import csv
import math
from pathlib import Path
from typing import Optional

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torchvision import datasets, transforms
from torchvision.utils import save_image

from elasticrun import AdaptiveDataLoader, AdaptiveDataParallel, LogFile, device, rank, register, remaining_epochs_until

NUM_CLASSES = 10


def cosine_alphas(steps: int) -> torch.Tensor:
    t = torch.linspace(0, 1, steps + 1, dtype=torch.float64)
    f = torch.cos((t + 0.008) / 1.008 * math.pi / 2) ** 2
    return (f / f[0])[1:].clamp(min=1e-5).float()


class Block(nn.Module):
    def __init__(self, width: int):
        super().__init__()
        self.body = nn.Sequential(nn.GroupNorm(8, width), nn.SiLU(), nn.Conv2d(width, width, 3, padding=1))
        self.shift = nn.Linear(width, width)

    def forward(self, x: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
        return x + self.body(x + self.shift(c)[:, :, None, None])


class Denoiser(nn.Module):
    def __init__(self, steps: int, width: int = 128, depth: int = 8):
        super().__init__()
        self.inp = nn.Conv2d(1, width, 3, padding=1)
        self.time = nn.Embedding(steps, width)
        self.label = nn.Embedding(NUM_CLASSES + 1, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))
        self.out = nn.Conv2d(width, 1, 3, padding=1)

    def forward(self, x: torch.Tensor, t: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        c, x = self.time(t) + self.label(y), self.inp(x)
        for block in self.blocks:
            x = block(x, c)
        return self.out(x)


class Diffusion:
    def __init__(self, steps: int, dev: torch.device):
        self.steps, self.dev = steps, dev
        self.bar = cosine_alphas(steps).to(dev)

    def corrupt(self, x: torch.Tensor, t: torch.Tensor, eps: torch.Tensor) -> torch.Tensor:
        a = self.bar[t][:, None, None, None]
        return a.sqrt() * x + (1 - a).sqrt() * eps

    @torch.no_grad()
    def sample(self, net: nn.Module, y: torch.Tensor, guidance: float, generator: Optional[torch.Generator] = None) -> torch.Tensor:
        x = torch.randn(len(y), 1, 28, 28, generator=generator).to(self.dev)
        nothing = torch.full_like(y, NUM_CLASSES)
        for i in reversed(range(self.steps)):
            t = torch.full((len(y),), i, device=self.dev)
            with_label, without = net(x, t, y), net(x, t, nothing)
            eps = (1 + guidance) * with_label - guidance * without
            a = self.bar[i]
            before = self.bar[i - 1] if i else torch.ones_like(a)
            clean = ((x - (1 - a).sqrt() * eps) / a.sqrt()).clamp(-1, 1)
            x = before.sqrt() * clean + (1 - before).sqrt() * eps
        return x


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=100)
    parser.add_argument("--batch-size", type=int, default=512)
    parser.add_argument("--micro-batch", type=int, default=64)
    parser.add_argument("--drop-label", type=float, default=0.1)
    parser.add_argument("--guidance", type=float, default=2.0)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--out", type=Path, default=Path("samples"))
    args = parser.parse_args()
    torch.manual_seed(0)
    dev = device()
    args.out.mkdir(exist_ok=True)
    transform = transforms.Compose([transforms.ToTensor(), transforms.Normalize(0.5, 0.5)])
    digits = datasets.MNIST("data", transform=transform)
    train = AdaptiveDataLoader(digits, batch_size=args.batch_size, shuffle=True, max_local_batch_size=args.micro_batch, num_workers=2, drop_last=True)
    net = Denoiser(args.steps).to(dev)
    optimizer = torch.optim.AdamW(net.parameters(), lr=2e-4)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 0.01, total_iters=1000)
    ema = AveragedModel(net, multi_avg_fn=get_ema_multi_avg_fn(0.999))
    register(ema=ema)
    model = AdaptiveDataParallel(net, optimizer, scheduler)
    diffusion = Diffusion(args.steps, dev)
    rows = csv.writer(LogFile(args.out / "loss.csv"))
    rows.writerow(["batch", "loss"])
    labels = torch.arange(NUM_CLASSES, device=dev).repeat(8)
    for epoch in remaining_epochs_until(args.epochs):
        model.train()
        for x, y in train:
            x, y = x.to(dev), y.to(dev)
            y = torch.where(torch.rand(len(y), device=dev) < args.drop_label, NUM_CLASSES, y)
            t = torch.randint(args.steps, (len(x),), device=dev)
            eps = torch.randn_like(x)
            loss = F.mse_loss(model(diffusion.corrupt(x, t, eps), t, y), eps)
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(net.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            ema.update_parameters(net)
            if train.is_step and train.batch_index % 20 == 0:
                rows.writerow([epoch * len(train) + train.batch_index, f"{loss.item():.5f}"])  # ARGUABLE: the loss of rank 0's last micro-batch, once
        if epoch % 5 == 4 and rank() == 0:
            generator = torch.Generator().manual_seed(1234)
            images = diffusion.sample(ema.module, labels, args.guidance, generator)
            save_image(images, args.out / f"{epoch:03d}.png", nrow=NUM_CLASSES, normalize=True)
    if rank() == 0:
        torch.save(ema.module.state_dict(), args.out / "ema.pt")


if __name__ == "__main__":
    main()
