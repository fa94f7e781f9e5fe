"""ImageNet training, after the reference script."""
import argparse
import os
import shutil
import time

import torch
import torch.nn as nn
import torchvision.datasets as datasets
import torchvision.models as models
import torchvision.transforms as T

from elasticrun import (
    Accumulator,
    AdaptiveDataLoader,
    AdaptiveDataParallel,
    device,
    rank,
    remaining_epochs_until,
    world_size,
)

parser = argparse.ArgumentParser()
parser.add_argument("data")
parser.add_argument("-a", "--arch", default="resnet50")
parser.add_argument("--epochs", default=90, type=int)
parser.add_argument("-b", "--batch-size", default=256, type=int)
parser.add_argument("--lr", default=0.1, type=float)
parser.add_argument("--resume", default="", type=str)
parser.add_argument("-p", "--print-freq", default=10, type=int)
best_acc1 = 0


def main():
    global best_acc1
    args = parser.parse_args()
    dev = device()
    net = models.__dict__[args.arch]().to(dev)
    criterion = nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(net.parameters(), args.lr * world_size(), momentum=0.9, weight_decay=1e-4)  # MISTAKE: world: the batch is global, so the learning rate must not follow the number of replicas
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=30)
    model = AdaptiveDataParallel(net, optimizer, scheduler)
    if args.resume and os.path.isfile(args.resume):
        checkpoint = torch.load(args.resume, map_location="cpu")
        net.load_state_dict(checkpoint["state_dict"])  # MISTAKE: zoneP: each start puts the old weights over those of the checkpoint
        best_acc1 = checkpoint["best_acc1"]
    norm = T.Normalize([0.485, 0.456, 0.406], [0.229, 0.224, 0.225])
    train_set = datasets.ImageFolder(os.path.join(args.data, "train"), T.Compose([T.RandomResizedCrop(224), T.RandomHorizontalFlip(), T.ToTensor(), norm]))
    val_set = datasets.ImageFolder(os.path.join(args.data, "val"), T.Compose([T.Resize(256), T.CenterCrop(224), T.ToTensor(), norm]))
    train_loader = AdaptiveDataLoader(train_set, batch_size=args.batch_size, shuffle=True, num_workers=8, pin_memory=True)
    val_loader = AdaptiveDataLoader(val_set, batch_size=args.batch_size, num_workers=8)
    for epoch in remaining_epochs_until(args.epochs):
        train(train_loader, model, criterion, optimizer, epoch, dev, args)
        acc1 = validate(val_loader, model, dev)
        scheduler.step()
        is_best = acc1 > best_acc1
        best_acc1 = max(acc1, best_acc1)  # MISTAKE: lost: a global is 0 again after a restart (or line with: is_best = acc1 > best_acc1)
        save_checkpoint({"epoch": epoch + 1, "state_dict": net.state_dict(), "best_acc1": best_acc1}, is_best)


def train(loader, model, criterion, optimizer, epoch, dev, args):
    model.train()
    end = time.time()
    for i, (images, target) in loader.enumerate():
        data_time = time.time() - end
        images, target = images.to(dev, non_blocking=True), target.to(dev, non_blocking=True)
        loss = criterion(model(images), target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        end = time.time()
        if i % args.print_freq == 0 and rank() == 0:
            print(f"Epoch [{epoch}][{i}/{len(loader)}] data {data_time:.3f} loss {loss.item():.4e}")


def validate(loader, model, dev):
    model.eval()
    total = Accumulator()
    with torch.no_grad():
        for images, target in loader:
            hits = model(images.to(dev)).argmax(1) == target.to(dev)
            total["top1"] += hits[: loader.num_valid].sum()
    with total.synchronized():
        acc1 = 100.0 * total["top1"] / loader.num_samples
    if rank() == 0:
        print(f" * Acc@1 {acc1:.3f}")
    return acc1


def save_checkpoint(state, is_best, filename="checkpoint.pth.tar"):
    torch.save(state, filename)  # MISTAKE: everyrank: all replicas write the same file at once (or line with: save_checkpoint({"epoch")
    if is_best:
        shutil.copyfile(filename, "model_best.pth.tar")  # ARGUABLE: the same: by all replicas


if __name__ == "__main__":
    main()
