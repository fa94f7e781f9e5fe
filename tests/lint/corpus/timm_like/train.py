"""Image classification with the usual bag of tricks."""
import argparse
import os

import torch
import torch.nn as nn
import torchvision
from data import build_loaders
from utils import AverageMeter, CheckpointSaver, ModelEma

from elasticrun import Accumulator, AdaptiveDataParallel, device, rank, remaining_epochs_until

parser = argparse.ArgumentParser()
parser.add_argument("data_dir")
parser.add_argument("--model", default="resnet18")
parser.add_argument("--batch-size", type=int, default=256)
parser.add_argument("--epochs", type=int, default=100)
parser.add_argument("--warmup-epochs", type=int, default=5)
parser.add_argument("--lr", type=float, default=0.4)
parser.add_argument("--output", default="output/train")


def train_one_epoch(epoch, model, net, loader, optimizer, loss_fn, scheduler, ema, dev):
    model.train()
    losses = AverageMeter()
    for x, y in loader:
        x, y = x.to(dev), y.to(dev)
        loss = loss_fn(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scheduler.step()
        ema.update(net)
        losses.update(loss.item(), len(x))  # MISTAKE: sum: the mean counts only this replica, and only since the restart (or line with: return losses.avg)
    return losses.avg


@torch.no_grad()
def validate(net, loader, loss_fn, dev):
    net.eval()
    total = Accumulator()
    for x, y in loader:
        out = net(x.to(dev))
        total["hits"] += (out.argmax(1) == y.to(dev)).sum()
        total["loss"] += loss_fn(out, y.to(dev)).item() * len(x)
        total["n"] += len(x)
    with total.synchronized():
        return {"loss": total["loss"] / total["n"], "top1": total["hits"] / total["n"]}


def main():
    args = parser.parse_args()
    torch.manual_seed(42)
    dev = device()
    os.makedirs(args.output, exist_ok=True)
    train, valid, num_classes = build_loaders(args.data_dir, args.batch_size)
    net = getattr(torchvision.models, args.model)(num_classes=num_classes).to(dev)
    optimizer = torch.optim.SGD(net.parameters(), lr=args.lr, momentum=0.9, nesterov=True)
    steps = len(train) * args.epochs
    warmup = len(train) * args.warmup_epochs
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda s: min(1.0, (s + 1) / warmup) * (1 - s / (steps + 1)))
    model = AdaptiveDataParallel(net, optimizer, scheduler)
    ema = ModelEma(net)  # MISTAKE: unreg: the exponential mean is not registered and restarts from the loaded weights (or line with: ema.update(net))
    saver = CheckpointSaver(args.output, max_history=5)
    loss_fn = nn.CrossEntropyLoss(label_smoothing=0.1)
    for epoch in remaining_epochs_until(args.epochs):
        train_loss = train_one_epoch(epoch, model, net, train, optimizer, loss_fn, scheduler, ema, dev)
        metrics = validate(net, valid, loss_fn, dev)
        ema_metrics = validate(ema.module, valid, loss_fn, dev)
        if rank() == 0:
            print(epoch, train_loss, metrics, ema_metrics)
            best = saver.save(net, epoch, metrics["top1"])
            print("best so far", best)


if __name__ == "__main__":
    main()
