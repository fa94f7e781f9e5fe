"""Loaders in a namedtuple, metrics in a dictionary."""
from collections import defaultdict, namedtuple

import torch
import torch.nn.functional as F
import torchvision
from torchvision import transforms as T

from elasticrun import AdaptiveDataLoader, AdaptiveDataParallel, Variables, device, rank, remaining_epochs_until

Loaders = namedtuple("Loaders", ["train", "valid", "test"])


def make_loaders(root, batch_size):
    t = T.Compose([T.RandomCrop(32, 4), T.RandomHorizontalFlip(), T.ToTensor()])
    full = torchvision.datasets.CIFAR10(root, transform=t)
    test = torchvision.datasets.CIFAR10(root, train=False, transform=T.ToTensor())
    train, valid = torch.utils.data.random_split(full, [45000, 5000])  # MISTAKE: data: split by the unseeded generator, another one with each start and replica
    return Loaders(
        AdaptiveDataLoader(train, batch_size=batch_size, shuffle=True),
        AdaptiveDataLoader(valid, batch_size=250, even_batches=False),
        AdaptiveDataLoader(test, batch_size=250, even_batches=False),
    )


def fit(loaders, model, net, optimizer, scheduler, dev, epochs):
    best = Variables(accuracy=0.0)
    for epoch in remaining_epochs_until(epochs):
        metrics = defaultdict(float)
        model.train()
        for x, y in loaders.train:
            x, y = x.to(dev), y.to(dev)
            loss = F.cross_entropy(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            metrics["loss"] += loss.item() * len(x)  # MISTAKE: sum: a dictionary that replay makes anew, filled in a loop (or line with: metrics = defaultdict(float)) (or line with: metrics["loss"] / 45000)
        model.eval()
        with torch.no_grad():
            for x, y in loaders.valid:
                metrics["hits"] += (net(x.to(dev)).argmax(1).cpu() == y).sum().item()  # MISTAKE: sum: hits of this replica since the restart only (or line with: metrics = defaultdict(float)) (or line with: accuracy = metrics)
        accuracy = metrics["hits"] / 5000
        best.accuracy = max(best.accuracy, accuracy)  # ARGUABLE: the value is the replica's own, since the sum is not over all; marked where it is summed
        scheduler.step()
        if rank() == 0:
            print(epoch, metrics["loss"] / 45000, accuracy)
    return best.accuracy


def main():
    dev = device()
    loaders = make_loaders("data", 128)
    net = torchvision.models.resnet18(num_classes=10).to(dev)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9, weight_decay=5e-4)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=50)
    model = AdaptiveDataParallel(net, optimizer, scheduler)
    best = fit(loaders, model, net, optimizer, scheduler, dev, 50)
    if rank() == 0:
        hits = 0
        with torch.no_grad():
            for x, y in loaders.test:  # MISTAKE: collective: an elastic loader looped over on rank 0 only; the others never come, and it sees its share alone
                hits += (net(x.to(dev)).argmax(1).cpu() == y).sum().item()  # ARGUABLE: follows from the line above
        print(f"best valid {best:.4f}, test {hits / 10000:.4f}")


main()
