"""Trains LightGCN, and tests it in every tenth epoch before training goes on."""
import argparse
import os
import time

import numpy as np
import torch
from dataloader import BPRTriples, Interactions, Users
from model import LightGCN

from elasticrun import Accumulator, AdaptiveDataLoader, AdaptiveDataParallel, device, rank, remaining_epochs_until


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Go lightGCN")
    parser.add_argument("--data", default="data/gowalla")
    parser.add_argument("--bpr-batch", type=int, default=2048)
    parser.add_argument("--recdim", type=int, default=64)
    parser.add_argument("--layer", type=int, default=3)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--decay", type=float, default=1e-4)
    parser.add_argument("--topk", type=int, default=20)
    parser.add_argument("--epochs", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=2020)
    parser.add_argument("--path", default="checkpoints")
    return parser.parse_args()


def bpr_train(model, optimizer, loader, decay: float, dev: torch.device) -> None:
    model.train()
    for triples in loader:
        users, positive, negative = triples.to(dev).unbind(1)
        loss, reg_loss = model(users, positive, negative)
        loss = loss + decay * reg_loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def test(net: LightGCN, loader: AdaptiveDataLoader, data: Interactions, topk: int, dev: torch.device) -> float:
    net.eval()
    total = Accumulator()
    for users in loader:
        scores = net.scores(users.to(dev)).cpu()
        for row, user in list(zip(scores, users.tolist()))[: loader.num_valid]:
            row[data.positives[user]] = float("-inf")
            hits = np.isin(row.topk(topk).indices.numpy(), data.held_out[user]).sum()
            total["recall"] += float(hits / len(data.held_out[user]))
            total["users"] += 1
    with total.synchronized():
        return total["recall"] / total["users"]


def main() -> None:
    args = parse_args()
    torch.manual_seed(args.seed)
    np.random.seed(args.seed)
    dev = device()
    os.makedirs(args.path, exist_ok=True)
    data = Interactions(args.data)
    train_set = BPRTriples(data)
    train = AdaptiveDataLoader(train_set, batch_size=args.bpr_batch, shuffle=True, name="bpr")
    users = AdaptiveDataLoader(Users(data), batch_size=400, name="users")
    net = LightGCN(data.num_users, data.num_items, data.graph().to(dev), args.recdim, args.layer).to(dev)
    optimizer = torch.optim.Adam(net.parameters(), lr=args.lr)
    model = AdaptiveDataParallel(net, optimizer)
    best_recall = 0.0
    for epoch in remaining_epochs_until(args.epochs):
        start = time.time()
        if epoch % 10 == 0:
            recall = test(net, users, data, args.topk, dev)
            if recall > best_recall:
                best_recall = recall  # MISTAKE: lost: 0 after a restart in a later epoch, so a worse model overwrites the best one (or line with: best_recall = 0.0)
                if rank() == 0:
                    torch.save(net.state_dict(), f"{args.path}/lgn-best.pth.tar")  # ARGUABLE: in front of the training, so a restart there saves weights of within the epoch
            if rank() == 0:
                with open(f"{args.path}/recall.txt", "a") as f:
                    f.write(f"{epoch} {recall:.5f}\n")  # MISTAKE: effect: between the test and the training, so a restart in the latter appends the line again (or line with: with open(f"{args.path}/recall.txt", "a"))
        train_set.resample()  # ARGUABLE: the draw in front of the loop, marked in dataloader.py
        bpr_train(model, optimizer, train, args.decay, dev)
        if rank() == 0:
            print(f"EPOCH[{epoch + 1}/{args.epochs}] {time.time() - start:.1f} s")
    if rank() == 0:
        torch.save(net.state_dict(), f"{args.path}/lgn-last.pth.tar")


if __name__ == "__main__":
    main()
