"""Train a small classifier, and keep the best one."""

from __future__ import annotations

import argparse
import logging
import sys
from pathlib import Path

import torch
from meters import AverageMeter
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import TensorDataset

import elasticrun
from elasticrun import AdaptiveDataLoader, AdaptiveDataParallel, Variables

logger = logging.getLogger("classifier")


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("output", type=Path)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--batch-size", type=int, default=12)
    parser.add_argument("--lr", type=float, default=0.1)
    parser.add_argument("--milestones", type=int, nargs="*", default=[1, 2])
    parser.add_argument("--dropout", type=float, default=0.3)
    parser.add_argument("--seed", type=int, default=1)
    return parser.parse_args()


def set_up_logger() -> None:
    handler = logging.StreamHandler(sys.stdout)
    handler.setFormatter(logging.Formatter("%(levelname)s %(message)s"))
    logger.handlers.clear()
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)


def make_data(num_samples: int) -> TensorDataset:
    images = torch.randn(num_samples, 8)
    return TensorDataset(images, (images.sum(1) > 0).long())


def train_one_epoch(model, loader, optimizer, mask) -> AverageMeter:  # type: ignore[no-untyped-def]
    losses = AverageMeter("loss")
    model.train()
    for images, labels in loader:
        loss = cross_entropy(model(images * mask), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.update(loss.item(), labels.size(0))
    return losses


@torch.no_grad()
def evaluate(model, loader, scale) -> AverageMeter:  # type: ignore[no-untyped-def]
    losses = AverageMeter("loss")
    model.eval()
    for images, labels in loader:
        output = model(images * scale)
        losses.update(cross_entropy(output, labels).item(), labels.size(0))
    return losses


def main() -> None:
    args = parse_args()
    set_up_logger()
    torch.manual_seed(args.seed)
    net = nn.Sequential(
        nn.Linear(8, 16),
        nn.BatchNorm1d(16),
        nn.ReLU(),
        nn.Dropout(args.dropout),
        nn.Linear(16, 2),
    )
    optimizer = torch.optim.SGD(net.parameters(), args.lr, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, args.milestones)
    model = AdaptiveDataParallel(net, optimizer, scheduler)
    train = AdaptiveDataLoader(make_data(60), args.batch_size, shuffle=True)
    valid = AdaptiveDataLoader(make_data(36), args.batch_size)
    kept = Variables(stage=0, best=float("inf"), rows=[])
    for epoch in elasticrun.remaining_epochs_until(args.epochs):
        kept.stage += 1
        mask = (torch.rand(8) > 0.1 * kept.stage).float()
        losses = train_one_epoch(model, train, optimizer, mask)
        scheduler.step()
        rate = optimizer.param_groups[0]["lr"]
        logger.info("epoch %d: training %s, next rate %r", epoch, losses, rate)
        scale = 1 + rate * torch.rand(1)
        losses = evaluate(model, valid, scale)
        kept.rows.append(losses.avg)
        is_best = losses.avg < kept.best
        kept.best = min(kept.best, losses.avg)
        logger.info("epoch %d: validation %s, best %s", epoch, losses, is_best)
    logger.info("rows %s", kept.rows)
    torch.save(net.state_dict(), args.output / "model.pt")


if __name__ == "__main__":
    main()
