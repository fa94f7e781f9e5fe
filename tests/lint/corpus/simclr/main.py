import math
import os

import pandas as pd
import torch
from config import Config
from model import SimCLR, nt_xent
from torchvision import transforms
from torchvision.datasets import CIFAR10

from elasticrun import (
    Accumulator,
    AdaptiveDataLoader,
    AdaptiveDataParallel,
    Variables,
    device,
    rank,
    remaining_epochs_until,
)


class CIFAR10Pair(CIFAR10):
    def __getitem__(self, index):
        img, target = self.data[index], self.targets[index]
        return self.transform(img), self.transform(img), target


def augmentation(cfg):
    return transforms.Compose(
        [
            transforms.ToPILImage(),
            transforms.RandomResizedCrop(32, scale=cfg.crop),
            transforms.RandomHorizontalFlip(),
            transforms.RandomApply([transforms.ColorJitter(0.4, 0.4, 0.4, 0.1)], p=0.8),
            transforms.RandomGrayscale(p=0.2),
            transforms.ToTensor(),
        ]
    )


def cosine(cfg, steps_per_epoch):
    warm, total = cfg.optim.warmup_epochs * steps_per_epoch, cfg.epochs * steps_per_epoch

    def factor(step):
        if step < warm:
            return step / warm
        return 0.5 * (1 + math.cos(math.pi * (step - warm) / (total - warm)))

    return factor


def train_epoch(model, loader, optimizer, scheduler, cfg):
    model.train()
    for x1, x2, _ in loader:
        _, z1 = model(x1)
        _, z2 = model(x2)
        loss = nt_xent(z1, z2, cfg.temperature)  # MISTAKE: weigh: the negatives are those of this replica's share only (or line with: loss.backward())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scheduler.step()


@torch.no_grad()
def knn(net, memory, test, cfg, classes=10):
    net.eval()
    bank, labels = [], []
    for x, _, y in memory:
        bank.append(net(x)[0])  # MISTAKE: sum: holds this replica's share only, and a restart loses what it had (or line with: bank, labels = [], []) (or line with: labels.append(y)) (or line with: bank, labels = torch.cat(bank).t())
        labels.append(y)
    bank, labels = torch.cat(bank).t(), torch.cat(labels)
    total = Accumulator()
    for x, _, y in test:
        weight, index = (net(x)[0] @ bank).topk(cfg.knn_k, dim=1)
        weight = (weight / cfg.temperature).exp()
        votes = torch.zeros(len(x), classes, device=x.device)
        votes.scatter_add_(1, labels[index], weight)
        total["hits"] += (votes.argmax(1) == y)[: test.num_valid].sum()
    with total.synchronized():
        return total["hits"] / test.num_samples


def main(cfg):
    os.makedirs(cfg.out, exist_ok=True)
    pair = CIFAR10Pair(cfg.root, train=True, transform=augmentation(cfg))
    plain = CIFAR10Pair(cfg.root, train=True, transform=transforms.ToTensor())
    held = CIFAR10Pair(cfg.root, train=False, transform=transforms.ToTensor())
    options = dict(batch_size=cfg.batch_size, num_workers=cfg.workers, device=device())
    train = AdaptiveDataLoader(pair, shuffle=True, drop_last=True, name="train", **options)
    memory = AdaptiveDataLoader(plain, name="memory", **options)
    test = AdaptiveDataLoader(held, name="test", **options)

    net = SimCLR(cfg.feature_dim).to(device())
    optimizer = torch.optim.SGD(
        net.parameters(), lr=cfg.scaled_lr, momentum=cfg.optim.momentum, weight_decay=cfg.optim.weight_decay  # ARGUABLE: labelled in config.py
    )
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, cosine(cfg, len(train)))
    model = AdaptiveDataParallel(net, optimizer, scheduler)
    best = Variables(accuracy=0.0)

    results = {"epoch": [], "knn": []}
    for epoch in remaining_epochs_until(cfg.epochs, start=1):
        train_epoch(model, train, optimizer, scheduler, cfg)
        if epoch % cfg.eval_every:
            continue
        accuracy = knn(net, memory, test, cfg)
        results["epoch"].append(epoch)
        results["knn"].append(accuracy)  # MISTAKE: lost: earlier epochs are gone after a restart, and the table is overwritten without them (or line with: results["epoch"].append(epoch)) (or line with: results = {) (or line with: pd.DataFrame(results))
        if rank() == 0:
            pd.DataFrame(results).to_csv(f"{cfg.out}/{cfg.run_name}.csv", index=False)
        if accuracy > best.accuracy:
            best.accuracy = accuracy
            if rank() == 0:
                torch.save(net.state_dict(), f"{cfg.out}/{cfg.run_name}.pth")


if __name__ == "__main__":
    main(Config())
