"""A student's classifier: the validation was ported, the training was forgotten."""
import torch
import torch.nn as nn
import torch.nn.functional as F
import torchvision
from torch.utils.data import DataLoader
from torchvision import transforms as T

from elasticrun import Accumulator, AdaptiveDataLoader, AdaptiveDataParallel, Variables, device, rank, remaining_epochs_until

BATCH = 64


def get_data(root):
    t = T.Compose([T.Resize((64, 64)), T.RandomHorizontalFlip(), T.ToTensor()])
    return torchvision.datasets.ImageFolder(f"{root}/train", t), torchvision.datasets.ImageFolder(f"{root}/valid", t)


def train_epoch(loader, model, optimizer, dev):
    model.train()
    for x, y in loader:
        loss = F.cross_entropy(model(x.to(dev)), y.to(dev))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def valid_epoch(loader, model, dev):
    model.eval()
    total = Accumulator()
    with torch.no_grad():
        for x, y in loader:
            total["loss"] += F.cross_entropy(model(x.to(dev)), y.to(dev), reduction="sum")  # MISTAKE: pad: the loss of a padding sample is added at 2+ replicas
            total["hits"] += (model(x.to(dev)).argmax(1) == y.to(dev))[: loader.num_valid].sum()
    with total.synchronized():
        return total["loss"] / loader.num_samples, total["hits"] / loader.num_samples


def main():
    torch.manual_seed(0)
    dev = device()
    train_set, valid_set = get_data("weather")
    train_loader = DataLoader(train_set, batch_size=BATCH, shuffle=True, num_workers=2)  # MISTAKE: loop: torch's own loader has no boundaries and is not shared among replicas; an interrupted loop begins anew (or line with: for x, y in loader:) (or line with: train_epoch(train_loader)
    valid_loader = AdaptiveDataLoader(valid_set, batch_size=BATCH)
    net = nn.Sequential(nn.Conv2d(3, 32, 3, 2), nn.ReLU(), nn.Conv2d(32, 64, 3, 2), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, len(train_set.classes))).to(dev)
    optimizer = torch.optim.Adam(net.parameters(), 1e-3)
    model = AdaptiveDataParallel(net, optimizer)
    best = Variables(accuracy=0.0)
    for epoch in remaining_epochs_until(25):
        train_epoch(train_loader, model, optimizer, dev)
        loss, accuracy = valid_epoch(valid_loader, model, dev)
        best.accuracy = max(best.accuracy, accuracy)
        if rank() == 0:
            print(f"epoch {epoch}: {loss:.4f} {accuracy:.4f} {best.accuracy:.4f}")


main()
