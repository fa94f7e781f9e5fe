"""Train a small character transformer on Python's own source, through any restarts.

Interrupt it, and start it again with the same or another number of replicas:

    python examples/text.py --checkpoint-dir /tmp/text
    torchrun --nproc-per-node 2 examples/text.py --checkpoint-dir /tmp/text
"""

from __future__ import annotations

import argparse
import math
import sysconfig
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import elasticrun
from elasticrun import Accumulator, AdaptiveDataLoader, AdaptiveDataParallel

CONTEXT = 64  # characters that the net sees
NUM_CHARACTERS = 128  # ASCII; all others count as the last


def read_text(num_bytes: int) -> Tensor:
    """Return the standard library's source as numbers of characters."""
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    source = b"".join(file.read_bytes() for file in files)[:num_bytes]
    return torch.tensor(list(source)).clamp(max=NUM_CHARACTERS - 1)


def stretches(text: Tensor) -> TensorDataset:
    """Return stretches of a text with what follows each character."""
    windows = text.unfold(0, CONTEXT + 1, CONTEXT)
    return TensorDataset(windows[:, :-1], windows[:, 1:])


class Transformer(nn.Module):
    """Guesses each next character. No dropout: a mask would be each replica's own."""

    def __init__(self, width: int = 64, heads: int = 4, layers: int = 2) -> None:
        super().__init__()
        self.characters = nn.Embedding(NUM_CHARACTERS, width)
        self.places = nn.Parameter(torch.zeros(CONTEXT, width))
        layer = nn.TransformerEncoderLayer(
            width, heads, 4 * width, 0.0, "gelu", batch_first=True, norm_first=True
        )
        self.layers = nn.TransformerEncoder(
            layer, layers, nn.LayerNorm(width), enable_nested_tensor=False
        )
        self.guess = nn.Linear(width, NUM_CHARACTERS)

    def forward(self, x: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(CONTEXT, x.device)
        x = self.characters(x) + self.places
        logits: Tensor = self.guess(self.layers(x, mask, is_causal=True))
        return logits


def bits_per_character(logits: Tensor, y: Tensor) -> Tensor:
    """Return for each window how far the guesses were from it."""
    nats = F.cross_entropy(logits.transpose(1, 2), y, reduction="none")
    return nats.mean(1) / math.log(2)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--num-bytes", type=int, default=2_000_000, help="of source")
    parser.add_argument("--checkpoint-dir", help="where the job goes on from")
    args = parser.parse_args()

    torch.set_num_threads(1)  # several replicas may share the machine
    torch.manual_seed(0)
    elasticrun.init(args.checkpoint_dir)
    device = elasticrun.device()

    text = read_text(args.num_bytes)
    cut = len(text) * 19 // 20
    train = AdaptiveDataLoader(stretches(text[:cut]), batch_size=32, shuffle=True)
    valid = AdaptiveDataLoader(stretches(text[cut:]), batch_size=256)

    net = Transformer().to(device)
    optimizer = torch.optim.AdamW(net.parameters(), lr=5e-3)
    # len(train) counts the whole loop's batches, at any replica count, resumed or not.
    scheduler = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, max_lr=5e-3, total_steps=args.epochs * len(train)
    )
    model = AdaptiveDataParallel(net, optimizer, scheduler)  # registered: saved, loaded
    total = Accumulator()

    for epoch in elasticrun.remaining_epochs_until(args.epochs):
        model.train()
        for step, (x, y) in train.enumerate():  # the true number, also when resumed
            loss = bits_per_character(model(x.to(device)), y.to(device)).mean()
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), max_norm=1.0)
            optimizer.step()
            scheduler.step()  # belongs to the batch: a job stops between two batches
            if step % 100 == 0 and elasticrun.rank() == 0:
                print(f"epoch {epoch}  batch {step:4}  {loss:.2f} bits", flush=True)
        model.eval()
        for x, y in valid:
            with torch.no_grad():
                bits = bits_per_character(model(x.to(device)), y.to(device))
            total["bits"] += bits[: valid.num_valid].sum()  # without padding
        with total.synchronized():  # over all replicas
            mean = total["bits"] / valid.num_samples
            total.clear()
        if elasticrun.rank() == 0:
            print(f"epoch {epoch}  held out  {mean:.3f} bits per character", flush=True)


if __name__ == "__main__":
    main()
