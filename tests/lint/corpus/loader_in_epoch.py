"""Active learning: the training set grows by what is uncertain."""
import torch
import torch.nn as nn
import torch.nn.functional as F
import torchvision
from torch.utils.data import Subset
from torchvision.transforms import ToTensor

from elasticrun import Accumulator, AdaptiveDataLoader, AdaptiveDataParallel, device, rank, remaining_epochs_until


def uncertain(net, data, rest, dev, n):
    """Indices of the n samples with the flattest prediction."""
    net.eval()
    scores = []
    with torch.no_grad():
        for start in range(0, len(rest), 500):
            x = torch.stack([data[i][0] for i in rest[start : start + 500]])
            p = net(x.to(dev)).softmax(1)
            scores.append(-(p * p.clamp_min(1e-9).log()).sum(1).cpu())
    return torch.cat(scores).topk(n).indices.tolist()


def main():
    torch.manual_seed(0)
    dev = device()
    data = torchvision.datasets.MNIST("data", transform=ToTensor())
    test = AdaptiveDataLoader(torchvision.datasets.MNIST("data", train=False, transform=ToTensor()), batch_size=500)
    order = torch.randperm(len(data)).tolist()
    labeled, rest = order[:1000], order[1000:11000]
    net = nn.Sequential(nn.Flatten(), nn.Linear(784, 128), nn.ReLU(), nn.Linear(128, 10)).to(dev)
    optimizer = torch.optim.Adam(net.parameters(), 1e-3)
    model = AdaptiveDataParallel(net, optimizer)
    for epoch in remaining_epochs_until(20):
        loader = AdaptiveDataLoader(Subset(data, labeled), batch_size=64, shuffle=True)  # MISTAKE: loop: made anew in each epoch without a stable name, so after a restart it is taken for that of another epoch
        model.train()
        for x, y in loader:
            loss = F.cross_entropy(model(x.to(dev)), y.to(dev))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        net.eval()
        total = Accumulator()
        with torch.no_grad():
            for x, y in test:
                total["hits"] += (net(x.to(dev)).argmax(1) == y.to(dev))[: test.num_valid].sum()
        with total.synchronized():
            accuracy = total["hits"] / test.num_samples
        if rank() == 0:
            print(f"epoch {epoch}: {len(labeled)} labels, {accuracy:.4f}")
        picked = uncertain(net, data, rest, dev, 200)
        labeled = labeled + [rest[k] for k in picked]  # MISTAKE: lost: which samples have labels is forgotten by a restart (or line with: labeled, rest = order)
        chosen = set(picked)
        rest = [i for k, i in enumerate(rest) if k not in chosen]  # MISTAKE: lost: the pool is whole again after a restart (or line with: labeled, rest = order)


if __name__ == "__main__":
    main()
