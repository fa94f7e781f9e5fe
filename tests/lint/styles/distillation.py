"""Distillation with a frozen teacher, two losses, freeze for the first epochs."""
import argparse

import torch
import torch.nn as nn
import torch.nn.functional as F
import torchvision

import elasticrun
from elasticrun import AdaptiveDataLoader, AdaptiveDataParallel, Accumulator, Variables


class KDLoss(nn.Module):
    def __init__(self, T=4.0, alpha=0.9):
        super().__init__()
        self.T, self.alpha = T, alpha

    def forward(self, s, t, y):
        soft = F.kl_div(F.log_softmax(s / self.T, 1), F.softmax(t / self.T, 1), reduction="batchmean")
        return self.alpha * soft * self.T**2 + (1 - self.alpha) * F.cross_entropy(s, y)


def freeze(module, frozen=True):
    for p in module.parameters():
        p.requires_grad = not frozen


def set_lr(optimizer, base, epoch, milestones):
    lr = base
    for m in milestones:
        if epoch >= m:
            lr *= 0.1
    for g in optimizer.param_groups:
        g["lr"] = lr
    return lr


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--teacher", required=True)
    ap.add_argument("--epochs", type=int, default=240)
    ap.add_argument("--bs", type=int, default=64)
    ap.add_argument("--lr", type=float, default=0.05)
    ap.add_argument("--freeze-epochs", type=int, default=1)
    opt = ap.parse_args()

    elasticrun.init()
    torch.manual_seed(0)
    torch.backends.cudnn.benchmark = True
    dev = elasticrun.device()
    teacher = torchvision.models.resnet50(num_classes=100)
    teacher.load_state_dict(torch.load(opt.teacher, map_location="cpu"))
    teacher = teacher.to(dev).eval()
    freeze(teacher)
    student = torchvision.models.resnet18(num_classes=100).to(dev)
    nn.init.zeros_(student.fc.bias)
    optimizer = torch.optim.SGD(student.parameters(), lr=opt.lr, momentum=0.9, weight_decay=5e-4, nesterov=True)
    net = AdaptiveDataParallel(student, optimizer)
    kd = KDLoss()
    tf = torchvision.transforms.ToTensor()
    tr = AdaptiveDataLoader(torchvision.datasets.CIFAR100("data", True, tf), opt.bs, True, num_workers=2, drop_last=True)
    te = AdaptiveDataLoader(torchvision.datasets.CIFAR100("data", False, tf), opt.bs, even_batches=False)
    book, seen = Variables(best=0.0), Accumulator()

    for epoch in elasticrun.remaining_epochs_until(opt.epochs):
        lr = set_lr(optimizer, opt.lr, epoch, (150, 180, 210))
        freeze(student.layer1, epoch < opt.freeze_epochs)
        net.train()
        for x, y in tr:
            x, y = x.to(dev), y.to(dev)
            with torch.no_grad():
                t = teacher(x)
            loss = kd(net(x), t, y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        net.eval()
        with torch.no_grad():
            for x, y in te:
                pred = net(x.to(dev)).argmax(1).cpu()
                seen["hits"] += (pred == y).sum()
                seen["all"] += len(y)
        acc = elasticrun_mean(seen)
        if acc > book.best:
            book.best = acc
            if elasticrun.rank() == 0:
                torch.save({"student": student.state_dict(), "acc": acc, "epoch": epoch}, "student.pt")
        print(f"{epoch} lr {lr:.4f} acc {acc:.4f} best {book.best:.4f}")


def elasticrun_mean(seen):
    with seen.synchronized():
        mean = seen["hits"] / seen["all"]
        seen.clear()
    return mean


if __name__ == "__main__":
    main()
