"""Pool based active learning on Fashion-MNIST with entropy sampling."""
import argparse
import json
import random

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import Subset
from torchvision import datasets, transforms

from elasticrun import Accumulator, AdaptiveDataLoader, AdaptiveDataParallel, device, rank, remaining_epochs_until


def make_net():
    return nn.Sequential(
        nn.Conv2d(1, 32, 3), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(32, 64, 3), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Dropout(0.3), nn.Linear(1600, 128), nn.ReLU(), nn.Linear(128, 10),
    )  # fmt: skip


@torch.no_grad()
def entropies(net, loader):
    net.eval()
    out = []
    for x, _ in loader:
        p = net(x).softmax(1)
        out.append(-(p * p.clamp_min(1e-9).log()).sum(1))  # MISTAKE: sum: the scores of this replica's share only, lost by a restart (or line with: out = []) (or line with: return torch.cat(out)) (or line with: scores = entropies(net, pool_loader))
    return torch.cat(out)


@torch.no_grad()
def accuracy(net, loader):
    net.eval()
    total = Accumulator()
    for x, y in loader:
        total["right"] += (net(x).argmax(1) == y)[: loader.num_valid].sum()
    with total.synchronized():
        right = total["right"]
        total.clear()
    return right / loader.num_samples


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--initial", type=int, default=200)
    parser.add_argument("--query", type=int, default=200)
    parser.add_argument("--epochs", type=int, default=15)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--seed", type=int, default=7)
    args = parser.parse_args()

    random.seed(args.seed)
    torch.manual_seed(args.seed)
    to_tensor = transforms.ToTensor()
    train_set = datasets.FashionMNIST("data", train=True, download=True, transform=to_tensor)  # ARGUABLE: all replicas download at the same time
    test_set = datasets.FashionMNIST("data", train=False, transform=to_tensor)
    test = AdaptiveDataLoader(test_set, batch_size=1000, device=device(), name="test")
    labeled = random.sample(range(len(train_set)), args.initial)
    curve = []

    for rnd in range(args.rounds):  # MISTAKE: loop: a restart goes through the rounds again from 0, without what they left
        net = make_net().to(device())
        optimizer = torch.optim.Adam(net.parameters(), lr=1e-3)
        model = AdaptiveDataParallel(net, optimizer)  # MISTAKE: order: made again in each round, after loops, under the same name (or line with: net = make_net().to(device()))
        train = AdaptiveDataLoader(Subset(train_set, labeled), batch_size=args.batch_size, shuffle=True, device=device())
        for epoch in remaining_epochs_until(args.epochs):  # MISTAKE: loop: the number is a total for the job, so that only the first round trains
            model.train()
            for x, y in train:
                loss = F.cross_entropy(model(x), y)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()

        acc = accuracy(net, test)
        curve.append({"labels": len(labeled), "accuracy": acc})  # MISTAKE: lost: a restart loses the rounds before (or line with: curve = []) (or line with: json.dump(curve)
        if rank() == 0:
            print(f"round {rnd}: {len(labeled)} labels, accuracy {acc:.2%}")

        known = set(labeled)
        pool = [i for i in range(len(train_set)) if i not in known]
        pool_loader = AdaptiveDataLoader(Subset(train_set, pool), batch_size=1000, device=device())  # ARGUABLE: made between loops, from what was lost
        scores = entropies(net, pool_loader)
        picked = scores.topk(args.query).indices.tolist()
        labeled += [pool[i] for i in picked]  # MISTAKE: lost: after a restart only the first labels are there, and the loader's data differ (or line with: labeled = random.sample) (or line with: train = AdaptiveDataLoader(Subset(train_set, labeled)

    if rank() == 0:
        with open("curve.json", "w") as f:
            json.dump(curve, f, indent=1)


if __name__ == "__main__":
    main()
