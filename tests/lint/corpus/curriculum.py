"""Curriculum: sequences become longer, samples are drawn anew each epoch."""
import random

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import Dataset

from elasticrun import Accumulator, AdaptiveDataLoader, AdaptiveDataParallel, device, rank, remaining_epochs_until


class Additions(Dataset):
    """a+b=c as digits."""

    def __init__(self, size):
        self.size = size
        self.digits = 1
        self.resample()

    def resample(self):
        top = 10**self.digits
        self.pairs = [(random.randrange(top), random.randrange(top)) for _ in range(self.size)]

    def __len__(self):
        return self.size

    def __getitem__(self, i):
        a, b = self.pairs[i]
        x = torch.tensor([int(c) for c in f"{a:06d}{b:06d}"])
        y = torch.tensor([int(c) for c in f"{a + b:07d}"])
        return x, y


class Adder(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(10, 64)
        self.rnn = nn.GRU(64, 128, 2, batch_first=True, bidirectional=True)
        self.out = nn.Linear(256 * 12, 70)

    def forward(self, x):
        return self.out(self.rnn(self.embed(x))[0].flatten(1)).view(-1, 7, 10)


random.seed(0)
torch.manual_seed(0)
dev = device()
data = Additions(20000)
holdout = Additions(2000)
holdout.digits = 6
holdout.resample()
train = AdaptiveDataLoader(data, batch_size=128, shuffle=True)
valid = AdaptiveDataLoader(holdout, batch_size=500, even_batches=False)
net = Adder().to(dev)
optimizer = torch.optim.Adam(net.parameters(), 1e-3)
model = AdaptiveDataParallel(net, optimizer)
stage_epochs = 0

for epoch in remaining_epochs_until(60):
    for x, y in train:
        out = model(x.to(dev))
        loss = F.cross_entropy(out.flatten(0, 1), y.to(dev).flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    total = Accumulator()
    with torch.no_grad():
        for x, y in valid:
            total["right"] += (net(x.to(dev)).argmax(-1) == y.to(dev)).all(1).sum()
    with total.synchronized():
        accuracy = total["right"] / valid.num_samples
    stage_epochs += 1  # MISTAKE: lost: how long this stage has lasted is 0 again after a restart (or line with: stage_epochs = 0) (or line with: if accuracy > 0.9 or stage_epochs)
    if accuracy > 0.9 or stage_epochs >= 10:
        data.digits = min(6, data.digits + 1)  # MISTAKE: lost: after a restart the data set is at one digit again (or line with: self.digits = 1)
        stage_epochs = 0
    data.resample()  # MISTAKE: lost: samples drawn at the end of an epoch are not those of a new start; draw in front of the loop from a seed of the epoch (or line with: self.pairs)
    if rank() == 0:
        print(f"epoch {epoch}: digits {data.digits} accuracy {accuracy:.3f}")
