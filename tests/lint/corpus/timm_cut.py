#!/usr/bin/env python3
"""ImageNet-style training script, after timm's train.py; ported to elasticrun."""
import argparse
import copy
import csv
import os
from collections import OrderedDict
from pathlib import Path

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import Dataset
from torch.utils.tensorboard import SummaryWriter

from elasticrun import Accumulator, AdaptiveDataLoader, AdaptiveDataParallel, LogFile, Variables, device
from elasticrun import once, rank, remaining_epochs_until, world_size

parser = argparse.ArgumentParser(description="PyTorch ImageNet Training")
parser.add_argument("data_dir")
parser.add_argument("--output", default="./output/train")
parser.add_argument("--num-classes", type=int, default=100)
parser.add_argument("-b", "--batch-size", type=int, default=256)
parser.add_argument("--lr-base", type=float, default=0.1)
parser.add_argument("--epochs", type=int, default=90)
parser.add_argument("--warmup-epochs", type=int, default=5)
parser.add_argument("--mixup", type=float, default=0.2)
parser.add_argument("--model-ema-decay", type=float, default=0.9998)
parser.add_argument("-j", "--workers", type=int, default=4)


class AverageMeter:
    def __init__(self):
        self.avg = self.sum = 0.0
        self.count = 0

    def update(self, val, n=1):
        self.sum += val * n
        self.count += n
        self.avg = self.sum / self.count


class ModelEma:
    def __init__(self, model, decay):
        self.module = copy.deepcopy(model).eval()
        self.decay = decay

    @torch.no_grad()
    def update(self, model):
        for e, m in zip(self.module.state_dict().values(), model.state_dict().values()):
            e.copy_(self.decay * e + (1.0 - self.decay) * m)


class ImageTensors(Dataset):
    """One .pt file per image: (uint8 tensor CHW, label)."""

    def __init__(self, root, split, train):
        self.files = sorted(Path(root, split).glob("*/*.pt"))
        self.train = train

    def __len__(self):
        return len(self.files)

    def __getitem__(self, index):
        image, label = torch.load(self.files[index])
        image = image.float() / 255
        if self.train and torch.rand(()) < 0.5:
            image = image.flip(-1)
        return image, label


def create_model(num_classes):
    def block(i, o, s):
        return nn.Sequential(nn.Conv2d(i, o, 3, s, 1, bias=False), nn.BatchNorm2d(o), nn.SiLU())

    return nn.Sequential(
        block(3, 32, 2), block(32, 64, 2), block(64, 128, 2), block(128, 256, 2),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(256, num_classes),
    )


def mixup_batch(x, y, alpha, num_classes):
    target = F.one_hot(y, num_classes).float()
    lam = np.random.beta(alpha, alpha) if alpha > 0 else 1.0
    return x * lam + x.flip(0) * (1 - lam), target * lam + target.flip(0) * (1 - lam)  # ARGUABLE: pairs are made within a replica's share: as good, but not the same at another number of replicas


def train_one_epoch(epoch, model, loader, optimizer, args, model_ema, writer, progress):
    losses_m = AverageMeter()
    model.train()
    for batch_idx, (x, y) in loader.enumerate():
        x, y = x.to(device()), y.to(device())
        x, target = mixup_batch(x, y, args.mixup, args.num_classes)
        loss = torch.sum(-target * F.log_softmax(model(x), dim=-1), dim=-1).mean()
        optimizer.zero_grad()
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 5.0)
        optimizer.step()
        model_ema.update(model)
        losses_m.update(loss.item(), x.size(0))  # MISTAKE: sum: the meter is a local object: after a restart in the epoch it holds the batches since then only, and those of one rank; its average goes into summary.csv (or line with: losses_m = AverageMeter()) (or line with: return OrderedDict([("loss", losses_m.avg)]))
        if writer is not None and batch_idx % 50 == 0:
            writer.add_scalar("train/grad_norm", norm, progress.step)
            writer.flush()
        progress.step += 1
    return OrderedDict([("loss", losses_m.avg)])


