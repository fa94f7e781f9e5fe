"""Language model trained with growing context; was a job for a preemptible queue."""
import argparse
import signal
import sys
import threading
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import Dataset

from elasticrun import (
    Accumulator,
    AdaptiveDataLoader,
    AdaptiveDataParallel,
    device,
    rank,
    remaining_epochs_until,
)


class Chunks(Dataset):
    def __init__(self, path, length):
        self.data, self.length = np.memmap(path, dtype=np.uint16, mode="r"), length

    def __len__(self):
        return (len(self.data) - 1) // self.length

    def __getitem__(self, i):
        row = torch.from_numpy(self.data[i * self.length : (i + 1) * self.length + 1].astype(np.int64))
        return row[:-1], row[1:]


class GRULM(nn.Module):
    def __init__(self, vocab, dim=512):
        super().__init__()
        self.embed = nn.Embedding(vocab, dim)
        self.rnn = nn.GRU(dim, dim, 3, batch_first=True)
        self.out = nn.Linear(dim, vocab)
        self.out.weight = self.embed.weight

    def forward(self, x):
        return self.out(self.rnn(self.embed(x))[0])


class AsyncSaver:
    """Writes snapshots in a thread, keeps the newest three."""

    def __init__(self, folder):
        self.folder, self.thread = Path(folder), None
        self.folder.mkdir(parents=True, exist_ok=True)

    def snapshots(self):
        return sorted(self.folder.glob("step-*.pt"))

    def save(self, step, state):
        state = {k: v.detach().cpu().clone() for k, v in state.items()}
        self.wait()
        self.thread = threading.Thread(target=self._write, args=(step, state))
        self.thread.start()

    def _write(self, step, state):
        torch.save(state, self.folder / f"step-{step:08d}.pt")
        for old in self.snapshots()[:-3]:
            old.unlink()

    def wait(self):
        if self.thread is not None:
            self.thread.join()


parser = argparse.ArgumentParser()
parser.add_argument("--corpus", default="corpus")
parser.add_argument("--vocab", type=int, default=16_000)
parser.add_argument("--lengths", type=int, nargs="+", default=[32, 64, 128, 256])
parser.add_argument("--epochs-per-stage", type=int, default=2)
parser.add_argument("--tokens-per-batch", type=int, default=16_384)
parser.add_argument("--warmup-tokens", type=float, default=2e7)
parser.add_argument("--lr", type=float, default=1e-3)
parser.add_argument("--snapshots", default="snapshots")
args = parser.parse_args()

saver = AsyncSaver(args.snapshots)
net = GRULM(args.vocab).to(device())
optimizer = torch.optim.AdamW(net.parameters(), lr=args.lr)
model = AdaptiveDataParallel(net, optimizer)
if saver.snapshots():
    net.load_state_dict(torch.load(saver.snapshots()[-1], map_location=device()))  # MISTAKE: leftover: puts an older snapshot over the weights of the checkpoint (or line with: if saver.snapshots():)


def preempted(signum, frame):
    if rank() == 0:
        saver.save(tokens, net.state_dict())
        saver.wait()
    sys.exit(0)


signal.signal(signal.SIGTERM, preempted)  # MISTAKE: leftover: takes the signal from elasticrun, which then does not save (or line with: sys.exit(0)) (or line with: def preempted(signum, frame))

trains = [
    AdaptiveDataLoader(
        Chunks(f"{args.corpus}/train.bin", n), batch_size=args.tokens_per_batch // n, shuffle=True, device=device(), name=f"train{n}"
    )
    for n in args.lengths
]
valid = AdaptiveDataLoader(Chunks(f"{args.corpus}/valid.bin", 256), batch_size=64, device=device(), name="valid")

tokens = 0
for stage, train in enumerate(trains, 1):
    for epoch in remaining_epochs_until(stage * args.epochs_per_stage):
        model.train()
        for x, y in train:
            tokens += x.numel()  # MISTAKE: lost: is 0 again after a restart, counts one replica's share, and decides the learning rate (or line with: tokens = 0) (or line with: group["lr"] = args.lr)
            for group in optimizer.param_groups:
                group["lr"] = args.lr * min(1.0, tokens / args.warmup_tokens)
            loss = F.cross_entropy(model(x).flatten(0, 1), y.flatten())
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
        model.eval()
        total = Accumulator()
        with torch.no_grad():
            for x, y in valid:
                loss = F.cross_entropy(model(x).flatten(0, 1), y.flatten())
                total["loss"] += loss.item()  # MISTAKE: world: adds the means of all replicas, but is divided by the global batches (or line with: bits = total["loss"] / len(valid))
        with total.synchronized():
            bits = total["loss"] / len(valid) / np.log(2)
        if rank() == 0:
            saver.save(tokens, net.state_dict())  # ARGUABLE: a former checkpoint that is not needed
            print(f"length {train.dataset.length} epoch {epoch} {bits:.3f} bits per token")
saver.wait()
