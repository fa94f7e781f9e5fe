"""Train a small net on handwritten digits, through any restarts."""

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import TensorDataset

from elasticrun import Accumulator, AdaptiveDataLoader, AdaptiveDataParallel
from elasticrun import atomic_save, rank, remaining_epochs_until

torch.manual_seed(0)
digits = load_digits()
images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
labels = torch.tensor(digits.target)
train_set = TensorDataset(images[:1440], labels[:1440])
valid_set = TensorDataset(images[1440:], labels[1440:])

net = nn.Sequential(
    *(nn.Conv2d(1, 32, 3, padding=1), nn.ReLU()),
    *(nn.Conv2d(32, 64, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
    *(nn.Conv2d(64, 128, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
    *(nn.Flatten(), nn.Linear(512, 10)),
)
optimizer = torch.optim.SGD(net.parameters(), lr=0.02, momentum=0.9)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 200)
model = AdaptiveDataParallel(net, optimizer, scheduler)
train = AdaptiveDataLoader(train_set, batch_size=64, shuffle=True, name="train")
valid = AdaptiveDataLoader(valid_set, batch_size=64, even_batches=False, name="valid")

for epoch in remaining_epochs_until(200):
    for x, y in train:
        loss = F.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    total = Accumulator()
    with torch.no_grad():
        for x, y in valid:
            total["correct"] += (model(x).argmax(1) == y).sum().item()
    with total.synchronized():
        correct = total["correct"]
    scheduler.step()
    if rank() == 0:
        print(f"epoch {epoch}  accuracy {correct / len(valid_set):.2%}", flush=True)
if rank() == 0:
    atomic_save(net.state_dict(), "digits.pt")
