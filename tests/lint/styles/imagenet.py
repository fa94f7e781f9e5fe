"""The style of a long training script: meters for the log, a schedule by epoch."""

import argparse
import shutil
import time

import torch
import torch.distributed as dist
from torch import nn
from torchvision import datasets, models, transforms

import elasticrun
from elasticrun import AdaptiveDataLoader, AdaptiveDataParallel, Variables

parser = argparse.ArgumentParser(description="training")
parser.add_argument("data", metavar="DIR")
parser.add_argument("--arch", default="resnet50")
parser.add_argument("--epochs", default=90, type=int)
parser.add_argument("--batch-size", default=256, type=int)
parser.add_argument("--lr", default=0.1, type=float)
parser.add_argument("--print-freq", default=10, type=int)
parser.add_argument("--evaluate", action="store_true")


class AverageMeter:
    def __init__(self, name, fmt=":f"):
        self.name = name
        self.fmt = fmt
        self.reset()

    def reset(self):
        self.val = 0
        self.sum = 0
        self.count = 0

    def update(self, val, n=1):
        self.val = val
        self.sum += val * n
        self.count += n

    @property
    def avg(self):
        return self.sum / max(self.count, 1)

    def __str__(self):
        return f"{self.name} {self.val:.3f} ({self.avg:.3f})"


class ProgressMeter:
    def __init__(self, num_batches, meters, prefix=""):
        self.num_batches = num_batches
        self.meters = meters
        self.prefix = prefix

    def display(self, batch):
        entries = [f"{self.prefix}[{batch}/{self.num_batches}]"]
        entries += [str(meter) for meter in self.meters]
        print("\t".join(entries))


def main():
    args = parser.parse_args()
    torch.manual_seed(0)
    elasticrun.init()
    device = elasticrun.device()
    net = models.__dict__[args.arch]().to(device)
    criterion = nn.CrossEntropyLoss().to(device)
    optimizer = torch.optim.SGD(net.parameters(), args.lr, momentum=0.9)
    model = AdaptiveDataParallel(net, optimizer)
    crop = transforms.Compose(
        [transforms.RandomResizedCrop(224), transforms.ToTensor()]
    )
    train_loader = AdaptiveDataLoader(
        datasets.ImageFolder(args.data + "/train", crop),
        batch_size=args.batch_size,
        shuffle=True,
        num_workers=8,
        pin_memory=True,
    )
    val_loader = AdaptiveDataLoader(
        datasets.ImageFolder(args.data + "/val", crop), batch_size=args.batch_size
    )
    state = Variables(best_acc1=0.0, correct=0)
    if args.evaluate:
        validate(val_loader, model, state, device)
        return
    for epoch in elasticrun.remaining_epochs_until(args.epochs):
        adjust_learning_rate(optimizer, epoch, args)
        train(train_loader, model, criterion, optimizer, epoch, device, args)
        acc1 = validate(val_loader, model, state, device)
        is_best = acc1 > state.best_acc1
        state.best_acc1 = max(acc1, state.best_acc1)
        if elasticrun.rank() == 0:
            save_checkpoint(net.state_dict(), is_best)


def train(train_loader, model, criterion, optimizer, epoch, device, args):
    batch_time = AverageMeter("Time", ":6.3f")
    losses = AverageMeter("Loss", ":.4e")
    progress = ProgressMeter(
        len(train_loader), [batch_time, losses], f"Epoch [{epoch}]"
    )
    model.train()
    end = time.time()
    for i, (images, target) in enumerate(train_loader):
        images = images.to(device, non_blocking=True)
        target = target.to(device, non_blocking=True)
        loss = criterion(model(images), target)
        losses.update(loss.item(), images.size(0))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        batch_time.update(time.time() - end)
        end = time.time()
        if i % args.print_freq == 0:
            progress.display(i)


def validate(val_loader, model, state, device):
    model.eval()
    with torch.no_grad():
        for images, target in val_loader:
            output = model(images.to(device)).cpu()
            hits = (output.argmax(1) == target)[: val_loader.num_valid].sum()
            if elasticrun.world_size() > 1:
                dist.all_reduce(hits)
            state.correct += int(hits)
    acc1 = 100.0 * state.correct / val_loader.num_samples
    state.correct = 0
    print(f" * Acc@1 {acc1:.3f}")
    return acc1


def save_checkpoint(state, is_best, filename="checkpoint.pth.tar"):
    torch.save(state, filename)
    if is_best:
        shutil.copyfile(filename, "model_best.pth.tar")


def adjust_learning_rate(optimizer, epoch, args):
    lr = args.lr * (0.1 ** (epoch // 30))
    for param_group in optimizer.param_groups:
        param_group["lr"] = lr


if __name__ == "__main__":
    main()
