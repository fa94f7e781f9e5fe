"""Train a small convolutional net on handwritten digits, through any restarts.

Interrupt it, and start it again with the same or another number of replicas:

    python examples/digits.py --checkpoint-dir /tmp/digits
    torchrun --nproc-per-node 4 examples/digits.py --checkpoint-dir /tmp/digits
"""

from __future__ import annotations

import argparse
import logging

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import Dataset

import elasticrun
from elasticrun import Accumulator, AdaptiveDataLoader, AdaptiveDataParallel, Variables

DIGITS = load_digits()
NUM_TRAIN = 1439  # of 1797; divides by no batch size and no number of replicas


class Digits(Dataset[tuple[Tensor, Tensor]]):
    """The training digits, each time a little different, or the held-out ones."""

    def __init__(self, *, train: bool) -> None:
        order = torch.randperm(1797, generator=torch.Generator().manual_seed(0))
        chosen = order[:NUM_TRAIN] if train else order[NUM_TRAIN:]
        images = torch.tensor(DIGITS.images, dtype=torch.float32)[chosen]
        self.images = images.div(16).sub(0.3).div(0.4).unsqueeze(1)
        self.labels = torch.tensor(DIGITS.target)[chosen]
        self.train = train

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        image = self.images[index]
        return augment(image) if self.train else image, self.labels[index]


def augment(image: Tensor) -> Tensor:
    """Turn by up to 15 degrees, shift by up to a pixel, and add noise."""
    angle = torch.empty(()).uniform_(-0.26, 0.26)
    dx, dy = torch.empty(2).uniform_(-0.25, 0.25)
    matrix = [angle.cos(), -angle.sin(), dx, angle.sin(), angle.cos(), dy]
    grid = F.affine_grid(torch.stack(matrix).view(1, 2, 3), [1, 1, 8, 8], False)
    moved = F.grid_sample(image[None], grid, padding_mode="border", align_corners=False)
    return moved[0] + 0.1 * torch.randn_like(image)


def make_net() -> nn.Module:
    """Return a net without BatchNorm or dropout, which work on a replica's own part."""
    return nn.Sequential(
        nn.Conv2d(1, 32, 3, padding=1), nn.GELU(),
        nn.Conv2d(32, 64, 3, padding=1), nn.GELU(), nn.AvgPool2d(2),
        nn.Flatten(), nn.Linear(64 * 4 * 4, 64), nn.GELU(), nn.Linear(64, 10),
    )  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--checkpoint-dir", help="where the job goes on from")
    parser.add_argument("--output", help="file for the parameters and accuracies")
    args = parser.parse_args()

    logging.getLogger("elasticrun").setLevel(logging.INFO)  # resumed, saved, stopping
    torch.set_num_threads(1)  # several replicas may share the machine
    torch.manual_seed(0)
    elasticrun.init(args.checkpoint_dir)
    device = elasticrun.device()

    net = make_net().to(device)
    optimizer = torch.optim.SGD(net.parameters(), 0.1, 0.9, weight_decay=5e-4)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, args.epochs)
    model = AdaptiveDataParallel(net, optimizer, scheduler)  # registered: saved, loaded
    # Seeded by sample, augmentation does not depend on the number of replicas.
    train = AdaptiveDataLoader(
        Digits(train=True), 64, True, seed_each="sample", num_workers=1, name="train"
    )
    valid = AdaptiveDataLoader(Digits(train=False), 64, name="valid")
    score = Variables(accuracy=0.0, best=0.0)
    total = Accumulator()

    for epoch in elasticrun.remaining_epochs_until(args.epochs):
        model.train()
        for images, labels in train:
            loss = F.cross_entropy(model(images.to(device)), labels.to(device))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        model.eval()
        for images, labels in valid:
            with torch.no_grad():
                hits = model(images.to(device)).argmax(1) == labels.to(device)
            total["correct"] += hits[: valid.num_valid].sum()  # without padding
        with total.synchronized():  # over all replicas
            score.accuracy = total["correct"] / valid.num_samples
            total.clear()
        score.best = max(score.best, score.accuracy)
        scheduler.step()  # after the last loop, where a restart cannot do it twice
        if elasticrun.rank() == 0:
            print(f"epoch {epoch:2}  accuracy {score.accuracy:.2%}", flush=True)

    if args.output and elasticrun.rank() == 0:
        result = {"final": score.accuracy, "best": score.best}
        torch.save({"parameters": net.state_dict(), **result}, args.output)


if __name__ == "__main__":
    main()
