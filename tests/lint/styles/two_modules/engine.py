"""The loops, with little elastic of their own."""

import math
import sys

import torch

import elasticrun


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
def evaluate(model, loader, device):
    totals = elasticrun.Accumulator()
    model.eval()
    for images, targets in loader:
        outputs = model(images.to(device)).cpu()
        n = loader.num_valid
        totals["right"] += (outputs.argmax(1) == targets)[:n].sum()
    with totals.synchronized():
        return totals["right"] / loader.num_samples
