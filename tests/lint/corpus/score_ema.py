"""Score-based diffusion (VP) with an EMA; a validation sample always has the same noise."""
import argparse
import copy
import math
import os

import torch
import torch.nn as nn
from torch.utils.data import Dataset

from elasticrun import Accumulator, AdaptiveDataLoader, AdaptiveDataParallel, LogFile, Variables
from elasticrun import atomic_save, device, rank, register, remaining_epochs_until


class Digits(Dataset):
    def __init__(self, path):
        self.images = torch.load(path)

    def __len__(self):
        return len(self.images)

    def __getitem__(self, index):
        return self.images[index].float() / 127.5 - 1


class NoisedDigits(Digits):
    def __getitem__(self, index):
        x = super().__getitem__(index)
        generator = torch.Generator().manual_seed(10_000 + int(index))
        return x, torch.rand((), generator=generator), torch.randn(x.shape, generator=generator)


class ScoreNet(nn.Module):
    def __init__(self, width=64, depth=6):
        super().__init__()
        self.register_buffer("freqs", torch.exp(torch.linspace(0, math.log(1000), 32)))
        self.first = nn.Conv2d(1, width, 3, 1, 1)
        self.convs = nn.ModuleList(nn.Conv2d(width, width, 3, 1, 1) for _ in range(depth))
        self.times = nn.ModuleList(nn.Linear(64, width) for _ in range(depth))
        self.last = nn.Conv2d(width, 1, 3, 1, 1)

    def forward(self, x, t):
        angles = t[:, None] * self.freqs
        emb = torch.cat([angles.sin(), angles.cos()], dim=1)
        h = self.first(x)
        for conv, time in zip(self.convs, self.times):
            h = h + conv(torch.relu(h + time(emb)[:, :, None, None]))
        return self.last(h)


class VP:
    def __init__(self, beta_min=0.1, beta_max=20.0):
        self.beta_min, self.beta_max = beta_min, beta_max

    def marginal(self, t):
        log_mean = -0.25 * t**2 * (self.beta_max - self.beta_min) - 0.5 * t * self.beta_min
        mean = log_mean.exp()
        return mean[:, None, None, None], (1 - mean**2).clamp(min=1e-5).sqrt()[:, None, None, None]

    def losses(self, model, x, t, noise):
        mean, std = self.marginal(t)
        return (model(mean * x + std * noise, t) - noise).square().mean(dim=(1, 2, 3))

    @torch.no_grad()
    def sample(self, model, shape, steps, generator):
        x = torch.randn(shape, generator=generator).to(device())
        for i in range(steps, 0, -1):
            t = torch.full((shape[0],), i / steps, device=device())
            beta = self.beta_min + (i / steps) * (self.beta_max - self.beta_min)
            score = -model(x, t) / self.marginal(t)[1]
            x = x + (0.5 * beta * x + beta * score) / steps
            if i > 1:
                x = x + math.sqrt(beta / steps) * torch.randn(shape, generator=generator).to(device())
        return x


class EMA:
    def __init__(self, net, decay):
        self.net = copy.deepcopy(net).eval().requires_grad_(False)
        self.decay, self.updates = decay, 0

    @torch.no_grad()
    def update(self, net):
        self.updates += 1
        decay = min(self.decay, (1 + self.updates) / (10 + self.updates))
        for mean, parameter in zip(self.net.parameters(), net.parameters()):
            mean.lerp_(parameter, 1 - decay)

    def state_dict(self):
        return {"net": self.net.state_dict(), "updates": self.updates}

    def load_state_dict(self, state):
        self.net.load_state_dict(state["net"])
        self.updates = state["updates"]


@torch.no_grad()
def evaluate(process, net, loader):
    sums = Accumulator()
    for x, t, noise in loader:
        losses = process.losses(net, x.to(device()), t.to(device()), noise.to(device())).cpu()
        sums["all"] += losses.sum().item()
        sums["late"] += losses[t > 0.5].sum().item()
        sums["n"] += len(x)
    with sums.synchronized():
        return float(sums["all"] / sums["n"]), float(sums["late"] / sums["n"])


def main(args):
    torch.manual_seed(args.seed + rank())
    net = ScoreNet()
    if args.init:
        net.load_state_dict(torch.load(args.init))
    net = net.to(device())
    optimizer = torch.optim.AdamW(net.parameters(), lr=args.lr)
    warmup = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 1000))
    model = AdaptiveDataParallel(net, optimizer, warmup)
    ema, process = EMA(net, args.decay), VP()
    register(ema=ema)
    train = AdaptiveDataLoader(
        Digits(args.train), batch_size=args.batch_size, max_local_batch_size=args.max_local,
        shuffle=True, drop_last=True, name="train",
    )
    valid = AdaptiveDataLoader(NoisedDigits(args.valid), batch_size=256, even_batches=False, name="valid")
    best = Variables(loss=float("inf"), segment=-1)
    log = LogFile(os.path.join(args.out, "log.txt"))

    for segment in remaining_epochs_until(args.segments):
        model.train()
        seen = Accumulator()
        for x in train.batches(args.segment_steps):
            x = x.to(device())
            t = torch.rand(len(x), device=device()) * (1 - 1e-3) + 1e-3
            loss = process.losses(model, x, t, torch.randn_like(x)).mean()
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            warmup.step()
            if train.is_step:
                ema.update(net)
            seen["loss"] += loss.item() * train.num_valid
            seen["n"] += train.num_valid
        with seen.synchronized():
            train_loss = float(seen["loss"] / seen["n"])
        valid_loss, late = evaluate(process, ema.net, valid)
        log.write(f"{train.finished_batches} {train_loss:.5f} {valid_loss:.5f} {late:.5f}\n")
        if valid_loss < best.loss:
            best.loss, best.segment = valid_loss, segment
        if rank() == 0:
            generator = torch.Generator().manual_seed(segment)
            pictures = process.sample(ema.net, (16, 1, 28, 28), 200, generator)
            atomic_save(pictures.cpu(), os.path.join(args.out, f"samples_{segment:03d}.pt"))
            if best.segment == segment:
                atomic_save(ema.net.state_dict(), os.path.join(args.out, "ema_best.pt"))


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    for name, default in dict(
        train="mnist_train.pt", valid="mnist_valid.pt", init="", out="score", batch_size=256, max_local=64,
        segments=100, segment_steps=1000, seed=0, lr=2e-4, decay=0.9999,
    ).items():
        parser.add_argument(f"--{name}", type=type(default), default=default)
    arguments = parser.parse_args()
    os.makedirs(arguments.out, exist_ok=True)
    main(arguments)