@torch.no_grad()
def validate(model, loader):
    meters = Accumulator()
    model.eval()
    for x, y in loader:
        x, y = x.to(device()), y.to(device())
        output = model(x)
        meters["loss"] += F.cross_entropy(output, y, reduction="sum").item()
        meters["top1"] += (output.argmax(1) == y).sum().item()
        meters["n"] += y.size(0)
    with meters.synchronized():
        n = meters["n"]
        return OrderedDict((k, float(meters[k] / n)) for k in ("loss", "top1"))


def main():
    args = parser.parse_args()
    torch.manual_seed(42)
    os.makedirs(args.output, exist_ok=True)

    net = create_model(args.num_classes).to(device())
    global_batch_size = args.batch_size * world_size()
    args.lr = args.lr_base * global_batch_size / 256  # MISTAKE: world: batch_size= below is already the global batch, so the rate depends on how many replicas the first start has, while the batch does not (or line with: global_batch_size = args.batch_size * world_size())
    optimizer = torch.optim.SGD(net.parameters(), lr=args.lr, momentum=0.9, weight_decay=2e-5, nesterov=True)
    warmup = torch.optim.lr_scheduler.LinearLR(optimizer, 0.01, total_iters=args.warmup_epochs)
    cosine = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, args.epochs - args.warmup_epochs)
    scheduler = torch.optim.lr_scheduler.SequentialLR(optimizer, [warmup, cosine], [args.warmup_epochs])
    model = AdaptiveDataParallel(net, optimizer, scheduler)
    model_ema = ModelEma(net, decay=args.model_ema_decay)  # MISTAKE: unreg: the average is in no checkpoint: after a restart it begins again as a copy of the loaded weights, and eval_ema is that of another model (or line with: model_ema.update(model)) (or line with: self.module = copy.deepcopy(model).eval())

    loader_train = AdaptiveDataLoader(
        ImageTensors(args.data_dir, "train", True), batch_size=args.batch_size,
        shuffle=True, num_workers=args.workers, drop_last=True, name="train",
    )
    loader_eval = AdaptiveDataLoader(
        ImageTensors(args.data_dir, "val", False), batch_size=args.batch_size,
        num_workers=args.workers, even_batches=False, name="eval",
    )
    best = Variables(name="best", metric=0.0, epoch=-1)
    progress = Variables(name="progress", step=0)
    summary = csv.writer(LogFile(os.path.join(args.output, "summary.csv")))
    summary.writerow(["epoch", "train_loss", "eval_loss", "eval_top1", "eval_top1_ema"])

    writer = None
    if once("tensorboard") and rank() == 0:  # MISTAKE: once: False in each later generation, so writer stays None and the curve ends at the first restart (or line with: writer = SummaryWriter(args.output)
        writer = SummaryWriter(args.output, purge_step=progress.step)

    for epoch in remaining_epochs_until(args.epochs):
        train_metrics = train_one_epoch(epoch, model, loader_train, optimizer, args, model_ema, writer, progress)
        eval_metrics = validate(model, loader_eval)
        ema_metrics = validate(model_ema.module, loader_eval)
        scheduler.step()
        summary.writerow([epoch, train_metrics["loss"], eval_metrics["loss"], eval_metrics["top1"], ema_metrics["top1"]])
        if ema_metrics["top1"] > best.metric:
            best.metric, best.epoch = ema_metrics["top1"], epoch
            if rank() == 0:
                torch.save(model_ema.module.state_dict(), os.path.join(args.output, "model_best.pt"))
        if rank() == 0:
            print(f"epoch {epoch}: {dict(eval_metrics)}")
    if rank() == 0:
        print(f"*** Best metric: {best.metric:.4f} (epoch {best.epoch})")


if __name__ == "__main__":
    main()
