"""Speech recognition with CTC on LibriSpeech-like folders."""
import argparse
import os
import random

import torch
import torch.nn as nn
import torch.nn.functional as F
import torchaudio
from torch.utils.data import Dataset

from elasticrun import Accumulator, AdaptiveDataLoader, AdaptiveDataParallel, Variables, device, rank, remaining_epochs_until

ALPHABET = " abcdefghijklmnopqrstuvwxyz'"


class Speech(Dataset):
    def __init__(self, manifest, augment):
        with open(manifest) as f:
            self.rows = [line.rstrip("\n").split("\t") for line in f]
        if augment:
            random.shuffle(self.rows)  # MISTAKE: data: shuffled without a seed, so index i is another sample after a restart and on each replica
        self.mel = torchaudio.transforms.MelSpectrogram(16000, n_mels=80)
        self.mask = torchaudio.transforms.TimeMasking(35) if augment else nn.Identity()

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, i):
        path, text = self.rows[i]
        wave, _ = torchaudio.load(path)
        feats = self.mask(self.mel(wave)[0].clamp(1e-5).log()).T
        return feats, torch.tensor([ALPHABET.index(c) + 1 for c in text.lower() if c in ALPHABET])


def collate(items):
    feats, labels = zip(*items)
    lengths = torch.tensor([len(f) // 2 for f in feats])
    sizes = torch.tensor([len(t) for t in labels])
    return nn.utils.rnn.pad_sequence(feats, True), nn.utils.rnn.pad_sequence(labels, True), lengths, sizes


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv1d(80, 256, 3, stride=2, padding=1)
        self.rnn = nn.GRU(256, 256, 3, batch_first=True, bidirectional=True)
        self.out = nn.Linear(512, len(ALPHABET) + 1)

    def forward(self, x):
        h = F.relu(self.conv(x.transpose(1, 2))).transpose(1, 2)
        return F.log_softmax(self.out(self.rnn(h)[0]), -1)


def edit_distance(a, b):
    row = list(range(len(b) + 1))
    for i, x in enumerate(a, 1):
        last, row[0] = row[0], i
        for j, y in enumerate(b, 1):
            last, row[j] = row[j], min(row[j] + 1, row[j - 1] + 1, last + (x != y))
    return row[-1]


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--epochs", type=int, default=30)
    p.add_argument("--out", default="asr")
    args = p.parse_args()
    torch.manual_seed(7)
    dev = device()
    if rank() == 0:
        os.mkdir(args.out)  # MISTAKE: effect: fails at the second start, since the folder exists
    train = AdaptiveDataLoader(Speech("train.tsv", True), batch_size=32, shuffle=True, collate_fn=collate, num_workers=8)
    valid = AdaptiveDataLoader(Speech("valid.tsv", False), batch_size=32, collate_fn=collate, even_batches=False)
    net = Net().to(dev)
    optimizer = torch.optim.AdamW(net.parameters(), lr=5e-4)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 5e-4, steps_per_epoch=len(train), epochs=args.epochs)
    model = AdaptiveDataParallel(net, optimizer, scheduler)
    ctc = nn.CTCLoss(blank=0, reduction="sum", zero_infinity=True)
    best = Variables(cer=1e9)
    for epoch in remaining_epochs_until(args.epochs):
        model.train()
        for x, y, lengths, sizes in train:
            out = model(x.to(dev)).transpose(0, 1)
            loss = ctc(out, y.to(dev), lengths, sizes)
            optimizer.zero_grad()
            loss.backward()  # MISTAKE: weigh: a sum over the share is averaged over replicas as a mean would be; model.weigh(loss, reduction="sum") (or line with: loss = ctc)
            optimizer.step()
            scheduler.step()
        net.eval()
        total = Accumulator()
        with torch.no_grad():
            for x, y, lengths, sizes in valid:
                ids = net(x.to(dev)).argmax(-1).cpu()
                for row, n, want, m in zip(ids, lengths, y, sizes):
                    got = [k for k in torch.unique_consecutive(row[:n]).tolist() if k]
                    total["errors"] += edit_distance(got, want[:m].tolist())
                    total["chars"] += int(m)
        with total.synchronized():
            cer = total["errors"] / total["chars"]
        if rank() == 0 and cer < best.cer:
            best.cer = cer  # MISTAKE: vars: set on rank 0 only, so the other replicas' values differ from the saved one (or line with: if rank() == 0 and cer < best.cer)
            torch.save(net.state_dict(), f"{args.out}/best.pt")
        if rank() == 0:
            print(f"epoch {epoch} cer {cer:.4f} best {best.cer:.4f}")


if __name__ == "__main__":
    main()
