"""Tiny NeRF: random rays of all pictures, a coarse field, pictures of a held-out view."""
import argparse
import csv
from pathlib import Path

import imageio.v2 as imageio
import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from elasticrun import AdaptiveDataParallel, LogFile, device, init, rank, remaining_steps_until


def positional(x, bands):
    freqs = 2.0 ** torch.arange(bands, device=x.device)
    angles = (x[..., None, :] * freqs[:, None]).flatten(-2)
    return torch.cat([x, angles.sin(), angles.cos()], -1)


class Field(nn.Module):
    def __init__(self, width=256, bands=10):
        super().__init__()
        self.bands = bands
        size = 3 + 6 * bands
        self.first = nn.Sequential(nn.Linear(size, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU())
        self.second = nn.Sequential(nn.Linear(width + size, width), nn.ReLU(), nn.Linear(width, 4))

    def forward(self, points):
        x = positional(points, self.bands)
        out = self.second(torch.cat([self.first(x), x], -1))
        return out[..., :3].sigmoid(), F.softplus(out[..., 3])


class Renderer(nn.Module):
    def __init__(self, near=2.0, far=6.0, samples=96):
        super().__init__()
        self.field = Field()
        self.near, self.far, self.samples = near, far, samples

    def forward(self, origins, directions):
        edges = torch.linspace(self.near, self.far, self.samples + 1, device=origins.device)
        width = edges[1] - edges[0]
        jitter = torch.rand(len(origins), self.samples, device=origins.device) if self.training else 0.5
        depth = edges[:-1] + width * jitter
        points = origins[:, None] + depth.unsqueeze(-1) * directions[:, None]
        color, density = self.field(points)
        alpha = 1 - torch.exp(-density * width)
        through = torch.cumprod(torch.cat([torch.ones_like(alpha[:, :1]), 1 - alpha[:, :-1] + 1e-10], 1), 1)
        weight = alpha * through
        return (weight[..., None] * color).sum(1) + (1 - weight.sum(1, keepdim=True))


def rays_of(pose, height, width, focal):
    j, i = torch.meshgrid(torch.arange(height), torch.arange(width), indexing="ij")
    directions = torch.stack([(i - width / 2) / focal, -(j - height / 2) / focal, -torch.ones_like(i)], -1)
    directions = (directions[..., None, :] * pose[:3, :3]).sum(-1)
    return pose[:3, 3].expand_as(directions), directions


def load(path):
    data = np.load(path)
    images = torch.from_numpy(data["images"]).float()
    poses = torch.from_numpy(data["poses"]).float()
    height, width = images.shape[1:3]
    rays = [rays_of(p, height, width, float(data["focal"])) for p in poses]
    origins, directions = (torch.stack(r) for r in zip(*rays))
    return images.to(device()), origins.to(device()), directions.to(device())


@torch.no_grad()
def render(net, origins, directions, chunk=4096):
    net.eval()
    parts = [net(o, d) for o, d in zip(origins.flatten(0, 1).split(chunk), directions.flatten(0, 1).split(chunk))]
    net.train()
    return torch.cat(parts).view(origins.shape)


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--data", default="tiny_nerf_data.npz")
    p.add_argument("--steps", type=int, default=50_000)
    p.add_argument("--rays", type=int, default=2048, help="of one replica")
    p.add_argument("--lr", type=float, default=5e-4)
    p.add_argument("--out", type=Path, default=Path("nerf"))
    p.add_argument("--seed", type=int, default=0)
    args = p.parse_args()

    init(save_every=1000)
    torch.manual_seed(args.seed + rank())  # each replica draws rays of its own
    args.out.mkdir(exist_ok=True)
    images, origins, directions = load(args.data)
    held = len(images) - 1
    net = Renderer().to(device())
    optimizer = torch.optim.Adam(net.parameters(), lr=args.lr)
    decay = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.1 ** (1 / args.steps))
    model = AdaptiveDataParallel(net, optimizer, decay)
    log = csv.writer(LogFile(args.out / "psnr.csv"))
    log.writerow(["step", "psnr"])

    pixels = images[:held].reshape(-1, 3)
    origins_flat = origins[:held].reshape(-1, 3)
    directions_flat = directions[:held].reshape(-1, 3)
    model.train()
    for step in remaining_steps_until(args.steps):
        index = torch.randint(len(pixels), (args.rays,), device=device())
        loss = F.mse_loss(model(origins_flat[index], directions_flat[index]), pixels[index])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        decay.step()
        if (step + 1) % 1000 == 0:
            picture = render(net, origins[held], directions[held])
            psnr = -10 * F.mse_loss(picture, images[held]).log10().item()
            log.writerow([step + 1, f"{psnr:.2f}"])
            if rank() == 0:
                imageio.imwrite(args.out / f"{step + 1:06d}.png", (picture.clamp(0, 1) * 255).byte().cpu().numpy())
                print(f"step {step + 1}: psnr {psnr:.2f}")
    if rank() == 0:
        torch.save(net.state_dict(), args.out / "field.pt")


if __name__ == "__main__":
    main()
