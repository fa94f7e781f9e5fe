"""Learning rate range test, then training with one cycle (fastai style) on Oxford pets."""
import argparse
import copy
import math

import matplotlib.pyplot as plt
import torch
import torch.nn.functional as F
from torch import nn
from torch.optim.lr_scheduler import OneCycleLR
from torchvision import datasets, models
from torchvision import transforms as T

from elasticrun import Accumulator, AdaptiveDataLoader, AdaptiveDataParallel, device, rank, remaining_epochs_until


class LRFinder:
    def __init__(self, model, net, optimizer, low=1e-7, high=1.0, iterations=100):
        self.model, self.net, self.optimizer = model, net, optimizer
        self.low, self.high, self.iterations = low, high, iterations
        self.lrs, self.losses = [], []

    def run(self, loader):
        weights = copy.deepcopy(self.net.state_dict())
        state = copy.deepcopy(self.optimizer.state_dict())
        factor = (self.high / self.low) ** (1 / self.iterations)
        lr, average, best = self.low, 0.0, float("inf")
        self.model.train()
        for i, (x, y) in zip(range(self.iterations), loader):  # MISTAKE: loop: zip counts from 0 again after a restart, and does not finish the loop
            for group in self.optimizer.param_groups:
                group["lr"] = lr
            loss = F.cross_entropy(self.model(x), y)
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
            average = 0.9 * average + 0.1 * loss.item()  # MISTAKE: lost: begins anew in the middle of the test; and of this replica's share (or line with: lr, average, best = self.low) (or line with: smooth = average)
            smooth = average / (1 - 0.9 ** (i + 1))
            self.lrs.append(lr)
            self.losses.append(smooth)  # MISTAKE: lost: empty when the finished loop is skipped after a restart; and each replica finds a rate of its own (or line with: self.lrs, self.losses = [], []) (or line with: self.lrs.append(lr)) (or line with: slopes = [b - a)
            if smooth > 4 * best:  # MISTAKE: collective: each replica leaves by the loss of its own share (or line with: break  # diverged)
                break  # diverged
            best = min(best, smooth)
            lr *= factor  # MISTAKE: lost: is the lowest again where the loop goes on (or line with: lr, average, best = self.low) (or line with: group["lr"] = lr)
        self.net.load_state_dict(weights)  # MISTAKE: zoneP: after a restart in the test this puts back weights that were copied in its middle (or line with: self.optimizer.load_state_dict(state)) (or line with: weights = copy.deepcopy) (or line with: state = copy.deepcopy)
        self.optimizer.load_state_dict(state)

    def suggestion(self):
        slopes = [b - a for a, b in zip(self.losses[10:], self.losses[11:])]
        return self.lrs[10 + min(range(len(slopes)), key=slopes.__getitem__)]

    def plot(self, path):
        plt.plot([math.log10(lr) for lr in self.lrs], self.losses)
        plt.xlabel("log10 lr")
        plt.savefig(path)


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--data", default="data")
    p.add_argument("--epochs", type=int, default=12)
    p.add_argument("--batch-size", type=int, default=64)
    p.add_argument("--plot", default="lr_finder.png")
    args = p.parse_args()

    norm = T.Normalize((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
    fit = T.Compose([T.RandomResizedCrop(224), T.RandomHorizontalFlip(), T.ToTensor(), norm])
    test = T.Compose([T.Resize(256), T.CenterCrop(224), T.ToTensor(), norm])
    train_set = datasets.OxfordIIITPet(args.data, "trainval", transform=fit)
    valid_set = datasets.OxfordIIITPet(args.data, "test", transform=test)
    train = AdaptiveDataLoader(train_set, batch_size=args.batch_size, shuffle=True, num_workers=4, device=device())
    valid = AdaptiveDataLoader(valid_set, batch_size=128, num_workers=4, device=device())

    net = models.resnet34(weights="DEFAULT")
    net.fc = nn.Linear(512, 37)
    net.to(device())
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-7, weight_decay=0.01)
    model = AdaptiveDataParallel(net, optimizer)

    finder = LRFinder(model, net, optimizer)
    finder.run(train)
    max_lr = finder.suggestion()
    if rank() == 0:
        finder.plot(args.plot)  # ARGUABLE: a restart draws it again, from the lists that are reported above
        print(f"max lr {max_lr:.2e}")
    scheduler = OneCycleLR(optimizer, max_lr, epochs=args.epochs, steps_per_epoch=len(train))  # MISTAKE: unreg: the scheduler is in no checkpoint, and made anew sets the rate back (or line with: scheduler.step())

    for epoch in remaining_epochs_until(args.epochs):
        model.train()
        for x, y in train:
            loss = F.cross_entropy(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            scheduler.step()
        model.eval()
        total = Accumulator()
        with torch.no_grad():
            for x, y in valid:
                errors = model(x).argmax(1) != y
                total["errors"] += errors[: valid.num_valid].sum()
        with total.synchronized():
            if rank() == 0:
                print(f"epoch {epoch}: error rate {total['errors'] / len(valid_set):.4f}")
    if rank() == 0:
        torch.save(net.state_dict(), "pets.pt")


if __name__ == "__main__":
    main()
