"""A small NeRF: rays of all images are shuffled and taken in turn."""
import argparse
import os

import imageio.v2 as imageio
import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F

from elasticrun import AdaptiveDataParallel, device, rank, remaining_steps_until


def config_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser()
    parser.add_argument("--datafile", default="tiny_nerf_data.npz")
    parser.add_argument("--basedir", default="./logs")
    parser.add_argument("--expname", default="lego")
    parser.add_argument("--N_rand", type=int, default=1024, help="rays per step and replica")
    parser.add_argument("--N_samples", type=int, default=64)
    parser.add_argument("--N_iters", type=int, default=200000)
    parser.add_argument("--lrate", type=float, default=5e-4)
    parser.add_argument("--lrate_decay", type=int, default=250)
    parser.add_argument("--i_print", type=int, default=100)
    parser.add_argument("--i_img", type=int, default=5000)
    return parser


def embed(x: torch.Tensor, frequencies: int) -> torch.Tensor:
    bands = 2.0 ** torch.arange(frequencies, device=x.device)
    angles = (x[..., None, :] * bands[:, None]).flatten(-2)
    return torch.cat([x, angles.sin(), angles.cos()], -1)


class NeRF(nn.Module):
    def __init__(self, width: int = 256, depth: int = 8, skip: int = 4, l_embed: int = 6):
        super().__init__()
        self.l_embed, self.skip = l_embed, skip
        size = 3 + 6 * l_embed
        self.layers = nn.ModuleList(nn.Linear(size if i == 0 else width + (size if i == skip else 0), width) for i in range(depth))
        self.out = nn.Linear(width, 4)

    def forward(self, points: torch.Tensor) -> torch.Tensor:
        x = h = embed(points, self.l_embed)
        for i, layer in enumerate(self.layers):
            h = F.relu(layer(torch.cat([h, x], -1) if i == self.skip and i else h))
        return self.out(h)


def get_rays(height: int, width: int, focal: float, c2w: np.ndarray):
    i, j = np.meshgrid(np.arange(width, dtype=np.float32), np.arange(height, dtype=np.float32), indexing="xy")
    dirs = np.stack([(i - width / 2) / focal, -(j - height / 2) / focal, -np.ones_like(i)], -1)
    rays_d = np.sum(dirs[..., None, :] * c2w[:3, :3], -1)
    return np.broadcast_to(c2w[:3, -1], rays_d.shape), rays_d


def render(net, rays_o: torch.Tensor, rays_d: torch.Tensor, n_samples: int, perturb: bool, near: float = 2.0, far: float = 6.0) -> torch.Tensor:
    z = torch.linspace(near, far, n_samples, device=rays_o.device).expand(len(rays_o), n_samples)
    if perturb:
        z = z + torch.rand_like(z) * (far - near) / n_samples
    raw = net(rays_o[:, None] + rays_d[:, None] * z[..., None])
    dists = torch.cat([z[:, 1:] - z[:, :-1], torch.full_like(z[:, :1], 1e10)], -1)
    alpha = 1 - torch.exp(-F.relu(raw[..., 3]) * dists)
    through = torch.cumprod(torch.cat([torch.ones_like(alpha[:, :1]), 1 - alpha + 1e-10], -1), -1)[:, :-1]
    return ((alpha * through)[..., None] * raw[..., :3].sigmoid()).sum(1)


def main() -> None:
    args = config_parser().parse_args()
    torch.manual_seed(rank())
    dev = device()
    logdir = os.path.join(args.basedir, args.expname)
    os.makedirs(logdir, exist_ok=True)
    data = np.load(args.datafile)
    images, poses, focal = data["images"], data["poses"], float(data["focal"])
    height, width = images.shape[1:3]
    testimg, testpose = images[101], poses[101]
    net = NeRF().to(dev)
    optimizer = torch.optim.Adam(net.parameters(), lr=args.lrate, betas=(0.9, 0.999))
    model = AdaptiveDataParallel(net, optimizer)

    rays = np.stack([np.stack([*get_rays(height, width, focal, pose), image]) for image, pose in zip(images[:100], poses[:100])])
    rays = rays.transpose(0, 2, 3, 1, 4).reshape(-1, 3, 3).astype(np.float32)
    rays = torch.from_numpy(rays[np.random.default_rng(rank()).permutation(len(rays))])
    i_batch = 0
    psnrs, iternums = [], []
    for step in remaining_steps_until(args.N_iters):
        batch = rays[i_batch : i_batch + args.N_rand].to(dev)
        i_batch += args.N_rand  # MISTAKE: lost: the place among the rays is 0 again after a restart, so the first rays come again (or line with: i_batch = 0)
        if i_batch >= len(rays):
            rays = rays[torch.randperm(len(rays))]  # MISTAKE: lost: the order of the second pass and later ones is that of the first again after a restart (or line with: rays = torch.from_numpy)
            i_batch = 0
        rgb = render(model, batch[:, 0], batch[:, 1], args.N_samples, perturb=True)
        loss = F.mse_loss(rgb, batch[:, 2])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

        new_lrate = args.lrate * 0.1 ** (step / (args.lrate_decay * 1000))
        for group in optimizer.param_groups:
            group["lr"] = new_lrate

        if step % args.i_print == 0 and rank() == 0:
            print(f"[TRAIN] Iter: {step} Loss: {loss.item():.5f}")
        if step % args.i_img == 0:
            with torch.no_grad():
                rays_o, rays_d = (torch.from_numpy(r.reshape(-1, 3).astype(np.float32)) for r in get_rays(height, width, focal, testpose))
                rows = [render(net, o.to(dev), d.to(dev), args.N_samples, perturb=False).cpu() for o, d in zip(rays_o.split(4096), rays_d.split(4096))]
            picture = torch.cat(rows).view(height, width, 3).numpy()
            psnrs.append(-10 * np.log10(np.mean((picture - testimg) ** 2)))  # MISTAKE: lost: values of before the restart are missing in the file at the end (or line with: psnrs, iternums = [], []) (or line with: np.savetxt)
            iternums.append(step)  # ARGUABLE: the same list, marked above
            if rank() == 0:
                imageio.imwrite(os.path.join(logdir, f"{step:06d}.png"), (255 * picture).astype(np.uint8))
    if rank() == 0:
        np.savetxt(os.path.join(logdir, "psnr.txt"), np.array([iternums, psnrs]).T)
        torch.save(net.state_dict(), os.path.join(logdir, "final.tar"))


if __name__ == "__main__":
    main()
