"""Nothing wrong: a schedule in zone C, sums in an Accumulator, a best value kept."""

import torch
from torch import nn
from torch.utils.data import TensorDataset

import elasticrun
from elasticrun import Accumulator, AdaptiveDataLoader, AdaptiveDataParallel, Variables

torch.manual_seed(0)
inputs = torch.randn(61, 4)
targets = inputs.sum(dim=1, keepdim=True)
data = TensorDataset(inputs, targets)
net = nn.Linear(4, 1)
optimizer = torch.optim.Adam(net.parameters(), 0.05)
schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
model = AdaptiveDataParallel(net, optimizer, schedule)
train = AdaptiveDataLoader(data, 8, shuffle=True, name="train")
valid = AdaptiveDataLoader(data, 16, name="valid")
score = Variables(best=float("inf"), num_better=0)
total = Accumulator()

for _epoch in elasticrun.remaining_epochs_until(5):
    model.train()
    for x, y in train:
        loss = nn.functional.mse_loss(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    model.eval()
    for x, y in valid:
        with torch.no_grad():
            errors = (model(x) - y).square()[: valid.num_valid]
        total["error"] += errors.sum()
        total["count"] += valid.num_valid
    with total.synchronized():
        error = float(total["error"] / total["count"])
        total.clear()
    if error < score.best:
        score.best = error
        score.num_better += 1
        if elasticrun.rank() == 0:
            torch.save(net.state_dict(), "best.pt")
    schedule.step()

for x, _ in valid:
    total["sum"] += x[: valid.num_valid].double().sum()
with total.synchronized():
    if elasticrun.rank() == 0:
        with open("result.txt", "w") as file:
            file.write(f"{float(total['sum']):.6f}\n")
