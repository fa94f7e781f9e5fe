"""Mean teacher: labelled and unlabelled SVHN, consistency ramp-up, teacher as moving average."""
import argparse
import csv
import math
from copy import deepcopy

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import Subset
from torchvision import datasets
from torchvision import transforms as T

from elasticrun import (
    Accumulator,
    AdaptiveDataLoader,
    AdaptiveDataParallel,
    CombinedLoader,
    LogFile,
    Variables,
    device,
    init,
    rank,
    register,
    remaining_epochs_until,
)


class Twice:
    def __init__(self, transform):
        self.transform = transform

    def __call__(self, image):
        return self.transform(image), self.transform(image)


def convnet():
    layers, width = [], 3
    for out in (64, 128, 256):
        layers += [nn.Conv2d(width, out, 3, padding=1), nn.GroupNorm(8, out), nn.LeakyReLU(0.1), nn.MaxPool2d(2)]
        width = out
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, 10))


def ramp_up(step, length):
    if step >= length:
        return 1.0
    return math.exp(-5.0 * (1.0 - step / length) ** 2)


@torch.no_grad()
def update_teacher(teacher, student, step, alpha):
    alpha = min(1 - 1 / (step + 1), alpha)
    for t, s in zip(teacher.parameters(), student.parameters()):
        t.lerp_(s, 1 - alpha)


def parse():
    p = argparse.ArgumentParser()
    p.add_argument("--labels", type=int, default=1000)
    p.add_argument("--segments", type=int, default=150)
    p.add_argument("--steps", type=int, default=1000, help="steps between evaluations")
    p.add_argument("--consistency", type=float, default=10.0)
    p.add_argument("--alpha", type=float, default=0.999)
    return p.parse_args()


def main():
    args = parse()
    init(save_interval=180, keep=2)
    torch.manual_seed(3)
    augment = Twice(T.Compose([T.RandomCrop(32, 4, padding_mode="reflect"), T.ToTensor()]))
    whole = datasets.SVHN("data", "train", augment)
    order = torch.randperm(len(whole), generator=torch.Generator().manual_seed(11)).tolist()
    labeled = AdaptiveDataLoader(
        Subset(whole, order[: args.labels]), batch_size=32, shuffle=True, device=device(), name="labeled"
    )
    unlabeled = AdaptiveDataLoader(
        Subset(whole, order[args.labels :]), batch_size=96, shuffle=True, num_workers=4, device=device(), name="unlabeled"
    )
    both = CombinedLoader({"labeled": labeled, "unlabeled": unlabeled})
    test_set = datasets.SVHN("data", "test", T.ToTensor())
    test = AdaptiveDataLoader(test_set, batch_size=500, device=device(), name="test")

    net = convnet().to(device())
    teacher = deepcopy(net).requires_grad_(False)
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-3)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, args.segments * args.steps)
    model = AdaptiveDataParallel(net, optimizer, schedule)
    register(teacher=teacher)
    best = Variables(name="best", accuracy=0.0, segment=-1)
    log = csv.writer(LogFile("mean_teacher.csv"))
    log.writerow(["segment", "steps", "accuracy"])

    for segment in remaining_epochs_until(args.segments):
        model.train()
        for batch in both.batches(args.steps):
            (x1, x2), y = batch["labeled"]
            (u1, u2), _ = batch["unlabeled"]
            logits, guesses = model(torch.cat([x1, u1])).split([len(x1), len(u1)])
            with torch.no_grad():
                targets = teacher(u2).softmax(1)
            known = F.cross_entropy(logits, y)
            weight = args.consistency * ramp_up(both.finished_batches, 40_000)
            agree = weight * F.mse_loss(guesses.softmax(1), targets)
            loss = model.weigh(known, member=labeled) + model.weigh(agree, member=unlabeled)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
            update_teacher(teacher, net, both.finished_batches, args.alpha)

        total = Accumulator()
        for x, y in test:
            with torch.no_grad():
                hits = teacher(x).argmax(1) == y
            total["hits"] += hits[: test.num_valid].sum()
        with total.synchronized():
            accuracy = total["hits"] / test.num_samples
        log.writerow([segment, both.finished_batches, f"{accuracy:.4f}"])
        if accuracy > best.accuracy:
            best.accuracy, best.segment = accuracy, segment
            if rank() == 0:
                torch.save(teacher.state_dict(), "teacher_best.pt")
        if rank() == 0:
            print(f"segment {segment}: teacher {accuracy:.2%} (best {best.accuracy:.2%})")


if __name__ == "__main__":
    main()
