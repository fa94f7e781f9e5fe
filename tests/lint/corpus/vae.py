"""Variational auto-encoder."""
import os

import torch
import torch.nn.functional as F
from torch import nn, optim
from torchvision import datasets, transforms
from torchvision.utils import save_image

from elasticrun import Accumulator, AdaptiveDataLoader, AdaptiveDataParallel, device, rank, remaining_epochs_until

EPOCHS = 10
torch.manual_seed(1)
dev = device()
os.makedirs("results", exist_ok=True)
train_set = datasets.MNIST("data", train=True, download=True, transform=transforms.ToTensor())  # ARGUABLE: all replicas download at once
test_set = datasets.MNIST("data", train=False, transform=transforms.ToTensor())
train_loader = AdaptiveDataLoader(train_set, batch_size=128, shuffle=True)
test_loader = AdaptiveDataLoader(test_set, batch_size=128)


class VAE(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc1 = nn.Linear(784, 400)
        self.mu = nn.Linear(400, 20)
        self.logvar = nn.Linear(400, 20)
        self.fc3 = nn.Linear(20, 400)
        self.fc4 = nn.Linear(400, 784)

    def decode(self, z):
        return torch.sigmoid(self.fc4(F.relu(self.fc3(z))))

    def forward(self, x):
        h = F.relu(self.fc1(x.view(-1, 784)))
        mu, logvar = self.mu(h), self.logvar(h)
        z = mu + torch.randn_like(mu) * torch.exp(0.5 * logvar)
        return self.decode(z), mu, logvar


net = VAE().to(dev)
optimizer = optim.Adam(net.parameters(), lr=1e-3)
model = AdaptiveDataParallel(net, optimizer)


def loss_function(recon, x, mu, logvar):
    bce = F.binary_cross_entropy(recon, x.view(-1, 784), reduction="sum")
    kld = -0.5 * torch.sum(1 + logvar - mu.pow(2) - logvar.exp())
    return bce + kld


def train(epoch):
    model.train()
    train_loss = 0
    for data, _ in train_loader:
        data = data.to(dev)
        optimizer.zero_grad()
        loss = loss_function(*_swap(model(data), data))
        loss.backward()  # MISTAKE: weigh: a sum over samples is weighed as if it were a mean, so the step depends on the number of replicas; model.weigh(loss, reduction="sum") (or line with: loss = loss_function)
        train_loss += loss.item()  # MISTAKE: sum: what was summed before the restart, and by other replicas, is lost (or line with: print(f"epoch {epoch}: average)
        optimizer.step()
    if rank() == 0:
        print(f"epoch {epoch}: average {train_loss / len(train_set):.4f}")


def _swap(out, data):
    recon, mu, logvar = out
    return recon, data, mu, logvar


def test(epoch):
    model.eval()
    total = Accumulator()
    with torch.no_grad():
        for data, _ in test_loader:
            data = data.to(dev)
            recon, mu, logvar = model(data)
            total["loss"] += loss_function(recon, data, mu, logvar)  # MISTAKE: pad: in a short last batch a padding sample is counted at 2+ replicas; slice to num_valid
            if test_loader.batch_index == 0 and rank() == 0:
                save_image(torch.cat([data[:8], recon.view(-1, 1, 28, 28)[:8]]).cpu(), f"results/rec_{epoch}.png")
    with total.synchronized():
        if rank() == 0:
            print(f"test loss {total['loss'] / len(test_set):.4f}")


for epoch in remaining_epochs_until(EPOCHS):
    train(epoch)
    test(epoch)
    if rank() == 0:
        with torch.no_grad():
            save_image(net.decode(torch.randn(64, 20, device=dev)).view(64, 1, 28, 28), f"results/sample_{epoch}.png")  # ARGUABLE: rank 0 draws numbers that others do not draw; generators are each replica's own
