"""A small DLRM for click-through rates on Criteo-like arrays.

    elasticrun run --replicas 8 dlrm_ctr.py --data criteo/ --mini-batch-size 2048
"""
import argparse
import json
import os
import urllib.request
from typing import NamedTuple

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import Dataset

from elasticrun import Accumulator, AdaptiveDataLoader, AdaptiveDataParallel, LogFile, Variables
from elasticrun import atomic_save, device, once, rank, remaining_epochs_until, world_size

BINS = 200


class Sizes(NamedTuple):
    dense: int
    tables: tuple


class Criteo(Dataset):
    def __init__(self, folder, split):
        load = lambda part: np.load(os.path.join(folder, f"{split}_{part}.npy"), mmap_mode="r")
        self.dense, self.sparse, self.clicks = load("dense"), load("sparse"), load("clicks")

    def __len__(self):
        return len(self.clicks)

    def __getitem__(self, i):
        return (
            torch.from_numpy(np.array(self.dense[i], dtype=np.float32)),
            torch.from_numpy(np.array(self.sparse[i], dtype=np.int64)),
            float(self.clicks[i]),
        )


class DLRM(nn.Module):
    def __init__(self, sizes, dim):
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(n, dim) for n in sizes.tables)
        self.bottom = nn.Sequential(nn.Linear(sizes.dense, 256), nn.ReLU(), nn.Linear(256, dim), nn.ReLU())
        n = len(sizes.tables) + 1
        self.register_buffer("pairs", torch.tril_indices(n, n, -1))
        self.top = nn.Sequential(nn.Linear(dim + n * (n - 1) // 2, 256), nn.ReLU(), nn.Linear(256, 1))

    def forward(self, dense, sparse):
        bottom = self.bottom(dense)
        rows = torch.stack([bottom] + [t(sparse[:, i]) for i, t in enumerate(self.tables)], dim=1)
        products = torch.bmm(rows, rows.transpose(1, 2))[:, self.pairs[0], self.pairs[1]]
        return self.top(torch.cat([bottom, products], dim=1)).squeeze(1)


class RunningNorm:
    """Standardizes dense features by a running mean and variance (momentum)."""

    def __init__(self, width, momentum=0.001):
        self.mean = torch.zeros(width)
        self.var = torch.ones(width)
        self.momentum = momentum

    def observe(self, x):
        self.mean.lerp_(x.mean(0), self.momentum)
        self.var.lerp_(x.var(0, unbiased=False), self.momentum)
        return self

    def __call__(self, x):
        return (x - self.mean) / (self.var + 1e-5).sqrt()


def notify(url, text):
    data = json.dumps({"text": text}).encode()
    urllib.request.urlopen(urllib.request.Request(url, data, {"Content-Type": "application/json"}))


@torch.no_grad()
def inference(model, norm, loader):
    """Log loss, and the AUC from histograms of the scores."""
    model.eval()
    sums = Accumulator()
    for dense, sparse, clicks in loader:
        logits = model(norm(dense).to(device()), sparse.to(device())).cpu()
        clicks = clicks.float()
        sums["loss"] += F.binary_cross_entropy_with_logits(logits, clicks, reduction="sum").item()
        for kind, chosen in (("p", clicks > 0.5), ("n", clicks <= 0.5)):
            counts = torch.histc(logits[chosen].sigmoid(), BINS, 0.0, 1.0)
            sums.update({f"{kind}{i}": count for i, count in enumerate(counts.tolist())})
    with sums.synchronized():
        p = np.array([float(sums[f"p{i}"]) for i in range(BINS)])
        n = np.array([float(sums[f"n{i}"]) for i in range(BINS)])
        loss = float(sums["loss"]) / (p.sum() + n.sum())
    below = np.concatenate([[0.0], n.cumsum()[:-1]])
    return loss, float((p * (below + 0.5 * n)).sum() / (p.sum() * n.sum()))


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--data", required=True)
    parser.add_argument("--mini-batch-size", type=int, default=2048)
    parser.add_argument("--test-mini-batch-size", type=int, default=16384)
    parser.add_argument("--test-freq", type=int, default=5000)
    parser.add_argument("--segments", type=int, default=40)
    parser.add_argument("--dim", type=int, default=16)
    parser.add_argument("--lr", type=float, default=0.1)
    parser.add_argument("--warmup", type=int, default=2000)
    parser.add_argument("--webhook", default=None)
    args = parser.parse_args()
    torch.manual_seed(7)

    train_set, test_set = Criteo(args.data, "train"), Criteo(args.data, "test")
    with open(os.path.join(args.data, "sizes.json")) as file:
        sizes = Sizes(train_set.dense.shape[1], tuple(json.load(file)))
    local_bs = args.mini_batch_size // world_size()
    train = AdaptiveDataLoader(train_set, batch_size=local_bs, shuffle=True, drop_last=True, num_workers=4, name="train")  # MISTAKE: world: batch_size is that of all replicas together, so the global batch shrinks with the number of replicas, and a restart with another number finds another batch size (or line with: local_bs = args.mini_batch_size // world_size())
    test = AdaptiveDataLoader(test_set, batch_size=args.test_mini_batch_size, even_batches=False, name="test")

    dlrm = DLRM(sizes, args.dim).to(device())
    dense_opt = torch.optim.Adagrad([*dlrm.bottom.parameters(), *dlrm.top.parameters()], lr=args.lr)
    table_opt = torch.optim.SGD(dlrm.tables.parameters(), lr=args.lr)
    ramp = lambda step: min(1.0, (step + 1) / args.warmup)
    schedulers = [torch.optim.lr_scheduler.LambdaLR(o, ramp) for o in (dense_opt, table_opt)]
    model = AdaptiveDataParallel(dlrm, [dense_opt, table_opt], schedulers)
    norm = RunningNorm(sizes.dense)  # MISTAKE: unreg: its mean and variance are registered nowhere: after a restart they are 0 and 1 again, while the model was trained with others; and each replica has those of its own share (or line with: self.mean = torch.zeros(width)) (or line with: self.var = torch.ones(width)) (or line with: norm.observe(dense)) (or line with: self.mean.lerp_(x.mean(0), self.momentum)) (or line with: self.var.lerp_()
    best = Variables(auc=0.0, logloss=float("inf"))
    log = LogFile("dlrm_log.txt")

    if args.webhook and rank() == 0 and once("started"):  # MISTAKE: once: it is collective, and is asked on rank 0 only; test the rank behind it (or line with: notify(args.webhook, f)
        notify(args.webhook, f"DLRM started on {args.data}")

    for segment in remaining_epochs_until(args.segments):
        model.train()
        for dense, sparse, clicks in train.batches(args.test_freq):
            norm.observe(dense)
            logits = model(norm(dense).to(device()), sparse.to(device()))
            loss = F.binary_cross_entropy_with_logits(logits, clicks.float().to(device()))
            dense_opt.zero_grad()
            table_opt.zero_grad()
            loss.backward()
            dense_opt.step()
            table_opt.step()
            for scheduler in schedulers:
                scheduler.step()
        logloss, auc = inference(model, norm, test)
        log.write(f"it {train.finished_batches} loss {logloss:.6f} auc {auc:.6f}\n")
        best.logloss = min(best.logloss, logloss)
        if auc > best.auc:
            best.auc = auc
            if rank() == 0:
                atomic_save(dlrm.state_dict(), "dlrm_best.pt")
    if rank() == 0:
        print(f"best AUC {best.auc:.4f}, best log loss {best.logloss:.4f}")


if __name__ == "__main__":
    main()
