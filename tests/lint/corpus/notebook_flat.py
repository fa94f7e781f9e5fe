# %% [markdown]
# Fashion-MNIST in a notebook, later exported

# %%
import copy

import matplotlib.pyplot as plt
import torch
import torch.nn as nn
import torchvision
import torchvision.transforms as transforms

from elasticrun import AdaptiveDataLoader, AdaptiveDataParallel, Accumulator, device, rank, remaining_epochs_until

# %%
torch.manual_seed(0)
full = torchvision.datasets.FashionMNIST("data", train=True, transform=transforms.ToTensor())
train_ds, val_ds = torch.utils.data.random_split(full, [50000, 10000])
train_dl = AdaptiveDataLoader(train_ds, batch_size=100, shuffle=True)
val_dl = AdaptiveDataLoader(val_ds, batch_size=100, shuffle=False)

# %%
net = nn.Sequential(
    nn.Conv2d(1, 16, 5, padding=2), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2),
    nn.Conv2d(16, 32, 5, padding=2), nn.BatchNorm2d(32), nn.ReLU(), nn.MaxPool2d(2),
    nn.Flatten(), nn.Linear(1568, 10),
).to(device())
criterion = nn.CrossEntropyLoss()
optimizer = torch.optim.Adam(net.parameters(), lr=0.001)
model = AdaptiveDataParallel(net, optimizer)

# %%
train_losses, val_accs = [], []
best_acc = 0.0
best_model = copy.deepcopy(net.state_dict())
num_epochs = 10

# %%
for epoch in remaining_epochs_until(num_epochs):
    model.train()
    for images, labels in train_dl:
        images, labels = images.to(device()), labels.to(device())
        loss = criterion(model(images), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        train_losses.append(loss.item())  # MISTAKE: lost: the curve begins at the restart (or line with: train_losses, val_accs = [], []) (or line with: plt.plot(train_losses))

    model.eval()
    acc = Accumulator()
    with torch.no_grad():
        for images, labels in val_dl:
            pred = model(images.to(device())).argmax(1).cpu()
            acc["ok"] += (pred == labels)[: val_dl.num_valid].sum()
    with acc.synchronized():
        val_acc = acc["ok"] / len(val_ds)
    val_accs.append(val_acc)  # MISTAKE: lost: accuracies of earlier epochs are missing after a restart (or line with: train_losses, val_accs = [], []) (or line with: plt.plot(val_accs))
    if val_acc > best_acc:
        best_acc = val_acc  # MISTAKE: lost: 0 after a restart (or line with: best_acc = 0.0) (or line with: if val_acc > best_acc)
        best_model = copy.deepcopy(net.state_dict())  # MISTAKE: lost: the best weights are kept in memory only; after a restart they are those of the interrupted epoch (or line with: net.load_state_dict(best_model))
    if rank() == 0:
        print(f"Epoch {epoch + 1}/{num_epochs}, val acc {val_acc:.4f}")

# %%
if rank() == 0:
    net.load_state_dict(best_model)
    torch.save(net.state_dict(), "fashion_best.pt")
    plt.figure()
    plt.plot(train_losses)
    plt.savefig("loss.png")
    plt.figure()
    plt.plot(val_accs)
    plt.savefig("acc.png")
