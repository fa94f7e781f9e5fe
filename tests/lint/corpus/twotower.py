"""A two-tower retrieval model, trained with negatives of the batch."""
import argparse
import logging
from typing import Dict, Tuple

import numpy as np
import pandas as pd
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import TensorDataset

from elasticrun import Accumulator, AdaptiveDataLoader, AdaptiveDataParallel, Variables, device, rank, remaining_epochs_until

log = logging.getLogger(__name__)


class Tower(nn.Module):
    def __init__(self, size: int, dim: int):
        super().__init__()
        self.embedding = nn.Embedding(size, dim)
        self.layers = nn.Sequential(nn.Linear(dim, 2 * dim), nn.ReLU(), nn.Linear(2 * dim, dim))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return F.normalize(self.layers(self.embedding(ids)), dim=-1)


class TwoTower(nn.Module):
    def __init__(self, users: int, items: int, dim: int = 64):
        super().__init__()
        self.user, self.item = Tower(users, dim), Tower(items, dim)

    def forward(self, users: torch.Tensor, items: torch.Tensor) -> Tuple[torch.Tensor, torch.Tensor]:
        return self.user(users), self.item(items)


def build_index(values: pd.Series) -> Dict[str, int]:
    return {value: i for i, value in enumerate(set(values))}  # MISTAKE: data: strings in a set have another order in each process, so ids get other rows after a restart and on each replica; sorted


def load(path: str):
    frame = pd.read_parquet(path).sort_values("timestamp", kind="stable")
    users, items = build_index(frame["user_id"]), build_index(frame["asin"])
    u = torch.tensor([users[v] for v in frame["user_id"]])
    i = torch.tensor([items[v] for v in frame["asin"]])
    frequency = torch.bincount(i, minlength=len(items)).float() / len(i)
    cut = int(0.9 * len(u))
    return TensorDataset(u[:cut], i[:cut]), TensorDataset(u[cut:], i[cut:]), len(users), len(items), frequency


@torch.no_grad()
def recall(net: TwoTower, loader: AdaptiveDataLoader, num_items: int, dev: torch.device, k: int = 100) -> float:
    net.eval()
    items = net.item(torch.arange(num_items, device=dev))
    total = Accumulator()
    for users, target in loader:
        scores = net.user(users.to(dev)) @ items.T
        top = scores.topk(k, dim=1).indices.cpu()
        total["hits"] += (top == target[:, None]).any(1).sum()  # MISTAKE: pad: a padding sample of a short last batch is counted at 2+ replicas; slice to num_valid (or line with: total["n"] += len(users))
        total["n"] += len(users)
    with total.synchronized():
        return total["hits"] / total["n"]


def train_epoch(model, optimizer, loader, log_frequency: torch.Tensor, temperature: float, dev: torch.device) -> None:
    model.train()
    for users, items in loader:
        users, items = users.to(dev), items.to(dev)
        u, v = model(users, items)
        logits = u @ v.T / temperature - log_frequency[items]
        same = items[:, None] == items[None]
        same.fill_diagonal_(False)
        logits = logits.masked_fill(same, float("-inf"))
        loss = F.cross_entropy(logits, torch.arange(len(users), device=dev))  # MISTAKE: weigh: negatives are those of this replica's share only, so the loss depends on how the batch is cut; gather them and use model.weigh (or line with: logits = u @ v.T) (or line with: loss.backward())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if loader.batch_index % 200 == 0 and rank() == 0:
            log.info("batch %d/%d loss %.4f", loader.batch_index, len(loader), loss.item())


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--data", default="reviews.parquet")
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--batch-size", type=int, default=4096)
    parser.add_argument("--temperature", type=float, default=0.05)
    args = parser.parse_args()
    logging.basicConfig(level=logging.INFO)
    torch.manual_seed(17)
    dev = device()
    train_set, test_set, num_users, num_items, frequency = load(args.data)
    net = TwoTower(num_users, num_items).to(dev)
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, args.epochs)
    model = AdaptiveDataParallel(net, optimizer, scheduler)
    train = AdaptiveDataLoader(train_set, batch_size=args.batch_size, shuffle=True, drop_last=True, name="train")
    test = AdaptiveDataLoader(test_set, batch_size=1024, name="test")
    score = Variables(recall=0.0, epoch=-1)
    log_frequency = frequency.clamp(min=1e-9).log().to(dev)
    for epoch in remaining_epochs_until(args.epochs):
        train_epoch(model, optimizer, train, log_frequency, args.temperature, dev)
        value = recall(net, test, num_items, dev)
        scheduler.step()
        if value > score.recall:
            score.recall, score.epoch = value, epoch
            if rank() == 0:
                torch.save(net.state_dict(), "twotower.pt")
        if rank() == 0:
            log.info("epoch %d recall@100 %.4f (best %.4f)", epoch, value, score.recall)
    with torch.no_grad():
        vectors = net.item(torch.arange(num_items, device=dev)).cpu().numpy()
    np.save("item_vectors.npy", vectors)  # MISTAKE: everyrank: all replicas write one file at once


if __name__ == "__main__":
    main()
