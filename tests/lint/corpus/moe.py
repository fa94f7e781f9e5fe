"""A mixture-of-experts language model over bytes; the router is balanced by a bias."""
import argparse
import math
from typing import Tuple

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
import wandb
from torch.utils.data import Dataset

from elasticrun import Accumulator, AdaptiveDataLoader, AdaptiveDataParallel, device, rank
from elasticrun import RandomWindows


class Bytes(Dataset):
    def __init__(self, path: str, block: int):
        self.data, self.block = np.memmap(path, dtype=np.uint8, mode="r"), block

    def __len__(self) -> int:
        return len(self.data) - self.block

    def __getitem__(self, i: int) -> Tuple[torch.Tensor, torch.Tensor]:
        chunk = torch.from_numpy(self.data[i : i + self.block + 1].astype(np.int64))
        return chunk[:-1], chunk[1:]


class MoE(nn.Module):
    """Top-k routing without an auxiliary loss: a bias moves tokens to idle experts."""

    def __init__(self, dim: int, experts: int, k: int = 2, speed: float = 1e-3):
        super().__init__()
        self.k, self.speed = k, speed
        self.gate = nn.Linear(dim, experts, bias=False)
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim)) for _ in range(experts))
        self.bias = torch.zeros(experts)  # MISTAKE: unreg: no buffer of the net, so the bias is in no checkpoint and zero again after a restart (and each replica's own); register_buffer (or line with: self.bias += self.speed)
        self.load = torch.zeros(experts)  # ARGUABLE: no buffer either, but made anew by each forward pass

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        flat = x.flatten(0, 1)
        affinity = self.gate(flat).sigmoid()
        chosen = (affinity + self.bias.to(x.device)).topk(self.k, dim=-1).indices
        weights = affinity.gather(1, chosen)
        weights = weights / weights.sum(1, keepdim=True)
        if self.training:
            self.load = torch.bincount(chosen.flatten(), minlength=len(self.experts)).float().cpu()  # ARGUABLE: the load of this replica's tokens only
        out = torch.zeros_like(flat)
        for e, expert in enumerate(self.experts):
            token, slot = torch.where(chosen == e)
            out = out.index_add(0, token, expert(flat[token]) * weights[token, slot, None])
        return out.view_as(x)

    def rebalance(self) -> None:
        self.bias += self.speed * torch.sign(self.load.mean() - self.load)  # ARGUABLE: marked where the bias is made


class Block(nn.Module):
    def __init__(self, dim: int, heads: int, experts: int):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.attention = nn.MultiheadAttention(dim, heads, batch_first=True)
        self.moe = MoE(dim, experts)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1], device=x.device)
        h = self.norm1(x)
        x = x + self.attention(h, h, h, attn_mask=mask, need_weights=False)[0]
        return x + self.moe(self.norm2(x))


class Model(nn.Module):
    def __init__(self, block: int, dim: int = 256, depth: int = 6, experts: int = 8):
        super().__init__()
        self.tokens, self.positions = nn.Embedding(256, dim), nn.Embedding(block, dim)
        self.blocks = nn.Sequential(*[Block(dim, 8, experts) for _ in range(depth)])
        self.head = nn.Linear(dim, 256)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        positions = self.positions(torch.arange(x.shape[1], device=x.device))
        return self.head(self.blocks(self.tokens(x) + positions))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--train-file", default="enwik8.train")
    parser.add_argument("--valid-file", default="enwik8.valid")
    parser.add_argument("--steps", type=int, default=50000)
    parser.add_argument("--eval-every", type=int, default=1000)
    parser.add_argument("--batch-size", type=int, default=256)
    parser.add_argument("--micro-batch-size", type=int, default=32)
    parser.add_argument("--block", type=int, default=256)
    args = parser.parse_args()
    wandb.init(project="moe-enwik8", config=vars(args))  # MISTAKE: name: each replica, and each start, opens a run of its own; on rank 0, with an id and resume="allow"
    torch.manual_seed(0)
    dev = device()
    train_set, valid_set = Bytes(args.train_file, args.block), Bytes(args.valid_file, args.block)
    train_order = RandomWindows(len(train_set.data), args.block + 1, num_samples=100_000)
    train = AdaptiveDataLoader(train_set, batch_size=args.batch_size, sampler=train_order, max_local_batch_size=args.micro_batch_size, drop_last=True)
    valid = AdaptiveDataLoader(valid_set, batch_size=64, sampler=list(range(0, len(valid_set), args.block)))
    net = Model(args.block).to(dev)
    optimizer = torch.optim.AdamW(net.parameters(), lr=3e-4, betas=(0.9, 0.95))
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 3e-4, total_steps=args.steps)
    model = AdaptiveDataParallel(net, optimizer, scheduler, find_unused_parameters=True)
    total = Accumulator(name="valid")
    model.train()
    for x, y in train.batches(args.steps):
        x, y = x.to(dev), y.to(dev)
        loss = F.cross_entropy(model(x).flatten(0, 1), y.flatten())
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        for block in net.blocks:
            block.moe.rebalance()  # MISTAKE: cut: with max_local_batch_size the bias moves once for each micro-batch, so more often with fewer replicas; test train.is_step
        if train.is_step and train.finished_batches % args.eval_every == 0:
            net.eval()
            with torch.no_grad():
                for a, b in valid:
                    nll = F.cross_entropy(net(a.to(dev)).transpose(1, 2), b.to(dev), reduction="none")
                    total["nll"] += nll.mean(1)[: valid.num_valid].sum()
                    total["n"] += valid.num_valid
            with total.synchronized():
                bits = total["nll"] / total["n"] / math.log(2)
                total.clear()
            net.train()
            wandb.log({"valid/bits": bits, "train/loss": loss.item()}, step=train.finished_batches)  # ARGUABLE: by all replicas, marked where the run is opened
            if rank() == 0:
                print(f"step {train.finished_batches}: {bits:.4f} bits")
                torch.save(net.state_dict(), "moe.pt")


if __name__ == "__main__":
    main()
