"""A flat script, the style of a first tutorial."""

import torch
import torch.nn.functional as F
from torch import nn, optim
from torch.optim.lr_scheduler import StepLR
from torchvision import datasets, transforms

from elasticrun import (
    Accumulator,
    AdaptiveDataLoader,
    AdaptiveDataParallel,
    Variables,
    rank,
    remaining_epochs_until,
)

torch.manual_seed(1)
device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
transform = transforms.Compose([transforms.ToTensor()])
train_set = datasets.MNIST("data", train=True, download=True, transform=transform)
valid_set = datasets.MNIST("data", train=False, transform=transform)
train_loader = AdaptiveDataLoader(train_set, batch_size=64, shuffle=True, num_workers=2)
test_loader = AdaptiveDataLoader(valid_set, batch_size=1000)

net = nn.Sequential(nn.Flatten(), nn.Linear(784, 128), nn.ReLU(), nn.Linear(128, 10))
net = net.to(device)
optimizer = optim.Adadelta(net.parameters(), lr=1.0)
scheduler = StepLR(optimizer, step_size=1, gamma=0.7)
model = AdaptiveDataParallel(net, optimizer, scheduler)
hits, score = Accumulator(), Variables(best=0.0)

for epoch in remaining_epochs_until(14):
    model.train()
    for batch_idx, (data, target) in enumerate(train_loader):
        data, target = data.to(device), target.to(device)
        optimizer.zero_grad()
        loss = F.cross_entropy(model(data), target)
        loss.backward()
        optimizer.step()
        if batch_idx % 10 == 0:
            print(f"Train Epoch: {epoch} [{train_loader.index}] loss {loss.item():.6f}")
    model.eval()
    with torch.no_grad():
        for data, target in test_loader:
            pred = model(data.to(device)).argmax(dim=1).cpu()
            hits["right"] += (pred == target)[: test_loader.num_valid].sum()
    with hits.synchronized():
        accuracy = hits["right"] / test_loader.num_samples
        hits.clear()
    if accuracy > score.best:
        score.best = accuracy
        if rank() == 0:
            torch.save(net.state_dict(), "mnist_best.pt")
    scheduler.step()
    print(f"epoch {epoch}: {accuracy:.2%}, best {score.best:.2%}")
