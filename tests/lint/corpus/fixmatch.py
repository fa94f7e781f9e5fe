"""FixMatch: few labels, many images without."""
import itertools

import numpy as np
import torch
import torch.nn.functional as F
import torchvision
from torch.utils.data import Subset
from torchvision import transforms as T

from elasticrun import Accumulator, AdaptiveDataLoader, AdaptiveDataParallel, device, rank, remaining_epochs_until

MU, THRESHOLD, LAMBDA_U = 7, 0.95, 1.0
weak = T.Compose([T.RandomHorizontalFlip(), T.RandomCrop(32, 4), T.ToTensor()])
strong = T.Compose([T.RandomHorizontalFlip(), T.RandomCrop(32, 4), T.RandAugment(), T.ToTensor()])


class Both:
    def __call__(self, x):
        return weak(x), strong(x)


def split(targets, per_class):
    labeled = []
    for c in range(10):
        where = np.where(np.array(targets) == c)[0]
        labeled.extend(np.random.choice(where, per_class, replace=False))  # MISTAKE: data: nothing is seeded, so other images have labels after a restart and on each replica (or line with: labeled_idx = split)
    return labeled


def main():
    dev = device()
    base = torchvision.datasets.CIFAR10("data", transform=weak)
    labeled_idx = split(base.targets, 25)
    labeled = AdaptiveDataLoader(Subset(base, labeled_idx), batch_size=64, shuffle=True, drop_last=True)
    unlabeled = AdaptiveDataLoader(torchvision.datasets.CIFAR10("data", transform=Both()), batch_size=64 * MU, shuffle=True, drop_last=True)
    test = AdaptiveDataLoader(torchvision.datasets.CIFAR10("data", train=False, transform=T.ToTensor()), batch_size=256)
    net = torchvision.models.resnet18(num_classes=10).to(dev)
    ema = torch.optim.swa_utils.AveragedModel(net, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.999))  # MISTAKE: unreg: the averaged model is not registered and begins anew (or line with: ema.update_parameters(net))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.03, momentum=0.9, nesterov=True)
    model = AdaptiveDataParallel(net, optimizer)
    for epoch in remaining_epochs_until(200):
        model.train()
        for (x, y), ((uw, us), _) in zip(itertools.cycle(labeled), unlabeled):  # MISTAKE: loop: zip and cycle keep two loops open, which cannot be continued; CombinedLoader
            x, y, uw, us = x.to(dev), y.to(dev), uw.to(dev), us.to(dev)
            logits = model(torch.cat([x, uw, us]))
            lx, (lw, ls) = logits[: len(x)], logits[len(x) :].chunk(2)
            prob, pseudo = lw.detach().softmax(1).max(1)
            mask = (prob >= THRESHOLD).float()
            loss_u = (F.cross_entropy(ls, pseudo, reduction="none") * mask).mean()
            loss = F.cross_entropy(lx, y) + LAMBDA_U * loss_u
            optimizer.zero_grad()
            loss.backward()  # ARGUABLE: two means over loaders of different sizes might be weighed one by one
            optimizer.step()
            ema.update_parameters(net)
        ema.eval()
        total = Accumulator()
        with torch.no_grad():
            for x, y in test:
                total["hits"] += (ema(x.to(dev)).argmax(1) == y.to(dev))[: test.num_valid].sum()
        with total.synchronized():
            if rank() == 0:
                print(epoch, total["hits"] / test.num_samples)


main()
