import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
x = torch.randn(58, 4)
y = (x.sum(1) > 0).long() + 0
train = DataLoader(TensorDataset(x[:29], y[:29]), 7)
valid = DataLoader(TensorDataset(x[29:], y[29:]), batch_size=7)
net = nn.Linear(4, 2)
criterion = nn.CrossEntropyLoss()
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
best_loss = float("inf")
step = 0
for epoch in range(4):
    running, summed, right, seen, batches = 0.0, 0.0, 0, 0, 0
    for i, (a, b) in enumerate(train):  # noqa: B007
        out = net(a)
        loss = criterion(out, b)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        step += 1
        running += loss.item()
        summed += loss.item() * len(b)
        right += (out.argmax(1) == b).sum().item()
        seen += b.size(0)
        batches += 1
    print(f"{running / batches:.5f} {running / len(train):.5f} {summed / seen:.5f}")
    print(epoch, step, right, seen, batches)
    loss_mean, loss_sum, hits, count, batches = 0.0, 0, 0, 0, 0.0
    net.eval()
    with torch.no_grad():
        for a, b in valid:
            out = net(a)
            loss_mean += criterion(out, b).item()
            loss_sum += F.cross_entropy(out, b, reduction="sum").item()
            hits += int(out.argmax(1).eq(b).sum())
            count += len(b)
            batches += 1
    print(f"{loss_mean / batches:.5f} {loss_sum / len(valid.dataset):.5f}")
    print(hits, count, batches)
    plain = 0
    for a, b in valid:
        plain += (net(a).argmax(1) == b).sum().item()
    print("plain", plain)
    mean = loss_sum / count
    if mean < best_loss:
        best_loss = mean
        torch.save(net.state_dict(), "best.pt")
    print(f"best {best_loss:.5f} {epoch}")
