"""Train a net on handwritten digits with Accelerate, through any restarts.

    python examples/accelerated.py --checkpoint-dir /tmp/a
    elasticrun run --replicas 4 --checkpoint-dir /tmp/a examples/accelerated.py

What differs from a script without elasticrun: `prepare`, the loaders, the epochs, and
the sums of the evaluation.
"""

from __future__ import annotations

import argparse

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import TensorDataset

import elasticrun
from elasticrun import Accumulator, AdaptiveDataLoader, remaining_epochs_until
from elasticrun.integrations.accelerate import prepare


def digits() -> tuple[TensorDataset, TensorDataset]:
    """Return digits to train with, and others."""
    loaded = load_digits()
    images = torch.tensor(loaded.images, dtype=torch.float32).div(16).unsqueeze(1)
    labels = torch.tensor(loaded.target)
    chosen = torch.randperm(1797, generator=torch.Generator().manual_seed(0))
    parts = (chosen[:1439], chosen[1439:])
    train, held_out = (TensorDataset(images[part], labels[part]) for part in parts)
    return train, held_out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--checkpoint-dir", help="where the job goes on from")
    parser.add_argument("--mixed-precision", default="bf16")
    args = parser.parse_args()

    torch.set_num_threads(1)  # several replicas may share the machine
    torch.manual_seed(0)
    elasticrun.init(args.checkpoint_dir)
    accelerator = Accelerator(
        cpu=elasticrun.device().type == "cpu",
        mixed_precision=args.mixed_precision,
        gradient_accumulation_steps=2,
    )
    train_set, valid_set = digits()
    device = accelerator.device
    train = AdaptiveDataLoader(train_set, batch_size=32, shuffle=True, device=device)
    valid = AdaptiveDataLoader(valid_set, batch_size=128, device=device)
    net = nn.Sequential(
        nn.Flatten(), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 10)
    )  # fmt: skip
    adam = torch.optim.Adam(net.parameters(), 1e-2)
    num_steps = args.epochs * -(-len(train) // 2)
    cosine = torch.optim.lr_scheduler.CosineAnnealingLR(adam, num_steps)
    model, optimizer, scheduler = prepare(accelerator, net, adam, cosine)
    total = Accumulator()

    for epoch in remaining_epochs_until(args.epochs):
        model.train()
        for images, labels in train:
            with accelerator.accumulate(model):
                loss = F.cross_entropy(model(images), labels)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
        model.eval()
        for images, labels in valid:
            with torch.no_grad():
                hits = model(images).argmax(1) == labels
            total["correct"] += hits[: valid.num_valid].sum()  # without padding
        with total.synchronized():  # over all replicas
            accuracy = total["correct"] / valid.num_samples
            total.clear()
        accelerator.print(f"epoch {epoch:2}  accuracy {accuracy:.2%}", flush=True)


if __name__ == "__main__":
    main()
