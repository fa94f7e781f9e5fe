"""The VAE example of pytorch/examples with beta annealing, moved to elasticrun."""
import argparse
import os

import torch
import torch.nn.functional as F
from torch import nn, optim
from torchvision import datasets, transforms
from torchvision.utils import save_image

from elasticrun import Accumulator, AdaptiveDataLoader, AdaptiveDataParallel, device, once, rank, remaining_epochs_until

parser = argparse.ArgumentParser(description="VAE MNIST Example")
parser.add_argument("--batch-size", type=int, default=128)
parser.add_argument("--epochs", type=int, default=30)
parser.add_argument("--seed", type=int, default=1)
parser.add_argument("--beta-step", type=float, default=0.1)
parser.add_argument("--log-interval", type=int, default=10)
parser.add_argument("--results", default="results")
args = parser.parse_args()

torch.manual_seed(args.seed)  # ARGUABLE: all replicas draw the same noise, for other samples
os.makedirs(args.results, exist_ok=True)
train_set = datasets.MNIST("../data", train=True, download=True, transform=transforms.ToTensor())  # ARGUABLE: all replicas download at the same time
test_set = datasets.MNIST("../data", train=False, transform=transforms.ToTensor())
train_loader = AdaptiveDataLoader(train_set, batch_size=args.batch_size, shuffle=True, device=device())
test_loader = AdaptiveDataLoader(test_set, batch_size=args.batch_size, device=device())


class VAE(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc1 = nn.Linear(784, 400)
        self.fc21 = nn.Linear(400, 20)
        self.fc22 = nn.Linear(400, 20)
        self.fc3 = nn.Linear(20, 400)
        self.fc4 = nn.Linear(400, 784)

    def encode(self, x):
        h1 = F.relu(self.fc1(x))
        return self.fc21(h1), self.fc22(h1)

    def decode(self, z):
        return torch.sigmoid(self.fc4(F.relu(self.fc3(z))))

    def forward(self, x):
        mu, logvar = self.encode(x.view(-1, 784))
        z = mu + torch.randn_like(mu) * torch.exp(0.5 * logvar)
        return self.decode(z), mu, logvar


net = VAE().to(device())
optimizer = optim.Adam(net.parameters(), lr=1e-3)
model = AdaptiveDataParallel(net, optimizer)


def loss_function(recon_x, x, mu, logvar, beta):
    bce = F.binary_cross_entropy(recon_x, x.view(-1, 784), reduction="sum")
    kld = -0.5 * torch.sum(1 + logvar - mu.pow(2) - logvar.exp())
    return bce + beta * kld


def train(epoch, beta):
    model.train()
    train_loss = 0
    for data, _ in train_loader:
        optimizer.zero_grad()
        recon, mu, logvar = model(data)
        loss = loss_function(recon, data, mu, logvar, beta)  # MISTAKE: weigh: a sum over this replica's samples, no mean (or line with: loss.backward()) (or line with: return bce + beta * kld)
        loss.backward()
        train_loss += loss.item()  # MISTAKE: sum: this replica's share only, lost by a restart (or line with: train_loss = 0) (or line with: Average loss)
        optimizer.step()
        if train_loader.batch_index % args.log_interval == 0 and rank() == 0:
            print(f"Train Epoch: {epoch} [{train_loader.index}/{len(train_set)}]\tLoss: {loss.item() / len(data):.6f}")  # ARGUABLE: rank 0's share, only printed
    if rank() == 0 and once("average"):  # MISTAKE: once: is collective, but only rank 0 comes here
        print(f"====> Epoch: {epoch} Average loss: {train_loss / len(train_set):.4f}")


def test(epoch, beta):
    model.eval()
    total = Accumulator()
    with torch.no_grad():
        for i, (data, _) in enumerate(test_loader):  # MISTAKE: enum: is 0 again after a restart, so that the pictures of a later batch replace those of the first (or line with: if i == 0 and rank() == 0)
            n = test_loader.num_valid
            recon, mu, logvar = model(data)
            total["loss"] += loss_function(recon[:n], data[:n], mu[:n], logvar[:n], beta)
            if i == 0 and rank() == 0:
                shown = min(len(data), 8)
                comparison = torch.cat([data[:shown], recon.view(-1, 1, 28, 28)[:shown]])
                save_image(comparison.cpu(), f"{args.results}/reconstruction_{epoch}.png", nrow=shown)
    with total.synchronized():
        if rank() == 0:
            print(f"====> Test set loss: {total['loss'] / len(test_set):.4f}")


if __name__ == "__main__":
    beta = 0.0
    for epoch in remaining_epochs_until(args.epochs, start=1):
        train(epoch, beta)
        test(epoch, beta)
        beta = min(1.0, beta + args.beta_step)  # MISTAKE: lost: is 0 again after a restart (or line with: beta = 0.0) (or line with: train(epoch, beta)) (or line with: test(epoch, beta))
        with torch.no_grad():
            sample = net.decode(torch.randn(64, 20, device=device())).cpu()
            if rank() == 0:
                save_image(sample.view(64, 1, 28, 28), f"{args.results}/sample_{epoch}.png")
