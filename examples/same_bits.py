"""Train on digits with dropout and BatchNorm, to the same bits at any number.

Scale it, kill it, and compare the last line with that of a calm run:

    elasticrun run --replicas 1 --checkpoint-dir /tmp/same examples/same_bits.py
    elasticrun scale 3
"""

from __future__ import annotations

import argparse
import hashlib

import torch
import torch.nn.functional as F
from digits import Digits
from torch import nn

import elasticrun
from elasticrun import Accumulator, AdaptiveDataLoader, AdaptiveDataParallel


def make_net() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1), nn.BatchNorm2d(16), nn.GELU(),
        nn.Conv2d(16, 32, 3, padding=1), nn.BatchNorm2d(32), nn.GELU(),
        nn.AvgPool2d(2), nn.Flatten(), nn.Dropout(0.3), nn.Linear(32 * 4 * 4, 10),
    )  # fmt: skip


def digest(net: nn.Module) -> str:
    """Return what tells two nets apart that differ in a single bit."""
    values = [value.cpu().numpy().tobytes() for value in net.state_dict().values()]
    return hashlib.sha256(b"".join(values)).hexdigest()[:16]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--checkpoint-dir", help="where the job goes on from")
    args = parser.parse_args()

    torch.set_num_threads(1)  # several replicas may share the machine
    torch.manual_seed(0)
    elasticrun.init(args.checkpoint_dir, virtual_replicas=4)  # 1 to 4 replicas
    device = elasticrun.device()

    net = make_net().to(device)
    optimizer = torch.optim.AdamW(net.parameters(), 3e-3)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, args.epochs)
    model = AdaptiveDataParallel(net, optimizer, scheduler)
    train = AdaptiveDataLoader(
        Digits(train=True), 64, True, num_workers=1, drop_last=True, name="train"
    )
    valid = AdaptiveDataLoader(Digits(train=False), 64, name="valid")
    total = Accumulator()

    for epoch in elasticrun.remaining_epochs_until(args.epochs):
        model.train()
        for images, labels in train:  # one share of the global batch at a time
            loss = F.cross_entropy(model(images.to(device)), labels.to(device))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()  # acts once, behind the last share
            total["loss"] += loss.item() * train.num_valid
        model.eval()
        for images, labels in valid:
            with torch.no_grad():
                hits = model(images.to(device)).argmax(1) == labels.to(device)
            total["hits"] += hits[: valid.num_valid].sum()  # without padding
        with total.synchronized():  # over all replicas
            loss_sum, accuracy = total["loss"], total["hits"] / valid.num_samples
            total.clear()
        scheduler.step()
        if elasticrun.rank() == 0:
            print(f"epoch {epoch}  loss {loss_sum!r}  accuracy {accuracy:.2%}")
    if elasticrun.rank() == 0:
        print(f"bits {digest(net)}", flush=True)


if __name__ == "__main__":
    main()
