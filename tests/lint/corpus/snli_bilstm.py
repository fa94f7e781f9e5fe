"""Natural language inference with a BiLSTM (the shape of pytorch/examples/snli)."""
import argparse
import glob
import json
import os
import time

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import Dataset

from elasticrun import Accumulator, AdaptiveDataLoader, AdaptiveDataParallel, Variables
from elasticrun import atomic_save, device, rank, remaining_epochs_until

LABELS = {"entailment": 0, "contradiction": 1, "neutral": 2, "-": 3}


def get_args():
    parser = argparse.ArgumentParser(description="PyTorch SNLI")
    parser.add_argument("--data", default=".data/snli")
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--batch_size", type=int, default=128)
    parser.add_argument("--d_embed", type=int, default=100)
    parser.add_argument("--d_hidden", type=int, default=300)
    parser.add_argument("--dp_ratio", type=float, default=0.2)
    parser.add_argument("--lr", type=float, default=0.001)
    parser.add_argument("--log_every", type=int, default=50)
    parser.add_argument("--dev_every", type=int, default=1000)
    parser.add_argument("--save_path", default="results")
    return parser.parse_args()


def read_jsonl(path):
    with open(path) as lines:
        rows = [json.loads(line) for line in lines]
    return [(r["sentence1"].lower().split(), r["sentence2"].lower().split(), LABELS[r["gold_label"]]) for r in rows]


def build_vocab(rows):
    words = set()
    for premise, hypothesis, _ in rows:
        words.update(premise)
        words.update(hypothesis)
    itos = ["<unk>", "<pad>"] + list(words)  # MISTAKE: order: a set of strings has another order in each process, so after a restart (and on each rank) the words have other rows of the embedding (or line with: words = set()) (or line with: return {word: index for index, word in enumerate(itos)})
    return {word: index for index, word in enumerate(itos)}


class SNLI(Dataset):
    def __init__(self, rows, vocab):
        self.rows = rows
        self.vocab = vocab

    def __len__(self):
        return len(self.rows)

    def encode(self, words):
        return torch.tensor([self.vocab.get(w, 0) for w in words] or [1])

    def __getitem__(self, i):
        premise, hypothesis, label = self.rows[i]
        return self.encode(premise), self.encode(hypothesis), label


def collate(samples):
    p, h, y = zip(*samples)
    return pad_sequence(p, True, 1), pad_sequence(h, True, 1), torch.tensor(y)


class SNLIClassifier(nn.Module):
    def __init__(self, n_embed, args):
        super().__init__()
        self.embed = nn.Embedding(n_embed, args.d_embed, padding_idx=1)
        self.encoder = nn.LSTM(args.d_embed, args.d_hidden, bidirectional=True, batch_first=True)
        width = 4 * args.d_hidden
        self.out = nn.Sequential(
            nn.Linear(width, width), nn.ReLU(), nn.Dropout(args.dp_ratio), nn.Linear(width, 3)
        )

    def encode(self, tokens):
        _, (hidden, _) = self.encoder(self.embed(tokens))
        return torch.cat([hidden[0], hidden[1]], dim=1)

    def forward(self, premise, hypothesis):
        return self.out(torch.cat([self.encode(premise), self.encode(hypothesis)], 1))


def evaluate(model, dev_iter, dev):
    """Accuracy and loss on the labelled part of the dev set."""
    model.eval()
    with torch.no_grad():
        for premise, hypothesis, y in dev_iter:
            answer = model(premise.to(device()), hypothesis.to(device()))
            y = y.to(device())
            known = y != 3
            dev["correct"] += (answer.argmax(1) == y)[known].sum().item()
            dev["loss"] += F.cross_entropy(answer, y, ignore_index=3, reduction="sum").item()
            dev["n"] += known.sum().item()
    model.train()
    with dev.synchronized():
        accuracy, loss = 100.0 * dev["correct"] / dev["n"], dev["loss"] / dev["n"]
        dev.clear()
    return float(accuracy), float(loss)


def save_snapshot(net, prefix, suffix):
    path = prefix + suffix
    atomic_save(net.state_dict(), path)
    for f in glob.glob(prefix + "*"):
        if f != path:
            os.remove(f)


def main():
    args = get_args()
    torch.manual_seed(1234)
    os.makedirs(args.save_path, exist_ok=True)
    train_rows = read_jsonl(os.path.join(args.data, "train.jsonl"))
    vocab = build_vocab(train_rows)
    train_iter = AdaptiveDataLoader(
        SNLI(train_rows, vocab), batch_size=args.batch_size, shuffle=True, collate_fn=collate, name="train"
    )
    dev_iter = AdaptiveDataLoader(
        SNLI(read_jsonl(os.path.join(args.data, "dev.jsonl")), vocab),
        batch_size=args.batch_size, collate_fn=collate, even_batches=False, name="dev",
    )
    net = SNLIClassifier(len(vocab), args).to(device())
    criterion = nn.CrossEntropyLoss(ignore_index=3)
    opt = torch.optim.Adam(net.parameters(), lr=args.lr)
    model = AdaptiveDataParallel(net, opt)
    dev = Accumulator(name="dev_sums")
    state = Variables(iterations=0, best_dev_acc=-1.0)

    best_dev_acc = state.best_dev_acc
    start = time.time()
    for epoch in remaining_epochs_until(args.epochs):
        model.train()
        for batch_idx, (premise, hypothesis, y) in train_iter.enumerate():
            state.iterations += 1
            answer = model(premise.to(device()), hypothesis.to(device()))
            loss = criterion(answer, y.to(device()))
            opt.zero_grad()
            loss.backward()  # MISTAKE: weigh: samples without a gold label are ignored, so each replica divides by its own count; needs model.weigh(loss, count=...) (or line with: loss = criterion(answer, y.to(device()))) (or line with: criterion = nn.CrossEntropyLoss(ignore_index=3))
            opt.step()

            if state.iterations % args.dev_every == 0:
                dev_acc, dev_loss = evaluate(model, dev_iter, dev)
                if rank() == 0:
                    print(f"{time.time() - start:6.0f}s {epoch:3d} {state.iterations:6d} dev {dev_loss:.4f} {dev_acc:.2f}%")
                if dev_acc > best_dev_acc:
                    best_dev_acc = dev_acc  # MISTAKE: vars: only the local copy is updated, never state.best_dev_acc: after a restart it is -1 again, and the next worse snapshot replaces the best one (or line with: best_dev_acc = state.best_dev_acc) (or line with: if dev_acc > best_dev_acc:)
                    if rank() == 0:
                        suffix = f"_devacc_{dev_acc:.2f}_iter_{state.iterations}_model.pt"
                        save_snapshot(net, os.path.join(args.save_path, "best_snapshot"), suffix)
            elif rank() == 0 and state.iterations % args.log_every == 0:
                print(f"{time.time() - start:6.0f}s {epoch:3d} {batch_idx}/{len(train_iter)} loss {loss.item():.4f}")


if __name__ == "__main__":
    main()
