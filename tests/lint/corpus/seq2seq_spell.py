"""Corrects spelling with an attention model and scheduled sampling."""
import argparse
import csv
import math
import random
from typing import List, Tuple

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import Dataset

from elasticrun import Accumulator, AdaptiveDataLoader, AdaptiveDataParallel, LogFile, Variables, device, rank, remaining_epochs_until

PAD, BOS, EOS = 0, 1, 2
ALPHABET = "abcdefghijklmnopqrstuvwxyz'- "


def encode(text: str) -> torch.Tensor:
    return torch.tensor([BOS] + [ALPHABET.index(c) + 3 for c in text.lower() if c in ALPHABET] + [EOS])


def corrupt(text: str) -> str:
    """Swaps, drops or doubles letters, drawn from Python's generator."""
    chars = list(text)
    for _ in range(random.randint(0, 2)):
        i = random.randrange(max(1, len(chars)))
        kind = random.choice(["swap", "drop", "double"])
        if kind == "drop" and len(chars) > 1:
            del chars[i]
        elif kind == "double":
            chars.insert(i, chars[min(i, len(chars) - 1)])
        elif i + 1 < len(chars):
            chars[i], chars[i + 1] = chars[i + 1], chars[i]
    return "".join(chars)


class Phrases(Dataset):
    def __init__(self, lines: List[str], noisy: List[str] = ()):
        self.lines, self.noisy = lines, noisy

    def __len__(self) -> int:
        return len(self.lines)

    def __getitem__(self, i: int) -> Tuple[torch.Tensor, torch.Tensor]:
        wrong = self.noisy[i] if self.noisy else corrupt(self.lines[i])
        return encode(wrong), encode(self.lines[i])


def collate(batch):
    sources, targets = zip(*batch)
    return pad_sequence(sources, True, PAD), pad_sequence(targets, True, PAD)


class Speller(nn.Module):
    def __init__(self, dim: int = 128):
        super().__init__()
        self.embedding = nn.Embedding(len(ALPHABET) + 3, dim, padding_idx=PAD)
        self.encoder = nn.GRU(dim, dim, batch_first=True, bidirectional=True)
        self.bridge = nn.Linear(2 * dim, dim)
        self.cell = nn.GRUCell(2 * dim, dim)
        self.out = nn.Linear(2 * dim, len(ALPHABET) + 3)

    def forward(self, source: torch.Tensor, target: torch.Tensor, teacher_forcing: float) -> torch.Tensor:
        memory = self.bridge(self.encoder(self.embedding(source))[0])
        state, token, logits = memory.mean(1), target[:, 0], []
        for t in range(1, target.shape[1]):
            scores = (memory @ state[:, :, None]).squeeze(2).masked_fill(source == PAD, float("-inf"))
            context = (scores.softmax(1)[:, :, None] * memory).sum(1)
            state = self.cell(torch.cat([self.embedding(token), context], 1), state)
            logits.append(self.out(torch.cat([state, context], 1)))
            token = target[:, t] if random.random() < teacher_forcing else logits[-1].argmax(1)
        return torch.stack(logits, 1)


def teacher_forcing_ratio(epoch: int, k: float = 8.0) -> float:
    return k / (k + math.exp(epoch / k))


@torch.no_grad()
def evaluate(net: Speller, loader: AdaptiveDataLoader, dev: torch.device) -> Tuple[float, float]:
    net.eval()
    total = Accumulator()
    for source, target in loader:
        n = loader.num_valid
        source, target = source.to(dev), target.to(dev)
        logits = net(source, target, 0.0)[:n]
        gold = target[:n, 1:]
        total["nll"] += F.cross_entropy(logits.flatten(0, 1), gold.flatten(), ignore_index=PAD, reduction="sum")
        total["tokens"] += (gold != PAD).sum()
        total["exact"] += ((logits.argmax(2) == gold) | (gold == PAD)).all(1).sum()
        total["phrases"] += n
    with total.synchronized():
        return total["nll"] / total["tokens"], total["exact"] / total["phrases"]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--phrases", default="phrases.txt")
    parser.add_argument("--epochs", type=int, default=40)
    parser.add_argument("--batch-size", type=int, default=256)
    args = parser.parse_args()
    random.seed(3)
    torch.manual_seed(3)
    dev = device()
    with open(args.phrases) as f:
        lines = sorted({line.strip() for line in f if line.strip()})
    random.shuffle(lines)
    cut = len(lines) // 20
    fixed = [corrupt(line) for line in lines[:cut]]
    train = AdaptiveDataLoader(Phrases(lines[cut:]), batch_size=args.batch_size, shuffle=True, collate_fn=collate, num_workers=2)
    valid = AdaptiveDataLoader(Phrases(lines[:cut], fixed), batch_size=256, collate_fn=collate)
    net = Speller().to(dev)
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=2)
    model = AdaptiveDataParallel(net, optimizer, scheduler)
    best = Variables(exact=0.0)
    rows = csv.writer(LogFile("speller.csv"))
    rows.writerow(["epoch", "nll", "exact", "lr"])
    for epoch in remaining_epochs_until(args.epochs):
        ratio = teacher_forcing_ratio(epoch)
        model.train()
        for source, target in train:
            source, target = source.to(dev), target.to(dev)
            logits, gold = model(source, target, ratio), target[:, 1:]
            count = (gold != PAD).sum()
            loss = F.cross_entropy(logits.flatten(0, 1), gold.flatten(), ignore_index=PAD)
            optimizer.zero_grad()
            model.weigh(loss, count=count).backward()
            nn.utils.clip_grad_norm_(net.parameters(), 1.0)
            optimizer.step()
        nll, exact = evaluate(net, valid, dev)
        scheduler.step(nll)
        rows.writerow([epoch, f"{nll:.4f}", f"{exact:.4f}", optimizer.param_groups[0]["lr"]])
        if exact > best.exact:
            best.exact = exact
            if rank() == 0:
                torch.save(net.state_dict(), "speller.pt")


if __name__ == "__main__":
    main()
