"""Learn digits from a hundred labels and many images without one, as FixMatch does.

Each step takes a labeled and an unlabeled batch. Where the net is sure of what an image
shows, it is to find the same in that image much changed. Interrupt it, and start it
again with the same or another number of replicas; each step has the same samples:

    python examples/fixmatch.py --checkpoint-dir /tmp/fixmatch
    torchrun --nproc-per-node 2 examples/fixmatch.py --checkpoint-dir /tmp/fixmatch
"""

from __future__ import annotations

import argparse

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import Dataset, TensorDataset

import elasticrun
from elasticrun import Accumulator, AdaptiveDataLoader, AdaptiveDataParallel

NUM_LABELED, NUM_TRAIN = 100, 1439  # of 1797
THRESHOLD = 0.9  # of what the net is sure


def augment(image: Tensor, strength: float) -> Tensor:
    """Turn, scale and shift, all the more the stronger, and add noise."""
    matrix = torch.eye(2, 3) + torch.empty(2, 3).uniform_(-strength, strength)
    grid = F.affine_grid(matrix[None], [1, 1, 8, 8], False)
    moved = F.grid_sample(image[None], grid, padding_mode="border", align_corners=False)
    return moved[0] + strength * torch.randn_like(image)


class Twice(Dataset[tuple[Tensor, Tensor]]):
    """Each image without its label, changed a little and changed much."""

    def __init__(self, images: Tensor) -> None:
        self.images = images

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return augment(self.images[index], 0.05), augment(self.images[index], 0.3)


def make_net() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 32, 3, padding=1), nn.GELU(), nn.AvgPool2d(2),
        nn.Conv2d(32, 64, 3, padding=1), nn.GELU(),
        nn.Flatten(), nn.Linear(64 * 4 * 4, 64), nn.GELU(), nn.Linear(64, 10),
    )  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--eval-every", type=int, default=100)
    parser.add_argument("--checkpoint-dir", help="where the job goes on from")
    args = parser.parse_args()

    torch.set_num_threads(1)  # several replicas may share the machine
    torch.manual_seed(0)
    elasticrun.init(args.checkpoint_dir)
    device = elasticrun.device()
    digits = load_digits()
    order = torch.randperm(1797, generator=torch.Generator().manual_seed(0))
    images = torch.tensor(digits.images, dtype=torch.float32)[order]
    images = images.div(16).sub(0.3).div(0.4).unsqueeze(1)
    labels = torch.tensor(digits.target)[order]
    known = TensorDataset(images[:NUM_LABELED], labels[:NUM_LABELED])
    held_out = TensorDataset(images[NUM_TRAIN:], labels[NUM_TRAIN:])

    # Seeded by sample, augmentation does not depend on the number of replicas.
    labeled = AdaptiveDataLoader(known, 16, True, device=device, name="labeled")
    unknown = Twice(images[NUM_LABELED:NUM_TRAIN])
    unlabeled = AdaptiveDataLoader(
        unknown, 64, True, seed_each="sample", device=device, name="unlabeled"
    )
    both = elasticrun.CombinedLoader([labeled, unlabeled])
    valid = AdaptiveDataLoader(held_out, 64, device=device, name="valid")
    net = make_net().to(device)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, args.steps)
    model = AdaptiveDataParallel(net, optimizer, scheduler)
    total = Accumulator()

    for (x, y), (little, much) in both.batches(args.steps):
        logits = model(torch.cat([x, little, much]))
        of_little, of_much = logits[len(x) :].chunk(2)
        sure, guesses = of_little.detach().softmax(1).max(1)
        losses = F.cross_entropy(of_much, guesses, reduction="none")
        consistent = (losses * (sure > THRESHOLD)).mean()
        # The members' batches may be shared out unlike: each mean has its own weight.
        loss = model.weigh(F.cross_entropy(logits[: len(x)], y), member=labeled)
        loss = loss + model.weigh(consistent, member=unlabeled)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scheduler.step()
        step = both.finished_batches + 1
        if step % args.eval_every == 0:
            for x, y in valid:  # belongs to this step
                with torch.no_grad():
                    hits = net(x).argmax(1) == y
                total["correct"] += hits[: valid.num_valid].sum()
            with total.synchronized():
                if elasticrun.rank() == 0:
                    accuracy = total["correct"] / valid.num_samples
                    print(f"step {step:4}  accuracy {accuracy:.2%}", flush=True)
                total.clear()


if __name__ == "__main__":
    main()
