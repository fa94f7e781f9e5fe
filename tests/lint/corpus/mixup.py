"""Mixup and label smoothing, with a generator for the mixing."""
import numpy as np
import torch
import torch.nn as nn
import torchvision
from torchvision import transforms as T

from elasticrun import Accumulator, AdaptiveDataLoader, AdaptiveDataParallel, device, rank, remaining_epochs_until


class Mixup:
    def __init__(self, alpha=0.2, classes=10, seed=0):
        self.alpha, self.classes = alpha, classes
        self.rng = np.random.default_rng(seed)

    def __call__(self, x, y):
        lam = self.rng.beta(self.alpha, self.alpha)  # MISTAKE: rng: the generator begins anew after a restart and repeats its factors (or line with: self.rng = np.random.default_rng) (or line with: mixup(x.to(dev)) (or line with: mixup = Mixup())
        index = torch.randperm(len(x), device=x.device)
        target = nn.functional.one_hot(y, self.classes).float()
        return lam * x + (1 - lam) * x[index], lam * target + (1 - lam) * target[index]  # ARGUABLE: partners come from the replica's share, so mixing depends on the cut


def soft_ce(logits, target):
    return -(target * logits.log_softmax(1)).sum(1).mean()


def main():
    torch.manual_seed(0)
    dev = device()
    t = T.Compose([T.RandomCrop(32, 4), T.RandomHorizontalFlip(), T.ToTensor()])
    train = AdaptiveDataLoader(torchvision.datasets.CIFAR10("data", transform=t), batch_size=128, shuffle=True)
    test = AdaptiveDataLoader(torchvision.datasets.CIFAR10("data", train=False, transform=T.ToTensor()), batch_size=256)
    net = torchvision.models.resnet18(num_classes=10).to(dev)
    optimizer = torch.optim.SGD(net.parameters(), 0.1, momentum=0.9, weight_decay=1e-4)
    scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, [100, 150])
    model = AdaptiveDataParallel(net, optimizer, scheduler)
    mixup = Mixup()
    losses = []
    for epoch in remaining_epochs_until(200):
        if epoch == 180:
            mixup.alpha = 1e-3  # MISTAKE: lost: a restart after epoch 180 has the old alpha again; test epoch >= 180 (or line with: if epoch == 180)
        model.train()
        losses.clear()
        for x, y in train:
            x, target = mixup(x.to(dev), y.to(dev))
            loss = soft_ce(model(x), target)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())  # MISTAKE: sum: the list holds only batches since the restart, and of one replica (or line with: np.mean(losses)) (or line with: losses.clear()) (or line with: losses = [])
        model.eval()
        total = Accumulator()
        with torch.no_grad():
            for x, y in test:
                total["hits"] += (model(x.to(dev)).argmax(1) == y.to(dev))[: test.num_valid].sum()
        with total.synchronized():
            accuracy = total["hits"] / test.num_samples
        scheduler.step()
        if rank() == 0:
            print(f"{epoch}: loss {np.mean(losses):.4f} accuracy {accuracy:.4f}")


if __name__ == "__main__":
    main()
