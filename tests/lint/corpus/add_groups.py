"""Layers join the optimizer one after the other."""
import torch
import torch.nn as nn
import torch.nn.functional as F
import torchvision
from torchvision import transforms as T

from elasticrun import Accumulator, AdaptiveDataLoader, AdaptiveDataParallel, Variables, device, rank, remaining_epochs_until


def main():
    torch.manual_seed(0)
    dev = device()
    t = T.Compose([T.Resize((128, 128)), T.ToTensor()])
    train = AdaptiveDataLoader(torchvision.datasets.DTD("data", transform=t), batch_size=32, shuffle=True, num_workers=4)
    valid = AdaptiveDataLoader(torchvision.datasets.DTD("data", split="val", transform=t), batch_size=64, num_workers=4)
    net = torchvision.models.resnet18(weights="DEFAULT")
    net.fc = nn.Linear(512, 47)
    net.to(dev)
    optimizer = torch.optim.SGD(net.fc.parameters(), lr=0.01, momentum=0.9)
    model = AdaptiveDataParallel(net, optimizer)
    best = Variables(accuracy=0.0)
    for epoch in remaining_epochs_until(12):
        if epoch == 4:
            optimizer.add_param_group({"params": net.layer4.parameters(), "lr": 1e-3})  # MISTAKE: lost: after a restart in a later epoch the optimizer has one group, but its saved state has two (or line with: if epoch == 4)
        model.train()
        for x, y in train:
            loss = F.cross_entropy(model(x.to(dev)), y.to(dev))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        model.eval()
        total = Accumulator()
        with torch.no_grad():
            for x, y in valid:
                total["hits"] += (model(x.to(dev)).argmax(1) == y.to(dev))[: valid.num_valid].sum()
        with total.synchronized():
            best.accuracy = max(best.accuracy, total["hits"] / valid.num_samples)
        if rank() == 0:
            print(f"epoch {epoch}: best {best.accuracy:.4f}")


main()
