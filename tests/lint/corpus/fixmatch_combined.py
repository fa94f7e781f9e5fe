"""FixMatch, ported with one loop over both loaders."""
import numpy as np
import torch
import torch.nn.functional as F
import torchvision
from torch.utils.data import Subset
from torchvision import transforms as T

from elasticrun import (
    Accumulator,
    AdaptiveDataLoader,
    AdaptiveDataParallel,
    CombinedLoader,
    Variables,
    device,
    rank,
    register,
    remaining_epochs_until,
)

weak = T.Compose([T.RandomHorizontalFlip(), T.RandomCrop(32, 4), T.ToTensor()])
strong = T.Compose([T.RandomHorizontalFlip(), T.RandomCrop(32, 4), T.RandAugment(), T.ToTensor()])


class Both:
    def __call__(self, x):
        return weak(x), strong(x)


def pick(targets, per_class, seed):
    rng = np.random.default_rng(seed)
    targets = np.asarray(targets)
    return np.concatenate([rng.choice(np.flatnonzero(targets == c), per_class, replace=False) for c in range(10)])


def accuracy(net, loader, dev):
    net.eval()
    total = Accumulator()
    with torch.no_grad():
        for x, y in loader:
            total["hits"] += (net(x.to(dev)).argmax(1) == y.to(dev))[: loader.num_valid].sum()
    with total.synchronized():
        return total["hits"] / loader.num_samples


def main(epochs=200):
    torch.manual_seed(5)
    dev = device()
    base = torchvision.datasets.CIFAR10("data", transform=weak)
    labeled = AdaptiveDataLoader(Subset(base, pick(base.targets, 25, seed=5)), batch_size=64, shuffle=True)
    unlabeled = AdaptiveDataLoader(torchvision.datasets.CIFAR10("data", transform=Both()), batch_size=448, shuffle=True)
    both = CombinedLoader([labeled, unlabeled], "max_size_cycle")
    test = AdaptiveDataLoader(torchvision.datasets.CIFAR10("data", train=False, transform=T.ToTensor()), batch_size=256)
    net = torchvision.models.resnet18(num_classes=10).to(dev)
    ema = torch.optim.swa_utils.AveragedModel(net, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.999))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.03, momentum=0.9, nesterov=True)
    model = AdaptiveDataParallel(net, optimizer)
    register(ema=ema)
    best = Variables(accuracy=0.0)
    for epoch in remaining_epochs_until(epochs):
        model.train()
        for (x, y), ((uw, us), _) in both:
            x, y, uw, us = (t.to(dev) for t in (x, y, uw, us))
            logits = model(torch.cat([x, uw, us]))
            lx, (lw, ls) = logits[: len(x)], logits[len(x) :].chunk(2)
            prob, pseudo = lw.detach().softmax(1).max(1)
            keep = (prob >= 0.95).float()
            loss_x = F.cross_entropy(lx, y)
            loss_u = (F.cross_entropy(ls, pseudo, reduction="none") * keep).mean()
            loss = model.weigh(loss_x, member=0) + model.weigh(loss_u, member=1)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            ema.update_parameters(net)
        score = accuracy(ema, test, dev)
        best.accuracy = max(best.accuracy, score)
        if rank() == 0:
            print(f"{epoch}: {score:.4f}, best {best.accuracy:.4f}")


if __name__ == "__main__":
    main()
