"""Cross-validation: the bound of each fold's epochs is a total."""

import numpy as np
import torch
from sklearn.model_selection import KFold
from torch import nn
from torch.utils.data import Subset

from elasticrun import (
    Accumulator,
    AdaptiveDataLoader,
    register,
    remaining_epochs_until,
)

EPOCHS = 10


def run_fold(fold, train, valid, scores):
    net = nn.Linear(10, 2)
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-3)
    register(**{f"net{fold}": net, f"optimizer{fold}": optimizer})
    for _ in remaining_epochs_until(EPOCHS * (fold + 1)):
        for x, y in train:
            optimizer.zero_grad()
            nn.functional.cross_entropy(net(x), y).backward()
            optimizer.step()
    for x, y in valid:
        scores["right"] += (net(x).argmax(1) == y)[: valid.num_valid].sum()


def main(dataset):
    torch.manual_seed(0)
    folds = KFold(5, shuffle=True, random_state=0).split(np.arange(len(dataset)))
    for fold, (train_ids, valid_ids) in enumerate(folds):
        train = AdaptiveDataLoader(Subset(dataset, train_ids), 32, shuffle=True)
        valid = AdaptiveDataLoader(Subset(dataset, valid_ids), 32)
        scores = Accumulator(name=f"scores{fold}")
        run_fold(fold, train, valid, scores)
        with scores.synchronized():
            print(fold, scores["right"] / valid.num_samples)
