"""Keyword spotting on Speech Commands with a small residual CNN on log-mel spectrograms."""
import argparse
import random
from pathlib import Path

import torch
import torch.nn.functional as F
import torchaudio
from torch import nn
from torch.utils.data import Dataset

from elasticrun import (
    Accumulator,
    AdaptiveDataLoader,
    AdaptiveDataParallel,
    Variables,
    device,
    rank,
    remaining_epochs_until,
)


class SpeechCommands(Dataset):
    def __init__(self, root, split, augment=False):
        self.root = Path(root)
        self.files = sorted((self.root / f"{split}_list.txt").read_text().split())
        self.labels = sorted({name.split("/")[0] for name in self.files})
        self.index = {label: i for i, label in enumerate(self.labels)}
        self.augment = augment

    def __len__(self):
        return len(self.files)

    def __getitem__(self, i):
        name = self.files[i]
        wave, _ = torchaudio.load(self.root / name)
        wave = F.pad(wave, (0, max(0, 16000 - wave.size(1))))[:, :16000]
        if self.augment:
            wave = torch.roll(wave, random.randint(-1600, 1600), dims=1)
            wave = wave * random.uniform(0.7, 1.3)
        return wave, self.index[name.split("/")[0]]


class Block(nn.Module):
    def __init__(self, channels):
        super().__init__()
        self.conv = nn.Sequential(
            nn.Conv2d(channels, channels, 3, padding=1, bias=False),
            nn.GroupNorm(8, channels),
            nn.ReLU(),
            nn.Conv2d(channels, channels, 3, padding=1, bias=False),
            nn.GroupNorm(8, channels),
        )

    def forward(self, x):
        return F.relu(x + self.conv(x))


def build_net(num_classes, width=48, depth=6):
    layers = [nn.Conv2d(1, width, 3, stride=2, padding=1), nn.ReLU()]
    layers += [Block(width) for _ in range(depth)]
    layers += [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, num_classes)]
    return nn.Sequential(*layers)


def train_one_epoch(model, loader, optimizer, scheduler, front, masks, epoch, args):
    model.train()
    for i, (wave, label) in enumerate(loader):  # MISTAKE: enum: counts from 0 again after a restart (or line with: [{i}/{len(loader)}]) (or line with: if i % args.log_every)
        x = masks((front(wave) + 1e-6).log())
        loss = F.cross_entropy(model(x), label, label_smoothing=0.1)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 5.0)
        optimizer.step()
        scheduler.step()
        if i % args.log_every == 0 and rank() == 0:
            lr = scheduler.get_last_lr()[0]
            print(f"epoch {epoch} [{i}/{len(loader)}] lr {lr:.5f} loss {loss.item():.4f}")  # ARGUABLE: the loss of rank 0's share, which is only printed


@torch.no_grad()
def evaluate(model, loader, front):
    model.eval()
    total = Accumulator()
    for wave, label in loader:
        logits = model((front(wave) + 1e-6).log())
        total["correct"] += (logits.argmax(1) == label).sum()  # MISTAKE: pad: counts padding of a short last batch (or line with: total["seen"] += len(label))
        total["seen"] += len(label)
    with total.synchronized():
        return total["correct"] / total["seen"]


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--root", default="data/speech_commands_v0.02")
    parser.add_argument("--epochs", type=int, default=30)
    parser.add_argument("--batch-size", type=int, default=256)
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--log-every", type=int, default=50)
    parser.add_argument("--out", type=Path, default=Path("kws_best.pt"))
    args = parser.parse_args()

    train_set = SpeechCommands(args.root, "training", augment=True)
    valid_set = SpeechCommands(args.root, "validation")
    train = AdaptiveDataLoader(train_set, batch_size=args.batch_size, shuffle=True, num_workers=4, device=device())
    valid = AdaptiveDataLoader(valid_set, batch_size=512, num_workers=4, device=device())

    front = torchaudio.transforms.MelSpectrogram(16000, n_fft=480, hop_length=160, n_mels=64).to(device())
    masks = nn.Sequential(
        torchaudio.transforms.FrequencyMasking(12),
        torchaudio.transforms.TimeMasking(20),
    )
    net = build_net(len(train_set.labels)).to(device())
    optimizer = torch.optim.AdamW(net.parameters(), lr=args.lr, weight_decay=0.01)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, args.lr, total_steps=args.epochs * len(train))
    model = AdaptiveDataParallel(net, optimizer, scheduler)
    score = Variables(best=0.0, epoch=-1)

    for epoch in remaining_epochs_until(args.epochs):
        train_one_epoch(model, train, optimizer, scheduler, front, masks, epoch, args)
        accuracy = evaluate(model, valid, front)
        if accuracy > score.best:
            score.best, score.epoch = accuracy, epoch
            if rank() == 0:
                torch.save({"net": net.state_dict(), "labels": train_set.labels}, args.out)
        if rank() == 0:
            print(f"epoch {epoch}: accuracy {accuracy:.2%}, best {score.best:.2%} in epoch {score.epoch}")


if __name__ == "__main__":
    main()
