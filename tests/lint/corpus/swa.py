"""Stochastic weight averaging in the last epochs."""
import argparse

import torch
import torch.nn.functional as F
import torchvision
from torch.optim.swa_utils import SWALR, AveragedModel, update_bn
from torchvision import transforms as T

from elasticrun import Accumulator, AdaptiveDataLoader, AdaptiveDataParallel, device, rank, remaining_epochs_until

p = argparse.ArgumentParser()
p.add_argument("--epochs", type=int, default=100)
p.add_argument("--swa-start", type=int, default=75)
p.add_argument("--swa-lr", type=float, default=0.05)
args = p.parse_args()


def evaluate(net, loader, dev):
    net.eval()
    total = Accumulator()
    with torch.no_grad():
        for x, y in loader:
            total["hits"] += (net(x.to(dev)).argmax(1) == y.to(dev))[: loader.num_valid].sum()
    with total.synchronized():
        return total["hits"] / loader.num_samples


def main():
    torch.manual_seed(0)
    dev = device()
    t = T.Compose([T.RandomCrop(32, 4), T.RandomHorizontalFlip(), T.ToTensor()])
    train = AdaptiveDataLoader(torchvision.datasets.CIFAR100("data", transform=t), batch_size=128, shuffle=True)
    test = AdaptiveDataLoader(torchvision.datasets.CIFAR100("data", train=False, transform=T.ToTensor()), batch_size=500)
    net = torchvision.models.resnet18(num_classes=100).to(dev)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9, weight_decay=5e-4)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, args.swa_start)
    model = AdaptiveDataParallel(net, optimizer, scheduler)
    swa_model = AveragedModel(net)  # MISTAKE: unreg: the average and its count are not registered (or line with: swa_model.update_parameters(net))
    swa_scheduler = SWALR(optimizer, swa_lr=args.swa_lr, anneal_epochs=5)  # MISTAKE: unreg: the second scheduler is not registered (and it changes the learning rate when it is made) (or line with: swa_scheduler.step())
    for epoch in remaining_epochs_until(args.epochs):
        model.train()
        for x, y in train:
            loss = F.cross_entropy(model(x.to(dev)), y.to(dev))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        if epoch >= args.swa_start:
            swa_model.update_parameters(net)
            swa_scheduler.step()
        else:
            scheduler.step()
        if rank() == 0:
            print(f"epoch {epoch} lr {optimizer.param_groups[0]['lr']:.4f}")  # ARGUABLE: a print in front of the evaluation is repeated
        accuracy = evaluate(net, test, dev)
        if rank() == 0:
            print(f"accuracy {accuracy:.4f}")
    plain = torch.utils.data.DataLoader(train.dataset, batch_size=256)
    update_bn(plain, swa_model, device=dev)
    accuracy = evaluate(swa_model, test, dev)
    if rank() == 0:
        print(f"averaged: {accuracy:.4f}")
        torch.save(swa_model.module.state_dict(), "swa.pt")


main()
