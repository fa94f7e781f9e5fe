"""The loops, without anything elastic of their own."""

import math
import sys

import torch


def train_one_epoch(model, criterion, loader, optimizer, device, epoch, log_every=20):
    model.train()
    for i, (images, targets) in enumerate(loader):
        images, targets = images.to(device), targets.to(device)
        loss = criterion(model(images), targets)
        if not math.isfinite(loss.item()):
            print(f"loss is {loss.item()}, stopping training")
            sys.exit(1)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if i % log_every == 0:
            print(f"[{epoch}] {i}/{len(loader)} {loss.item():.3f}")


@torch.no_grad()
def evaluate(model, loader, device, totals):
    model.eval()
    for images, targets in loader:
        outputs = model(images.to(device)).cpu()
        n = loader.num_valid
        totals.correct += int((outputs.argmax(1) == targets)[:n].sum())
    accuracy = totals.correct / loader.num_samples
    totals.correct = 0
    return accuracy
