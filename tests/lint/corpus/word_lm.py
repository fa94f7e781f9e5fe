"""Word-level language model, LSTM with state carried over the text."""
import argparse
import math
import time

import torch
import torch.nn as nn

from elasticrun import Accumulator, AdaptiveDataLoader, AdaptiveDataParallel, device, rank, remaining_epochs_until


class Corpus:
    def __init__(self, path):
        words = open(path + "/train.txt").read().split()
        self.vocab = {}
        for word in set(words):  # MISTAKE: data: a set of strings has another order in each process, so the ids change with a restart
            self.vocab[word] = len(self.vocab)
        self.train = torch.tensor([self.vocab[w] for w in words])
        valid = open(path + "/valid.txt").read().split()
        self.valid = torch.tensor([self.vocab.get(w, 0) for w in valid])


class Windows(torch.utils.data.Dataset):
    def __init__(self, ids, length):
        self.ids, self.length = ids, length

    def __len__(self):
        return (len(self.ids) - 1) // self.length

    def __getitem__(self, i):
        chunk = self.ids[i * self.length : (i + 1) * self.length + 1]
        return chunk[:-1], chunk[1:]


class RNNModel(nn.Module):
    def __init__(self, ntoken, ninp=200, nhid=200):
        super().__init__()
        self.encoder = nn.Embedding(ntoken, ninp)
        self.rnn = nn.LSTM(ninp, nhid, 2, batch_first=True)
        self.decoder = nn.Linear(nhid, ntoken)

    def forward(self, x, hidden=None):
        out, hidden = self.rnn(self.encoder(x), hidden)
        return self.decoder(out), hidden


def repackage_hidden(h):
    return tuple(v.detach() for v in h) if h is not None else None


parser = argparse.ArgumentParser()
parser.add_argument("--data", default="wikitext-2")
parser.add_argument("--lr", type=float, default=20)
parser.add_argument("--epochs", type=int, default=40)
args = parser.parse_args()
torch.manual_seed(1111)
dev = device()
corpus = Corpus(args.data)
net = RNNModel(len(corpus.vocab)).to(dev)
optimizer = torch.optim.SGD(net.parameters(), lr=args.lr)
model = AdaptiveDataParallel(net, optimizer)
train_data = AdaptiveDataLoader(Windows(corpus.train, 35), batch_size=20, drop_last=True)
val_data = AdaptiveDataLoader(Windows(corpus.valid, 35), batch_size=20, even_batches=False)
criterion = nn.CrossEntropyLoss()


def evaluate():
    model.eval()
    total = Accumulator()
    with torch.no_grad():
        for x, y in val_data:
            out, _ = net(x.to(dev))
            total["loss"] += len(x) * criterion(out.flatten(0, 1), y.to(dev).flatten()).item()
            total["n"] += len(x)
    with total.synchronized():
        return total["loss"] / total["n"]


def train(epoch):
    model.train()
    hidden = None
    start = time.time()
    for x, y in train_data:
        x, y = x.to(dev), y.to(dev)
        hidden = repackage_hidden(hidden)
        optimizer.zero_grad()
        out, hidden = model(x, hidden)  # MISTAKE: lost: the hidden state of the batch before is gone when the loop continues (or line with: hidden = repackage_hidden(hidden))
        loss = criterion(out.flatten(0, 1), y.flatten())
        loss.backward()
        nn.utils.clip_grad_norm_(net.parameters(), 0.25)
        optimizer.step()
        if train_data.batch_index % 200 == 0 and rank() == 0:
            print(f"| epoch {epoch} | {train_data.batch_index} batches | {time.time() - start:.0f} s | loss {loss.item():.2f}")


best_val_loss = None
for epoch in remaining_epochs_until(args.epochs):
    train(epoch)
    val_loss = evaluate()
    if rank() == 0:
        print(f"end of epoch {epoch}, valid ppl {math.exp(val_loss):.2f}")
    if best_val_loss is None or val_loss < best_val_loss:
        if rank() == 0:
            torch.save(net.state_dict(), "model.pt")
        best_val_loss = val_loss  # MISTAKE: lost: the best loss is forgotten by a restart (or line with: if best_val_loss is None)
    else:
        for group in optimizer.param_groups:
            group["lr"] /= 4.0
