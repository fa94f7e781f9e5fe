"""A linear probe on cached features of a frozen net."""
import os

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
import torchvision
from torch.utils.data import DataLoader, TensorDataset
from torchvision import transforms as T

from elasticrun import Accumulator, AdaptiveDataLoader, AdaptiveDataParallel, device, rank, remaining_epochs_until


def extract(split, dev):
    path = f"features-{split}.npz"
    if not os.path.exists(path):
        net = torchvision.models.resnet50(weights="DEFAULT").to(dev).eval()
        net.fc = nn.Identity()
        t = T.Compose([T.Resize(256), T.CenterCrop(224), T.ToTensor()])
        data = torchvision.datasets.Food101("data", split=split, transform=t)
        xs, ys = [], []
        with torch.no_grad():
            for x, y in DataLoader(data, batch_size=256, num_workers=8):
                xs.append(net(x.to(dev)).cpu())
                ys.append(y)
        np.savez(path, x=torch.cat(xs).numpy(), y=torch.cat(ys).numpy())  # ARGUABLE: each replica writes the file, not by way of a temporary one; a half file stays after a kill
    blob = np.load(path)
    return torch.from_numpy(blob["x"]), torch.from_numpy(blob["y"])


class HardExamples:
    """Losses of the last time each sample was seen."""

    def __init__(self, n):
        self.losses = torch.zeros(n)

    def update(self, index, losses):
        self.losses[index] = losses.detach().cpu()  # MISTAKE: lost: a bank in memory, zeros again after a restart; and each replica fills its part only (or line with: self.losses = torch.zeros) (or line with: hard.update(index, losses)) (or line with: hard = HardExamples)

    def weights(self):
        return 1 + self.losses / (self.losses.mean() + 1e-6)


def main():
    torch.manual_seed(0)
    dev = device()
    x, y = extract("train", dev)
    xt, yt = extract("test", dev)
    train = AdaptiveDataLoader(TensorDataset(torch.arange(len(x)), x, y), batch_size=512, shuffle=True)
    test = AdaptiveDataLoader(TensorDataset(xt, yt), batch_size=2048)
    net = nn.Linear(2048, 101).to(dev)
    optimizer = torch.optim.SGD(net.parameters(), 0.1, momentum=0.9)
    model = AdaptiveDataParallel(net, optimizer)
    hard = HardExamples(len(x))
    top = 0.0
    for epoch in remaining_epochs_until(30):
        weights = hard.weights()
        for index, a, b in train:
            losses = F.cross_entropy(model(a.to(dev)), b.to(dev), reduction="none")
            w = weights[index].to(dev)
            loss = (losses * w).sum() / w.sum()
            optimizer.zero_grad()
            loss.backward()  # MISTAKE: weigh: divided by the weights of this share, so the step depends on the cut; model.weigh(loss, w.sum()) (or line with: loss = (losses * w))
            optimizer.step()
            hard.update(index, losses)
        total = Accumulator()
        with torch.no_grad():
            for a, b in test:
                total["hits"] += (net(a.to(dev)).argmax(1) == b.to(dev))[: test.num_valid].sum()
        with total.synchronized():
            score = total["hits"] / test.num_samples
        if score > top:
            top = score  # MISTAKE: lost: 0 after a restart, a worse probe is then saved as the best (or line with: top = 0.0) (or line with: if score > top)
            if rank() == 0:
                torch.save(net.state_dict(), "probe.pt")


main()
