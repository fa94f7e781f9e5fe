"""Matrix factorisation with BPR on MovieLens; leave-one-out HR@10 and NDCG@10; early stopping."""
import argparse

import numpy as np
import pandas as pd
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import Dataset

from elasticrun import (
    Accumulator,
    AdaptiveDataLoader,
    AdaptiveDataParallel,
    Variables,
    device,
    rank,
    remaining_epochs_until,
)


def read_ratings(path):
    frame = pd.read_csv(path, sep="\t", names=["user", "item", "rating", "time"])
    frame["user"] = frame["user"].astype("category").cat.codes
    frame["item"] = frame["item"].astype("category").cat.codes
    frame = frame.sort_values(["user", "time", "item"], kind="stable")
    last = frame.groupby("user").tail(1)
    rest = frame.drop(last.index)
    return rest, last, frame["user"].max() + 1, frame["item"].max() + 1


class Triples(Dataset):
    """(user, an item that was rated, an item that was not)."""

    def __init__(self, frame, n_items):
        self.users, self.items = frame["user"].to_numpy(), frame["item"].to_numpy()
        self.seen = set(zip(self.users.tolist(), self.items.tolist()))
        self.n_items = n_items

    def __len__(self):
        return len(self.users)

    def __getitem__(self, i):
        user = int(self.users[i])
        negative = np.random.randint(self.n_items)
        while (user, negative) in self.seen:
            negative = np.random.randint(self.n_items)
        return user, int(self.items[i]), int(negative)


class Ranking(Dataset):
    """The held-out item first, then 99 others, always the same."""

    def __init__(self, last, n_items, others=99, seed=42):
        generator = np.random.default_rng(seed)
        users, items = last["user"].to_numpy(), last["item"].to_numpy()
        self.users = torch.as_tensor(users, dtype=torch.long)
        rest = generator.integers(0, n_items, (len(last), others))
        self.candidates = torch.as_tensor(np.concatenate([items[:, None], rest], 1), dtype=torch.long)

    def __len__(self):
        return len(self.users)

    def __getitem__(self, i):
        return self.users[i], self.candidates[i]


class MF(nn.Module):
    def __init__(self, n_users, n_items, dim):
        super().__init__()
        self.user, self.item = nn.Embedding(n_users, dim), nn.Embedding(n_items, dim)
        self.bias = nn.Embedding(n_items, 1)
        nn.init.normal_(self.user.weight, std=0.05)
        nn.init.normal_(self.item.weight, std=0.05)
        nn.init.zeros_(self.bias.weight)

    def forward(self, users, items):
        u = self.user(users)[:, None]
        return (u * self.item(items)).sum(-1) + self.bias(items).squeeze(-1)


class TopK:
    def __init__(self, k, loader):
        self.k, self.loader, self.sums = k, loader, Accumulator()

    def update(self, scores):
        scores = scores[: self.loader.num_valid]
        position = (scores[:, 1:] >= scores[:, :1]).sum(1)
        hit = position < self.k
        self.sums["hr"] += hit.sum()
        self.sums["ndcg"] += (hit / torch.log2(position + 2.0)).sum()
        self.sums["n"] += len(scores)

    def compute(self):
        with self.sums.synchronized():
            return self.sums["hr"] / self.sums["n"], self.sums["ndcg"] / self.sums["n"]


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--ratings", default="ml-100k/u.data")
    parser.add_argument("--dim", type=int, default=64)
    parser.add_argument("--epochs", type=int, default=200)
    parser.add_argument("--batch-size", type=int, default=2048)
    parser.add_argument("--patience", type=int, default=10)
    args = parser.parse_args()

    torch.manual_seed(0)
    rest, last, n_users, n_items = read_ratings(args.ratings)
    train = AdaptiveDataLoader(
        Triples(rest, n_items), batch_size=args.batch_size, shuffle=True, seed_each="sample", num_workers=4, device=device()
    )
    valid = AdaptiveDataLoader(Ranking(last, n_items), batch_size=256, device=device())
    net = MF(int(n_users), int(n_items), args.dim).to(device())
    optimizer = torch.optim.AdamW(net.parameters(), lr=2e-3, weight_decay=1e-4)
    model = AdaptiveDataParallel(net, optimizer)
    best = Variables(ndcg=0.0, epoch=-1)

    for epoch in remaining_epochs_until(args.epochs):
        model.train()
        for users, liked, other in train:
            scores = model(users, torch.stack([liked, other], 1))
            loss = -F.logsigmoid(scores[:, 0] - scores[:, 1]).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        model.eval()
        metric = TopK(10, valid)
        with torch.no_grad():
            for users, candidates in valid:
                metric.update(model(users, candidates))
        hr, ndcg = metric.compute()
        if rank() == 0:
            print(f"epoch {epoch:3d}  HR@10 {hr:.4f}  NDCG@10 {ndcg:.4f}")
        if ndcg > best.ndcg:
            best.ndcg, best.epoch = float(ndcg), epoch
            if rank() == 0:
                torch.save(net.state_dict(), "bpr_best.pt")
        elif epoch - best.epoch >= args.patience:
            break


if __name__ == "__main__":
    main()
