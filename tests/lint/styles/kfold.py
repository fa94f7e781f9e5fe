"""K-fold cross-validation in one job."""
from sklearn.model_selection import KFold, StratifiedKFold
import numpy as np
import torch
from torch import nn
from torch.utils.data import Subset

import elasticrun
from elasticrun import Accumulator, AdaptiveDataLoader, AdaptiveDataParallel, Variables

K = 5
EPOCHS = 10


def build():
    net = nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 2))
    return net


def run_fold(fold, dataset, train_idx, val_idx, scores):
    net = build()
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.95)
    model = AdaptiveDataParallel(net, optimizer, scheduler, name=f"model{fold}")
    train_loader = AdaptiveDataLoader(
        Subset(dataset, train_idx), batch_size=32, shuffle=True, name=f"train{fold}"
    )
    val_loader = AdaptiveDataLoader(Subset(dataset, val_idx), batch_size=32, name=f"val{fold}")
    acc = Accumulator(name=f"acc{fold}")
    first = fold * EPOCHS
    for epoch in elasticrun.remaining_epochs_until(first + EPOCHS):
        model.train()
        for x, y in train_loader:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
        model.eval()
        for x, y in val_loader:
            with torch.no_grad():
                hits = (model(x).argmax(1) == y)[: val_loader.num_valid]
            acc["hits"] += int(hits.sum())
        with acc.synchronized():
            scores.last[fold] = acc["hits"] / val_loader.num_samples
            acc.clear()
        scheduler.step()
        print(f"fold {fold} epoch {epoch - first}: {scores.last[fold]:.3f}")


def main():
    rng = np.random.default_rng(0)
    x = torch.tensor(rng.normal(size=(1000, 20)), dtype=torch.float32)
    y = torch.tensor(rng.integers(0, 2, size=1000))
    dataset = torch.utils.data.TensorDataset(x, y)
    elasticrun.init()
    torch.manual_seed(0)
    scores = Variables(name="scores", last=[0.0] * K)
    splits = StratifiedKFold(K, shuffle=True, random_state=1).split(x, y)
    for fold, (train_idx, val_idx) in enumerate(splits):
        run_fold(fold, dataset, train_idx, val_idx, scores)
    print("mean", sum(scores.last) / K)


if __name__ == "__main__":
    main()
