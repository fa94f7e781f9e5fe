"""Train a small language model on two streamed sources, packed and mixed.

The sources are JSON lines in shards: what the standard library has at its top, and in
its packages. Interrupt it, and start it again with another number of replicas:

    elasticrun run --replicas 4 examples/stream.py --data /tmp/data
"""

from __future__ import annotations

import argparse
import json
import math
import sysconfig
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import elasticrun
from elasticrun import AdaptiveDataLoader, AdaptiveDataParallel, Mixed

CONTEXT = 64  # characters of a sequence
NUM_FILES = 160  # of each source
NUM_CHARACTERS = 128  # ASCII; all others count as the last
SOURCES = {"modules": "*.py", "packages": "*/*.py"}


def write_shards(folder: Path) -> None:
    """Write each source's files as documents of JSON lines, in eight shards."""
    library = Path(sysconfig.get_paths()["stdlib"])
    for name, pattern in SOURCES.items():
        files = [p for p in sorted(library.glob(pattern)) if p.parent.name != "test"]
        texts = [file.read_text("utf-8", "replace") for file in files[:NUM_FILES]]
        for shard in range(8):
            path = folder / f"{name}-{shard}.jsonl"
            lines = [json.dumps({"text": text}) + "\n" for text in texts[shard::8]]
            by_rank = Path(f"{path}.{elasticrun.rank()}")
            by_rank.write_text("".join(lines))
            by_rank.replace(path)  # whole or not at all


def tokens(document: dict[str, str]) -> list[int]:
    """Return a document's characters as numbers."""
    return [min(ord(c), NUM_CHARACTERS - 1) for c in document["text"]]


class Model(nn.Module):
    """Guesses each next character from those before it in the same document."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.characters = nn.Embedding(NUM_CHARACTERS, width)
        self.places = nn.Parameter(torch.zeros(CONTEXT - 1, width))
        self.attention = nn.MultiheadAttention(width, 4, batch_first=True)
        self.guess = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, 256), nn.GELU(), nn.Linear(256, 128)
        )

    def forward(self, tokens: Tensor, documents: Tensor) -> Tensor:
        x = self.characters(tokens) + self.places
        is_other = documents[:, :, None] != documents[:, None, :]
        is_later = torch.ones_like(is_other[0]).triu(1)
        mask = (is_other | is_later).repeat_interleave(4, 0)
        x = x + self.attention(x, x, x, attn_mask=mask, need_weights=False)[0]
        guesses: Tensor = self.guess(x)
        return guesses


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, default=Path("stream-data"))
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--checkpoint-dir", help="where the job goes on from")
    args = parser.parse_args()

    torch.set_num_threads(1)  # several replicas may share the machine
    torch.manual_seed(0)
    elasticrun.init(args.checkpoint_dir)
    if not (args.data / "packages-7.jsonl").exists():
        args.data.mkdir(parents=True, exist_ok=True)
        write_shards(args.data)

    sources = {}
    for name in SOURCES:
        texts = elasticrun.TextLines(args.data / f"{name}-*.jsonl", parse=json.loads)
        sources[name] = elasticrun.Packed(texts, tokens, CONTEXT)
    mix = Mixed(sources, {"modules": 3, "packages": 1})  # exact in each 1000 sequences
    train = AdaptiveDataLoader(mix, batch_size=32, shuffle=True)

    net = Model().to(elasticrun.device())
    optimizer = torch.optim.AdamW(net.parameters(), lr=3e-3)
    model = AdaptiveDataParallel(net, optimizer)  # registered: saved, loaded
    total = elasticrun.Accumulator()

    for batch in train.batches(args.steps):
        text = batch["tokens"].to(elasticrun.device())
        documents = batch["documents"].to(elasticrun.device())
        guesses = model(text[:, :-1], documents[:, :-1])
        nats = F.cross_entropy(guesses.transpose(1, 2), text[:, 1:])
        optimizer.zero_grad()
        nats.backward()
        optimizer.step()
        total["bits"] += nats.item() / math.log(2) * train.num_valid
        total["sequences"] += train.num_valid
        if train.finished_batches % 50 == 49:
            with total.synchronized():  # over all replicas
                bits = total["bits"] / total["sequences"]
                total.clear()
            if elasticrun.rank() == 0:
                step = train.finished_batches + 1
                print(f"step {step:4}  {bits:.2f} bits", flush=True)


if __name__ == "__main__":
    main()
