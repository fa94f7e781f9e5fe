"""Mixed precision, ported: the scaler is registered too."""
import argparse
import contextlib

import torch
import torch.nn as nn
import torch.nn.functional as F
import torchvision
from torchvision import transforms as T

from elasticrun import (
    Accumulator,
    AdaptiveDataLoader,
    AdaptiveDataParallel,
    Variables,
    device,
    rank,
    register,
    remaining_epochs_until,
    world_size,
)


def precision(kind, dev):
    if kind == "fp32":
        return contextlib.nullcontext()
    return torch.autocast(dev.type, dtype={"fp16": torch.float16, "bf16": torch.bfloat16}[kind])


def parameters(net):
    decay = [p for p in net.parameters() if p.ndim > 1]
    rest = [p for p in net.parameters() if p.ndim <= 1]
    return [{"params": decay, "weight_decay": 5e-2}, {"params": rest, "weight_decay": 0.0}]


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--kind", choices=["fp32", "fp16", "bf16"], default="fp16")
    p.add_argument("--epochs", type=int, default=50)
    args = p.parse_args()
    torch.manual_seed(0)
    dev = device()
    if rank() == 0:
        print(f"{args.kind} on {dev}, {world_size()} replicas")
    t = T.Compose([T.RandomResizedCrop(64), T.RandomHorizontalFlip(), T.ToTensor()])
    train = AdaptiveDataLoader(torchvision.datasets.ImageFolder("tiny/train", t), batch_size=512, shuffle=True, num_workers=8, persistent_workers=True)
    valid = AdaptiveDataLoader(torchvision.datasets.ImageFolder("tiny/val", T.ToTensor()), batch_size=512, num_workers=8)
    net = torchvision.models.convnext_tiny(num_classes=200).to(dev)
    net.classifier[-1].bias.data.zero_()
    optimizer = torch.optim.AdamW(parameters(net), lr=2e-3)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 2e-3, epochs=args.epochs, steps_per_epoch=len(train))
    model = AdaptiveDataParallel(net, optimizer, scheduler)
    scaler = torch.amp.GradScaler(dev.type, enabled=args.kind == "fp16")
    register(scaler=scaler)
    best = Variables(top1=0.0, top5=0.0)
    for epoch in remaining_epochs_until(args.epochs):
        model.train()
        for x, y in train:
            with precision(args.kind, dev):
                loss = F.cross_entropy(model(x.to(dev)), y.to(dev), label_smoothing=0.1)
            optimizer.zero_grad(set_to_none=True)
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(net.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            scheduler.step()
        model.eval()
        total = Accumulator()
        for x, y in valid:
            with torch.no_grad(), precision(args.kind, dev):
                top = model(x.to(dev)).topk(5, dim=1).indices == y.to(dev)[:, None]
            top = top[: valid.num_valid]
            total["top1"] += top[:, 0].sum()
            total += {"top5": top.any(1).sum()}
        with total.synchronized():
            top1, top5 = total["top1"] / valid.num_samples, total["top5"] / valid.num_samples
        if top1 > best.top1:
            best.top1, best.top5 = top1, top5
        if rank() == 0:
            print(f"{epoch}: {top1:.4f} {top5:.4f}; best {best.top1:.4f} {best.top5:.4f}")


main()
