"""ResNet with Weights & Biases."""
import argparse

import torch
import torch.nn.functional as F
import torchvision
import wandb
from torchvision import transforms as T

from elasticrun import Accumulator, AdaptiveDataLoader, AdaptiveDataParallel, device, rank, remaining_epochs_until

parser = argparse.ArgumentParser()
parser.add_argument("--lr", type=float, default=0.1)
parser.add_argument("--epochs", type=int, default=30)
args = parser.parse_args()


def train_one(model, optimizer, loader, dev):
    model.train()
    total = Accumulator()
    for x, y in loader:
        out = model(x.to(dev))
        loss = F.cross_entropy(out, y.to(dev))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        total["loss"] += loss.item() * loader.num_valid
        if rank() == 0 and loader.batch_index % 20 == 0:
            wandb.log({"batch_loss": loss.item()})
    with total.synchronized():
        return total["loss"] / loader.num_samples


def evaluate(model, loader, dev):
    model.eval()
    total = Accumulator()
    table = []
    with torch.no_grad():
        for x, y in loader:
            pred = model(x.to(dev)).argmax(1).cpu()
            total["hits"] += (pred == y)[: loader.num_valid].sum()
            wrong = (pred != y).nonzero().flatten().tolist()
            table.extend([int(y[i]), int(pred[i])] for i in wrong)  # MISTAKE: sum: the table of errors holds only those since the restart, of rank 0's share (or line with: table = []) (or line with: return total["hits"]) (or line with: wandb.Table)
    with total.synchronized():
        return total["hits"] / loader.num_samples, table


def main():
    torch.manual_seed(0)
    dev = device()
    wandb.init(project="pets", config=vars(args))  # MISTAKE: name: each replica, and each start, opens a run of its own; on rank 0, with an id and resume="allow"
    t = T.Compose([T.Resize((224, 224)), T.RandomHorizontalFlip(), T.ToTensor()])
    train = AdaptiveDataLoader(torchvision.datasets.OxfordIIITPet("data", transform=t), batch_size=64, shuffle=True, num_workers=4)
    valid = AdaptiveDataLoader(torchvision.datasets.OxfordIIITPet("data", split="test", transform=t), batch_size=128, num_workers=4)
    net = torchvision.models.resnet34(num_classes=37).to(dev)
    optimizer = torch.optim.SGD(net.parameters(), args.lr, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, args.epochs)
    model = AdaptiveDataParallel(net, optimizer, scheduler)
    for epoch in remaining_epochs_until(args.epochs):
        train_loss = train_one(model, optimizer, train, dev)
        if rank() == 0:
            wandb.log({"epoch": epoch, "train_loss": train_loss})  # MISTAKE: effect: between the loops, logged again as another step after a restart in the evaluation
        accuracy, table = evaluate(model, valid, dev)
        scheduler.step()
        if rank() == 0:
            wandb.log({"epoch": epoch, "accuracy": accuracy, "errors": wandb.Table(["want", "got"], table)})
    if rank() == 0:
        wandb.finish()


main()
