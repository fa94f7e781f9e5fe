"""Everything in a SimpleNamespace; ported."""
from types import SimpleNamespace

import torch
import torch.nn as nn
import torch.nn.functional as F
from sklearn.datasets import load_wine
from torch.utils.data import TensorDataset

from elasticrun import Accumulator, AdaptiveDataLoader, AdaptiveDataParallel, Variables, rank, remaining_epochs_until

cfg = SimpleNamespace(epochs=60, batch=16, lr=3e-3, hidden=32, seed=4)


def prepare():
    torch.manual_seed(cfg.seed)
    raw = load_wine()
    x = torch.tensor(raw.data, dtype=torch.float32)
    x = (x - x.mean(0)) / x.std(0)
    y = torch.tensor(raw.target)
    order = torch.randperm(len(x))
    x, y = x[order], y[order]
    ns = SimpleNamespace()
    ns.loaders = SimpleNamespace(
        train=AdaptiveDataLoader(TensorDataset(x[:130], y[:130]), batch_size=cfg.batch, shuffle=True),
        valid=AdaptiveDataLoader(TensorDataset(x[130:], y[130:]), batch_size=cfg.batch),
    )
    ns.net = nn.Sequential(nn.Linear(13, cfg.hidden), nn.Tanh(), nn.Linear(cfg.hidden, 3))
    ns.optimizer = torch.optim.Adam(ns.net.parameters(), cfg.lr)
    ns.model = AdaptiveDataParallel(ns.net, ns.optimizer)
    ns.saved = Variables(best=0.0, history=[])
    return ns


def one_epoch(ns):
    confusion = torch.zeros(3, 3)
    for x, y in ns.loaders.train:
        out = ns.model(x)
        loss = F.cross_entropy(out, y)
        ns.optimizer.zero_grad()
        loss.backward()
        ns.optimizer.step()
    total = Accumulator()
    with torch.no_grad():
        for x, y in ns.loaders.valid:
            n = ns.loaders.valid.num_valid
            pred = ns.net(x).argmax(1)
            for cell, count in enumerate(torch.bincount(3 * y[:n] + pred[:n], minlength=9).tolist()):
                total[f"cell{cell}"] += count
    with total.synchronized():
        for cell in range(9):
            confusion[cell // 3, cell % 3] = total[f"cell{cell}"]
    return confusion


def main():
    ns = prepare()
    for epoch in remaining_epochs_until(cfg.epochs):
        confusion = one_epoch(ns)
        accuracy = float(confusion.diag().sum() / confusion.sum())
        ns.saved.history.append(accuracy)
        ns.saved.best = max(ns.saved.best, accuracy)
        if rank() == 0 and epoch % 10 == 9:
            recent = ns.saved.history[-10:]
            print(f"{epoch + 1}: mean of ten {sum(recent) / len(recent):.3f}, best {ns.saved.best:.3f}")
            print(confusion.long().tolist())


if __name__ == "__main__":
    main()
