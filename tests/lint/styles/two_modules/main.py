"""A script whose loops stand in another module."""

import os

import torch
import torchvision
from engine import evaluate, train_one_epoch

import elasticrun as er


def build(args):
    net = torchvision.models.resnet18(num_classes=args["classes"])
    decay = [p for p in net.parameters() if p.ndim > 1]
    rest = [p for p in net.parameters() if p.ndim <= 1]
    groups = [{"params": decay, "weight_decay": 0.05}, {"params": rest}]
    optimizer = torch.optim.SGD(groups, lr=args["lr"], momentum=0.9)
    warmup = torch.optim.lr_scheduler.LinearLR(optimizer, 0.01, total_iters=5)
    cosine = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, args["epochs"] - 5)
    scheduler = torch.optim.lr_scheduler.SequentialLR(optimizer, [warmup, cosine], [5])
    return net, optimizer, scheduler


def main(args):
    er.init("checkpoints", save_interval=120)
    torch.manual_seed(args["seed"])
    os.makedirs(args["output"], exist_ok=True)
    device = er.device()
    net, optimizer, scheduler = build(args)
    net.to(device)
    model = er.AdaptiveDataParallel(net, optimizer, scheduler)
    train_set = torchvision.datasets.FakeData(2000)
    valid_set = torchvision.datasets.FakeData(400)
    loaders = {
        "train": er.AdaptiveDataLoader(train_set, 256, True, name="train"),
        "valid": er.AdaptiveDataLoader(valid_set, 256, name="valid"),
    }
    kept = er.Variables(best=0.0)
    log = er.LogFile(os.path.join(args["output"], "log.txt"))
    criterion = torch.nn.CrossEntropyLoss(label_smoothing=0.1)
    for epoch in er.remaining_epochs_until(args["epochs"]):
        train_one_epoch(model, criterion, loaders["train"], optimizer, device, epoch)
        accuracy = evaluate(model, loaders["valid"], device)
        scheduler.step()
        kept.best = max(kept.best, accuracy)
        log.write(f"{epoch} {accuracy:.4f} {kept.best:.4f}\n")


if __name__ == "__main__":
    main({"classes": 10, "lr": 0.5, "epochs": 90, "seed": 0, "output": "out"})
