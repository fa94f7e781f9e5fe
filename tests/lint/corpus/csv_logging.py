"""Training of a small transformer on text classes, with rows of a csv file."""
import csv
import json
import time

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import Dataset

from elasticrun import Accumulator, AdaptiveDataLoader, AdaptiveDataParallel, Variables, device, rank, remaining_epochs_until


class News(Dataset):
    def __init__(self, path, vocab=None):
        with open(path) as f:
            self.rows = [json.loads(line) for line in f]
        words = [w for row in self.rows for w in row["text"].lower().split()]
        self.vocab = vocab or {w: i + 1 for i, w in enumerate(dict.fromkeys(words))}

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, i):
        ids = [self.vocab.get(w, 0) for w in self.rows[i]["text"].lower().split()][:64]
        return torch.tensor(ids + [0] * (64 - len(ids))), self.rows[i]["label"]


class Classifier(nn.Module):
    def __init__(self, vocab, classes=4, dim=128):
        super().__init__()
        self.embed = nn.Embedding(vocab + 1, dim, padding_idx=0)
        self.encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(dim, 4, 256, batch_first=True), 2)
        self.out = nn.Linear(dim, classes)

    def forward(self, x):
        return self.out(self.encoder(self.embed(x)).mean(1))


class CsvLogger:
    def __init__(self, path, fields):
        self.file = open(path, "w", newline="")  # MISTAKE: effect: rows of before the restart are gone, as each start opens the file anew (or line with: logger = CsvLogger)
        self.writer = csv.DictWriter(self.file, fields)
        self.writer.writeheader()

    def log(self, **row):
        self.writer.writerow(row)
        self.file.flush()


def main():
    torch.manual_seed(0)
    dev = device()
    train_set = News("news/train.jsonl")
    test_set = News("news/test.jsonl", train_set.vocab)
    train = AdaptiveDataLoader(train_set, batch_size=64, shuffle=True)
    test = AdaptiveDataLoader(test_set, batch_size=256)
    net = Classifier(len(train_set.vocab)).to(dev)
    optimizer = torch.optim.AdamW(net.parameters(), 1e-3)
    model = AdaptiveDataParallel(net, optimizer)
    logger = CsvLogger("log.csv", ["epoch", "loss", "accuracy", "lr"]) if rank() == 0 else None
    best = Variables(accuracy=0.0)
    lr = 1e-3
    for epoch in remaining_epochs_until(15):
        start = time.time()
        for group in optimizer.param_groups:
            group["lr"] = lr
        model.train()
        total = Accumulator()
        for x, y in train:
            loss = F.cross_entropy(model(x.to(dev)), y.to(dev))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            total["loss"] += loss.item() * train.num_valid
        if rank() == 0:
            with open("times.txt", "a") as f:  # MISTAKE: effect: between two loops; a restart during the test appends a second line
                f.write(f"{epoch} {time.time() - start:.1f}\n")
        model.eval()
        with torch.no_grad():
            for x, y in test:
                total["hits"] += (model(x.to(dev)).argmax(1) == y.to(dev)).sum()  # MISTAKE: pad: counts a padding sample of the last batch at 2+ replicas
        with total.synchronized():
            loss, accuracy = total["loss"] / train.num_samples, total["hits"] / test.num_samples
        if accuracy > best.accuracy:
            best.accuracy = accuracy
        else:
            lr *= 0.5  # MISTAKE: lost: the local learning rate is 1e-3 again after a restart and is put into the optimizer (or line with: lr = 1e-3) (or line with: group["lr"] = lr)
        if logger:
            logger.log(epoch=epoch, loss=loss, accuracy=accuracy, lr=lr)


main()
