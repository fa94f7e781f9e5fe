"""Fine-tuning with gradients accumulated by hand."""
import argparse

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import Dataset

from elasticrun import AdaptiveDataLoader, AdaptiveDataParallel, Accumulator, device, rank, remaining_epochs_until


class Lines(Dataset):
    def __init__(self, path, length=256):
        with open(path, "rb") as f:
            self.data = f.read()
        self.length = length

    def __len__(self):
        return len(self.data) // (self.length + 1)

    def __getitem__(self, i):
        chunk = torch.tensor(list(self.data[i * (self.length + 1) : (i + 1) * (self.length + 1)]))
        return chunk[:-1], chunk[1:]


class ByteModel(nn.Module):
    def __init__(self, dim=256):
        super().__init__()
        self.embed = nn.Embedding(256, dim)
        self.layers = nn.LSTM(dim, dim, 2, batch_first=True)
        self.head = nn.Linear(dim, 256)

    def forward(self, x):
        return self.head(self.layers(self.embed(x))[0])


def nll(model, x, y):
    return F.cross_entropy(model(x).flatten(0, 1), y.flatten())


def main():
    p = argparse.ArgumentParser()
    p.add_argument("train")
    p.add_argument("valid")
    p.add_argument("--accum", type=int, default=8)
    p.add_argument("--epochs", type=int, default=5)
    args = p.parse_args()
    torch.manual_seed(0)
    dev = device()
    train = AdaptiveDataLoader(Lines(args.train), batch_size=8, shuffle=True)
    valid = AdaptiveDataLoader(Lines(args.valid), batch_size=32)
    net = ByteModel().to(dev)
    optimizer = torch.optim.AdamW(net.parameters(), 1e-3)
    updates = args.epochs * (len(train) // args.accum)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, updates)
    model = AdaptiveDataParallel(net, optimizer, scheduler)
    for epoch in remaining_epochs_until(args.epochs):
        model.train()
        running = 0.0
        for i, (x, y) in enumerate(train):  # ARGUABLE: the same
            loss = nll(model, x.to(dev), y.to(dev)) / args.accum
            loss.backward()  # ARGUABLE: the same
            running += loss.item()  # MISTAKE: sum: the mean that is printed misses what was before the restart (or line with: running = 0.0) (or line with: running / (len(train)
            if (i + 1) % args.accum == 0:  # ARGUABLE: accumulated by hand, for which max_local_batch_size is meant; but saves wait for the step, so groups stay as they are
                nn.utils.clip_grad_norm_(net.parameters(), 1.0)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
        if rank() == 0:
            print(f"epoch {epoch} train {running / (len(train) / args.accum):.4f}")
        model.eval()
        total = Accumulator()
        with torch.no_grad():
            for x, y in valid:
                total["loss"] += nll(model, x.to(dev), y.to(dev)) * valid.num_valid
        with total.synchronized():
            valid_loss = total["loss"] / valid.num_samples
        if rank() == 0:
            print(f"epoch {epoch} valid {valid_loss:.4f}")
    torch.save(net.state_dict(), "bytes.pt")  # MISTAKE: everyrank: all replicas write one file at once


if __name__ == "__main__":
    main()
