"""Speech: bucketed collate, spec-augment in the batch, WER by an Accumulator, curriculum by epoch."""
import functools
import math
import re

import torch
import torchaudio
from torch import nn

from elasticrun import Accumulator, AdaptiveDataLoader, AdaptiveDataParallel, State, Variables
from elasticrun import init, rank, remaining_epochs_until, request_checkpoint, world_size

ALPHABET = " 'abcdefghijklmnopqrstuvwxyz"


def encode(text):
    return torch.tensor([ALPHABET.index(c) + 1 for c in re.sub("[^a-z' ]", "", text.lower())])


def edit_distance(a, b):
    row = list(range(len(b) + 1))
    for i, x in enumerate(a, 1):
        previous, row[0] = row[0], i
        for j, y in enumerate(b, 1):
            previous, row[j] = row[j], min(row[j] + 1, row[j - 1] + 1, previous + (x != y))
    return row[-1]


def collate(batch, *, transform):
    specs, labels = [], []
    for wave, _, text, *_ in batch:
        specs.append(transform(wave).squeeze(0).t())
        labels.append(encode(text))
    lengths = [len(s) // 2 for s in specs]
    return nn.utils.rnn.pad_sequence(specs, batch_first=True), nn.utils.rnn.pad_sequence(labels, batch_first=True), lengths


class Acoustic(nn.Module):
    def __init__(self, n=128):
        super().__init__()
        self.conv = nn.Conv1d(n, 256, 3, stride=2, padding=1)
        self.rnn = nn.GRU(256, 256, 3, bidirectional=True, batch_first=True)
        self.out = nn.Linear(512, len(ALPHABET) + 1)

    def forward(self, x):
        x = self.conv(x.transpose(1, 2)).transpose(1, 2)
        return self.out(self.rnn(x)[0]).log_softmax(-1)


class Phase(State):
    """Which part of the curriculum has begun."""

    def __init__(self):
        self.level = 0
        self.plateaus = 0
        super().__init__("phase")

    def save(self, fileobj):
        torch.save({"level": self.level, "plateaus": self.plateaus}, fileobj)

    def load(self, fileobj):
        state = torch.load(fileobj)
        self.level = state["level"]
        self.plateaus = state["plateaus"]

    def advance(self, wer, last):
        if last is not None and wer > last - 0.001:
            self.plateaus += 1
        if self.plateaus >= 2:
            self.level, self.plateaus = self.level + 1, 0


def run(epochs=40, lr=3e-4):
    init()
    torch.manual_seed(21)
    transform = torchaudio.transforms.MelSpectrogram(n_mels=128)
    clean = torchaudio.datasets.LIBRISPEECH("data", "train-clean-100", download=True)
    dev = torchaudio.datasets.LIBRISPEECH("data", "dev-clean", download=True)
    fn = functools.partial(collate, transform=transform)
    train_loader = AdaptiveDataLoader(clean, 32, shuffle=True, collate_fn=fn, max_local_batch_size=8)
    dev_loader = AdaptiveDataLoader(dev, 32, collate_fn=fn)
    net = Acoustic()
    opt = torch.optim.AdamW(net.parameters(), lr)
    sched = torch.optim.lr_scheduler.OneCycleLR(opt, max_lr=lr, steps_per_epoch=len(train_loader), epochs=epochs)
    model = AdaptiveDataParallel(net, opt, sched)
    phase, wer_of = Phase(), Variables(last=None)
    total = Accumulator()
    mask = torchaudio.transforms.FrequencyMasking(27)
    for epoch in remaining_epochs_until(epochs):
        model.train()
        for spec, text, lengths in train_loader:
            if phase.level > 0:
                spec = mask(spec.transpose(1, 2)).transpose(1, 2)
            out = model(spec)
            loss = nn.functional.ctc_loss(out.transpose(0, 1), text, lengths, [int((t > 0).sum()) for t in text])
            opt.zero_grad()
            loss.backward()
            opt.step()
            sched.step()
            if not math.isfinite(loss.item()):
                request_checkpoint()
        model.eval()
        for spec, text, lengths in dev_loader:
            with torch.no_grad():
                best = model(spec).argmax(-1)
            for hyp, ref in list(zip(best, text))[: dev_loader.num_valid]:
                hyp = [i for i in torch.unique_consecutive(hyp).tolist() if i]
                total["errors"] += edit_distance(hyp, [i for i in ref.tolist() if i])
                total["words"] += len(ref)
        with total.synchronized():
            wer = total["errors"] / total["words"]
            total.clear()
        phase.advance(wer, wer_of.last)
        wer_of.last = wer
        if rank() == 0:
            print(f"{epoch}: {wer:.2%} at {world_size()} replicas")


if __name__ == "__main__":
    run()
