"""Knowledge distillation; the teacher is read from a file and never changes."""
import argparse

import torch
import torch.nn as nn
import torch.nn.functional as F
import torchvision
from torch.utils.data import DataLoader
from torchvision import transforms as T
from tqdm import tqdm

from elasticrun import AdaptiveDataLoader, AdaptiveDataParallel, Variables, device, rank, remaining_epochs_until


def is_main():
    return rank() == 0


def kd_loss(student, teacher, target, alpha, temp):
    soft = F.kl_div(F.log_softmax(student / temp, 1), F.softmax(teacher / temp, 1), reduction="batchmean")
    return alpha * temp * temp * soft + (1 - alpha) * F.cross_entropy(student, target)


@torch.no_grad()
def evaluate(net, loader, dev):
    """Each replica reads the whole test set: a plain loader, and the same answer on all."""
    net.eval()
    correct = total = 0
    for x, y in loader:
        correct += (net(x.to(dev)).argmax(1) == y.to(dev)).sum().item()
        total += len(y)
    return correct / total


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--teacher", default="teacher.pt")
    p.add_argument("--alpha", type=float, default=0.9)
    p.add_argument("--temperature", type=float, default=4.0)
    p.add_argument("--epochs", type=int, default=60)
    args = p.parse_args()
    torch.manual_seed(0)
    dev = device()
    teacher = torchvision.models.resnet50(num_classes=10).to(dev)
    teacher.load_state_dict(torch.load(args.teacher, map_location=dev))
    teacher.requires_grad_(False).eval()
    student = torchvision.models.resnet18(num_classes=10).to(dev)
    for m in student.modules():
        if isinstance(m, nn.Conv2d):
            nn.init.kaiming_normal_(m.weight, mode="fan_out")
    optimizer = torch.optim.SGD(student.parameters(), 0.1, 0.9, weight_decay=5e-4)
    scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, [30, 45])
    model = AdaptiveDataParallel(student, optimizer, scheduler)
    t = T.Compose([T.RandomCrop(32, 4), T.RandomHorizontalFlip(), T.ToTensor()])
    train = AdaptiveDataLoader(torchvision.datasets.CIFAR10("data", transform=t), batch_size=128, shuffle=True)
    test = DataLoader(torchvision.datasets.CIFAR10("data", train=False, transform=T.ToTensor()), batch_size=500)
    if is_main():
        print("teacher:", evaluate(teacher, test, dev))
    seen = Variables(batches=0)
    for epoch in remaining_epochs_until(args.epochs):
        model.train()
        if is_main():
            bar = tqdm(total=len(train), initial=train.first_batch, desc=f"epoch {epoch}")
        for x, y in train:
            x, y = x.to(dev), y.to(dev)
            with torch.no_grad():
                wanted = teacher(x)
            loss = kd_loss(model(x), wanted, y, args.alpha, args.temperature)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            seen.batches += 1
            if is_main():
                bar.update()
                bar.set_postfix(loss=f"{loss.item():.3f}")
        scheduler.step()
        if is_main():
            bar.close()
            print(f"epoch {epoch}: test {evaluate(student, test, dev):.4f} after {seen.batches} batches")


main()
