"""MNIST, the usual example, on several GPUs."""
import argparse

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import optim
from torch.optim.lr_scheduler import StepLR
from torchvision import datasets, transforms

from elasticrun import AdaptiveDataLoader, AdaptiveDataParallel, device, rank, remaining_epochs_until


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(1, 32, 3, 1)
        self.conv2 = nn.Conv2d(32, 64, 3, 1)
        self.fc = nn.Linear(9216, 10)

    def forward(self, x):
        x = F.relu(self.conv2(F.relu(self.conv1(x))))
        return F.log_softmax(self.fc(torch.flatten(F.max_pool2d(x, 2), 1)), dim=1)


def train(args, model, dev, loader, optimizer, epoch):
    model.train()
    for batch_idx, (data, target) in enumerate(loader):
        data, target = data.to(dev), target.to(dev)
        optimizer.zero_grad()
        loss = F.nll_loss(model(data), target)
        loss.backward()
        optimizer.step()
        if batch_idx % args.log_interval == 0 and rank() == 0:  # ARGUABLE: after a restart the number begins at 0 again, but it is printed only
            print(f"epoch {epoch} [{batch_idx}/{len(loader)}] loss {loss.item():.4f}")  # ARGUABLE: the number is wrong after a restart, but printed only


def test(model, dev, loader):
    model.eval()
    test_loss = 0
    correct = 0
    with torch.no_grad():
        for data, target in loader:
            data, target = data.to(dev), target.to(dev)
            output = model(data)
            test_loss += F.nll_loss(output, target, reduction="sum").item()  # MISTAKE: sum: only this replica's samples since the restart are summed (or line with: test_loss /= len(loader.dataset))
            correct += output.argmax(1).eq(target).sum().item()  # MISTAKE: sum: counts of before the restart and of other replicas are missing (or line with: return correct)
    test_loss /= len(loader.dataset)
    if rank() == 0:
        print(f"test loss {test_loss:.4f}, {correct}/{len(loader.dataset)}")
    return correct


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--epochs", type=int, default=14)
    parser.add_argument("--lr", type=float, default=1.0)
    parser.add_argument("--log-interval", type=int, default=10)
    args = parser.parse_args()
    torch.manual_seed(1)
    dev = device()
    transform = transforms.Compose([transforms.ToTensor(), transforms.Normalize((0.1307,), (0.3081,))])
    train_set = datasets.MNIST("data", train=True, transform=transform)
    test_set = datasets.MNIST("data", train=False, transform=transform)
    net = Net().to(dev)
    optimizer = optim.Adadelta(net.parameters(), lr=args.lr)
    scheduler = StepLR(optimizer, step_size=1, gamma=0.7)  # MISTAKE: unreg: the scheduler is not given to AdaptiveDataParallel, so it begins at 0 again (or line with: model = AdaptiveDataParallel)
    model = AdaptiveDataParallel(net, optimizer)
    train_loader = AdaptiveDataLoader(train_set, batch_size=args.batch_size, shuffle=True)
    test_loader = AdaptiveDataLoader(test_set, batch_size=1000)
    for epoch in remaining_epochs_until(args.epochs):
        train(args, model, dev, train_loader, optimizer, epoch)
        test(model, dev, test_loader)
        scheduler.step()
    if rank() == 0:
        torch.save(net.state_dict(), "mnist_cnn.pt")


if __name__ == "__main__":
    main()
