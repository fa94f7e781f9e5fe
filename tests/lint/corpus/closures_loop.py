"""Closures instead of classes; ported."""
import torch
import torch.nn as nn
import torch.nn.functional as F
import torchvision
from torchvision.transforms import ToTensor

from elasticrun import Accumulator, AdaptiveDataLoader, AdaptiveDataParallel, LogFile, Variables, device, rank, remaining_epochs_until


def make_step(model, optimizer, dev):
    def step(x, y):
        loss = F.cross_entropy(model(x.to(dev)), y.to(dev))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step


def make_evaluator(model, loader, dev):
    def evaluate():
        model.eval()
        total = Accumulator()
        with torch.no_grad():
            for x, y in loader:
                total["hits"] += (model(x.to(dev)).argmax(1) == y.to(dev))[: loader.num_valid].sum()
        with total.synchronized():
            return total["hits"] / loader.num_samples

    return evaluate


def make_tracker(patience):
    kept = Variables(best=0.0, misses=0)

    def track(value):
        kept.misses = 0 if value > kept.best else kept.misses + 1
        kept.best = max(kept.best, value)
        return kept.misses == 0

    def tired():
        return kept.misses >= patience

    return track, tired, lambda: kept.best


def make_logger(path):
    file = LogFile(path)

    def log(**values):
        file.write("\t".join(f"{k}={v}" for k, v in values.items()) + "\n")

    return log


def main():
    torch.manual_seed(0)
    dev = device()
    train = AdaptiveDataLoader(torchvision.datasets.FashionMNIST("data", transform=ToTensor()), batch_size=128, shuffle=True)
    test = AdaptiveDataLoader(torchvision.datasets.FashionMNIST("data", train=False, transform=ToTensor()), batch_size=500)
    net = nn.Sequential(nn.Flatten(), nn.Linear(784, 256), nn.ReLU(), nn.Linear(256, 10)).to(dev)
    optimizer = torch.optim.Adam(net.parameters(), 1e-3)
    model = AdaptiveDataParallel(net, optimizer)
    step, evaluate = make_step(model, optimizer, dev), make_evaluator(model, test, dev)
    track, tired, best = make_tracker(patience=5)
    log = make_logger("fashion.log")
    for epoch in remaining_epochs_until(60):
        if tired():
            break
        model.train()
        total = Accumulator()
        worst = None
        for x, y in train:
            loss = step(x, y)
            total["loss"] += loss.item() * train.num_valid
            worst = loss if worst is None else torch.maximum(worst, loss)  # ARGUABLE: carried from batch to batch, but printed only
            if train.batch_index % 100 == 99:
                if rank() == 0:
                    print(f"  worst of late {worst.item():.3f}")
                worst = None
        score = evaluate()
        with total.synchronized():
            mean = total["loss"] / train.num_samples
        if track(score) and rank() == 0:
            torch.save(net.state_dict(), "fashion.pt")
        log(epoch=epoch, loss=f"{mean:.4f}", score=f"{score:.4f}", best=f"{best():.4f}")


main()
