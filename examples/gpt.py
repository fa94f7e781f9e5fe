"""Train a small GPT on Python's own source by steps, as nanoGPT does.

There are no epochs: each step draws random windows of one long text, and every so
often the held-out text is looked at. Interrupt it, and start it again with the same or
another number of replicas; each batch holds the same windows:

    python examples/gpt.py --checkpoint-dir /tmp/gpt
    torchrun --nproc-per-node 2 examples/gpt.py --checkpoint-dir /tmp/gpt
"""

from __future__ import annotations

import argparse

import torch
from text import CONTEXT, Transformer, bits_per_character, read_text
from torch import Tensor
from torch.utils.data import Dataset

import elasticrun
from elasticrun import (
    Accumulator,
    AdaptiveDataLoader,
    AdaptiveDataParallel,
    RandomWindows,
)


class Windows(Dataset[Tensor]):
    """Window i is the text from character i on, with the one that follows it."""

    def __init__(self, text: Tensor) -> None:
        self.text = text
        self.places = torch.arange(CONTEXT + 1)

    def __len__(self) -> int:
        return len(self.text) - CONTEXT

    def __getitems__(self, indices: Tensor) -> Tensor:
        return self.text[indices[:, None] + self.places]


def as_it_is(batch: Tensor) -> Tensor:
    return batch


def make_loader(text: Tensor, batch_size: int, name: str) -> AdaptiveDataLoader[Tensor]:
    """Return a loader of random windows; 64 batches are one look at the text."""
    windows = RandomWindows(len(text), CONTEXT + 1, num_samples=64 * batch_size)
    return AdaptiveDataLoader(
        Windows(text),
        batch_size,
        sampler=windows,
        collate_fn=as_it_is,
        device=elasticrun.device(),
        name=name,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--eval-every", type=int, default=250)
    parser.add_argument("--num-bytes", type=int, default=2_000_000, help="of source")
    parser.add_argument("--checkpoint-dir", help="where the job goes on from")
    args = parser.parse_args()

    torch.set_num_threads(1)  # several replicas may share the machine
    torch.manual_seed(0)
    elasticrun.init(args.checkpoint_dir)
    text = read_text(args.num_bytes)
    cut = len(text) * 19 // 20
    train = make_loader(text[:cut], 32, "train")
    valid = make_loader(text[cut:], 64, "valid")

    net = Transformer().to(elasticrun.device())
    optimizer = torch.optim.AdamW(net.parameters(), lr=5e-3)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, max_lr=5e-3, total_steps=args.steps
    )
    model = AdaptiveDataParallel(net, optimizer, scheduler)
    total = Accumulator()

    for windows in train.batches(args.steps):
        loss = bits_per_character(model(windows[:, :-1]), windows[:, 1:]).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scheduler.step()
        step = train.finished_batches + 1
        if step % args.eval_every == 0:
            for windows in valid.batches(8):  # belongs to this step
                with torch.no_grad():
                    bits = bits_per_character(net(windows[:, :-1]), windows[:, 1:])
                total["bits"] += bits[: valid.num_valid].sum()
                total["windows"] += valid.num_valid
            with total.synchronized():
                if elasticrun.rank() == 0:
                    mean = total["bits"] / total["windows"]
                    print(f"step {step:5d}  held out {mean:5.2f} bits", flush=True)
                total.clear()


if __name__ == "__main__":
    main()
