"""Exponential mean of weights, with gradient micro-batches and bfloat16; ported."""
import copy

import torch
import torch.nn.functional as F
import torchvision
from torchvision import transforms as T

from elasticrun import (
    Accumulator,
    AdaptiveDataLoader,
    AdaptiveDataParallel,
    Variables,
    device,
    rank,
    register,
    remaining_epochs_until,
)


class Ema:
    def __init__(self, net, decay=0.999):
        self.shadow = copy.deepcopy(net).eval().requires_grad_(False)
        self.decay = decay
        self.updates = 0

    @torch.no_grad()
    def update(self, net):
        self.updates += 1
        decay = min(self.decay, (1 + self.updates) / (10 + self.updates))
        for s, p in zip(self.shadow.parameters(), net.parameters()):
            s.lerp_(p, 1 - decay)
        for s, b in zip(self.shadow.buffers(), net.buffers()):
            s.copy_(b)

    def state_dict(self):
        return {"shadow": self.shadow.state_dict(), "updates": self.updates}

    def load_state_dict(self, state):
        self.shadow.load_state_dict(state["shadow"])
        self.updates = state["updates"]


def score(net, loader, dev):
    net.eval()
    total = Accumulator()
    with torch.no_grad():
        for x, y in loader:
            total["hits"] += (net(x.to(dev)).argmax(1) == y.to(dev)).sum()
            total["n"] += len(y)
    with total.synchronized():
        return total["hits"] / total["n"]


def main():
    torch.manual_seed(8)
    dev = device()
    t = T.Compose([T.RandomCrop(32, 4), T.RandomHorizontalFlip(), T.ToTensor()])
    train = AdaptiveDataLoader(
        torchvision.datasets.CIFAR10("data", transform=t), batch_size=256, shuffle=True, max_local_batch_size=64, num_workers=4
    )
    test = AdaptiveDataLoader(
        torchvision.datasets.CIFAR10("data", train=False, transform=T.ToTensor()), batch_size=500, even_batches=False
    )
    net = torchvision.models.resnet18(num_classes=10).to(dev)
    ema = Ema(net)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.2, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.2, total_steps=30 * len(train) + 1)
    model = AdaptiveDataParallel(net, optimizer, scheduler)
    register(ema=ema)
    best = Variables(plain=0.0, ema=0.0)
    for epoch in remaining_epochs_until(30):
        model.train()
        for x, y in train:
            with torch.autocast(dev.type, dtype=torch.bfloat16):
                loss = F.cross_entropy(model(x.to(dev)), y.to(dev))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            scheduler.step()
            if train.is_step:
                ema.update(net)
        plain, smooth = score(net, test, dev), score(ema.shadow, test, dev)
        best.plain, best.ema = max(best.plain, plain), max(best.ema, smooth)
        if rank() == 0:
            print(f"{epoch}: {plain:.4f} {smooth:.4f}, best {best.plain:.4f} {best.ema:.4f}")


main()
