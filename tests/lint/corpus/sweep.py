"""A sweep of learning rates, one model after the other."""
import itertools
import json
import random

import torch
import torch.nn as nn
import torch.nn.functional as F
import torchvision
from torchvision.transforms import ToTensor

from elasticrun import Accumulator, AdaptiveDataLoader, AdaptiveDataParallel, device, rank, remaining_epochs_until

GRID = list(itertools.product([1e-2, 1e-3, 1e-4], [0.0, 0.3], [64, 256]))
random.shuffle(GRID)  # MISTAKE: data: without a seed the order of trials is another one with each start and replica
EPOCHS = 3
torch.manual_seed(0)
dev = device()
train_set = torchvision.datasets.USPS("data", transform=ToTensor())
test_set = torchvision.datasets.USPS("data", train=False, transform=ToTensor())
train = AdaptiveDataLoader(train_set, batch_size=64, shuffle=True)
test = AdaptiveDataLoader(test_set, batch_size=256)


def trial(number, lr, dropout, width):
    net = nn.Sequential(nn.Flatten(), nn.Linear(256, width), nn.ReLU(), nn.Dropout(dropout), nn.Linear(width, 10)).to(dev)
    optimizer = torch.optim.Adam(net.parameters(), lr=lr)
    model = AdaptiveDataParallel(net, optimizer, name=f"trial{number}")
    accuracy = 0.0
    for epoch in remaining_epochs_until((number + 1) * EPOCHS):
        model.train()
        for x, y in train:
            loss = F.cross_entropy(model(x.to(dev)), y.to(dev))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        model.eval()
        total = Accumulator()
        with torch.no_grad():
            for x, y in test:
                total["hits"] += (model(x.to(dev)).argmax(1) == y.to(dev))[: test.num_valid].sum()
        with total.synchronized():
            accuracy = total["hits"] / test.num_samples  # MISTAKE: lost: of trials that are finished nothing is left after a restart, they count as 0.0 (or line with: accuracy = 0.0) (or line with: return accuracy) (or line with: results.append)
    return accuracy


results = []
for number, (lr, dropout, width) in enumerate(GRID):
    accuracy = trial(number, lr, dropout, width)
    results.append({"lr": lr, "dropout": dropout, "width": width, "accuracy": accuracy})
    if rank() == 0:
        with open("sweep.jsonl", "a") as f:  # MISTAKE: effect: lines of finished trials are appended again by each start
            f.write(json.dumps(results[-1]) + "\n")

if rank() == 0:
    best = max(results, key=lambda r: r["accuracy"])
    print("best", best)
