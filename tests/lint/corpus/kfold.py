"""Cross validation, ported: folds continue the numbering of epochs, and each has names of its own."""
import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
from sklearn.datasets import load_breast_cancer
from sklearn.model_selection import KFold
from torch.utils.data import TensorDataset

from elasticrun import Accumulator, AdaptiveDataLoader, AdaptiveDataParallel, Variables, rank, remaining_epochs_until

EPOCHS = 20
FOLDS = 5


def load():
    raw = load_breast_cancer()
    x = torch.tensor(raw.data, dtype=torch.float32)
    return (x - x.mean(0)) / x.std(0), torch.tensor(raw.target)


def run_fold(fold, x, y, train_index, valid_index):
    torch.manual_seed(fold)
    net = nn.Sequential(nn.Linear(30, 32), nn.ReLU(), nn.Dropout(0.2), nn.Linear(32, 2))
    optimizer = torch.optim.Adam(net.parameters(), 1e-2)
    model = AdaptiveDataParallel(net, optimizer, name=f"model{fold}")
    train = AdaptiveDataLoader(TensorDataset(x[train_index], y[train_index]), batch_size=32, shuffle=True, name=f"train{fold}")
    valid = AdaptiveDataLoader(TensorDataset(x[valid_index], y[valid_index]), batch_size=64, name=f"valid{fold}")
    best = Variables(accuracy=0.0, name=f"best{fold}")
    for epoch in remaining_epochs_until(EPOCHS * (fold + 1)):
        model.train()
        for a, b in train:
            loss = F.cross_entropy(model(a), b)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        model.eval()
        total = Accumulator()
        with torch.no_grad():
            for a, b in valid:
                total["hits"] += (model(a).argmax(1) == b)[: valid.num_valid].sum()
        with total.synchronized():
            best.accuracy = max(best.accuracy, total["hits"] / valid.num_samples)
    return best.accuracy


def main():
    x, y = load()
    scores = []
    for fold, (train_index, valid_index) in enumerate(KFold(FOLDS, shuffle=True, random_state=0).split(x)):
        scores.append(run_fold(fold, x, y, train_index, valid_index))
    if rank() == 0:
        print("folds:", [f"{s:.4f}" for s in scores], "mean", np.mean(scores))


if __name__ == "__main__":
    main()
