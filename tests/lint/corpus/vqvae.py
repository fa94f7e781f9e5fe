"""VQ-VAE whose codes are exponential means; dead codes are set anew after each epoch."""
import argparse
import logging
from typing import Tuple

import torch
import torch.nn as nn
import torch.nn.functional as F
from torchvision import datasets, transforms
from torchvision.utils import save_image

from elasticrun import Accumulator, AdaptiveDataLoader, AdaptiveDataParallel, Variables, device, rank, remaining_epochs_until

log = logging.getLogger("vqvae")


class Quantize(nn.Module):
    def __init__(self, dim: int, n_embed: int, decay: float = 0.99, eps: float = 1e-5):
        super().__init__()
        self.decay, self.eps, self.n_embed = decay, eps, n_embed
        embed = torch.randn(dim, n_embed)
        self.register_buffer("embed", embed)
        self.register_buffer("cluster_size", torch.zeros(n_embed))
        self.register_buffer("embed_avg", embed.clone())

    def forward(self, z: torch.Tensor) -> Tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        z = z.permute(0, 2, 3, 1)
        flat = z.reshape(-1, z.shape[-1])
        distance = flat.square().sum(1, True) - 2 * flat @ self.embed + self.embed.square().sum(0, True)
        index = distance.argmin(1)
        if self.training:
            one_hot = F.one_hot(index, self.n_embed).type(flat.dtype)
            self.cluster_size.mul_(self.decay).add_(one_hot.sum(0), alpha=1 - self.decay)  # ARGUABLE: statistics of the share, as BatchNorm's
            self.embed_avg.mul_(self.decay).add_(flat.detach().T @ one_hot, alpha=1 - self.decay)  # ARGUABLE: the same
            n = self.cluster_size.sum()
            size = (self.cluster_size + self.eps) / (n + self.n_embed * self.eps) * n
            self.embed.copy_(self.embed_avg / size)
        quantized = F.embedding(index, self.embed.T).view_as(z)
        diff = (quantized.detach() - z).square().mean()
        return (z + (quantized - z).detach()).permute(0, 3, 1, 2), diff, index


class VQVAE(nn.Module):
    def __init__(self, width: int = 128, dim: int = 64, n_embed: int = 512):
        super().__init__()
        self.encoder = nn.Sequential(nn.Conv2d(3, width, 4, 2, 1), nn.ReLU(), nn.Conv2d(width, width, 4, 2, 1), nn.ReLU(), nn.Conv2d(width, dim, 1))
        self.quantize = Quantize(dim, n_embed)
        self.decoder = nn.Sequential(nn.ConvTranspose2d(dim, width, 4, 2, 1), nn.ReLU(), nn.ConvTranspose2d(width, 3, 4, 2, 1))

    def forward(self, x: torch.Tensor):
        z = self.encoder(x)
        quantized, diff, index = self.quantize(z)
        return self.decoder(quantized), diff, index, z


def commitment(step: int, warmup: int, final: float) -> float:
    return final * min(1.0, step / warmup)


@torch.no_grad()
def evaluate(net: VQVAE, loader: AdaptiveDataLoader, dev: torch.device) -> float:
    net.eval()
    total = Accumulator()
    for x, _ in loader:
        out = net(x.to(dev))[0].cpu()
        total["mse"] += (out - x).square().mean((1, 2, 3)).sum()
        total["n"] += len(x)
    with total.synchronized():
        return total["mse"] / total["n"]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=100)
    parser.add_argument("--batch-size", type=int, default=128)
    parser.add_argument("--beta", type=float, default=0.25)
    parser.add_argument("--beta-warmup", type=int, default=20000)
    parser.add_argument("--dead-below", type=int, default=10)
    args = parser.parse_args()
    logging.basicConfig(level=logging.INFO)
    torch.manual_seed(0)
    dev = device()
    transform = transforms.Compose([transforms.ToTensor(), transforms.Normalize((0.5,) * 3, (0.5,) * 3)])
    train = AdaptiveDataLoader(datasets.CIFAR10("data", transform=transform), batch_size=args.batch_size, shuffle=True, drop_last=True)
    valid = AdaptiveDataLoader(datasets.CIFAR10("data", train=False, transform=transform), batch_size=256, even_batches=False)
    net = VQVAE().to(dev)
    optimizer = torch.optim.Adam(net.parameters(), lr=3e-4)
    model = AdaptiveDataParallel(net, optimizer)
    best = Variables(mse=float("inf"))
    global_step = 0
    for epoch in remaining_epochs_until(args.epochs):
        model.train()
        usage = torch.zeros(net.quantize.n_embed)
        for x, _ in train:
            x = x.to(dev)
            out, diff, index, z = model(x)
            loss = F.mse_loss(out, x) + commitment(global_step, args.beta_warmup, args.beta) * diff
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            usage += torch.bincount(index.cpu(), minlength=len(usage))  # MISTAKE: sum: counts of before the restart and of other replicas are missing, so codes in use count as dead; an Accumulator (or line with: usage = torch.zeros) (or line with: dead = usage)
            global_step += 1  # MISTAKE: lost: 0 again after a restart, so the weight of the commitment warms up anew (or line with: global_step = 0)
        mse = evaluate(net, valid, dev)
        dead = usage < args.dead_below
        if dead.any():
            flat = z.detach().permute(0, 2, 3, 1).reshape(-1, z.shape[1])  # MISTAKE: leftover: z is that of the last batch of a finished loop and does not exist after a restart in the validation (or line with: fresh = flat)
            fresh = flat[torch.randint(len(flat), (int(dead.sum()),))].T
            where = dead.to(dev)
            net.quantize.embed[:, where] = fresh  # ARGUABLE: each replica sets vectors of its own; buffers are those of rank 0 in the next forward pass
            net.quantize.embed_avg[:, where] = fresh  # ARGUABLE: the same
            net.quantize.cluster_size[where] = 1.0  # ARGUABLE: the same
        if rank() == 0:
            log.info("epoch %d mse %.5f dead codes %d", epoch, mse, int(dead.sum()))  # ARGUABLE: marked where usage is counted
            with torch.no_grad():
                pictures = torch.stack([valid.dataset[i][0] for i in range(16)]).to(dev)
                save_image(torch.cat([pictures, net(pictures)[0]]), f"recon_{epoch:03d}.png", nrow=16, normalize=True)
        if mse < best.mse:
            best.mse = mse
            if rank() == 0:
                torch.save(net.state_dict(), "vqvae.pt")


if __name__ == "__main__":
    main()
