"""German to English."""
import math

import torch
import torch.nn as nn
import torch.nn.functional as F
from model import Translator
from vocab import PAD, Vocab

from elasticrun import AdaptiveDataLoader, AdaptiveDataParallel, Accumulator, Variables, device, rank, remaining_epochs_until


def read(name):
    with open(f"multi30k/{name}", encoding="utf-8") as f:
        return [line.strip().lower() for line in f]


def collate(pairs):
    src, tgt = zip(*pairs)
    pad = nn.utils.rnn.pad_sequence
    return pad([torch.tensor(s) for s in src], True, PAD), pad([torch.tensor(t) for t in tgt], True, PAD)


def main():
    torch.manual_seed(0)
    dev = device()
    de, en = read("train.de"), read("train.en")
    source, target = Vocab(de), Vocab(en)
    train_set = [(source.encode(a), target.encode(b)) for a, b in zip(de, en)]
    valid_set = [(source.encode(a), target.encode(b)) for a, b in zip(read("val.de"), read("val.en"))]
    train = AdaptiveDataLoader(train_set, batch_size=128, shuffle=True, collate_fn=collate, max_local_batch_size=32)
    valid = AdaptiveDataLoader(valid_set, batch_size=128, collate_fn=collate, even_batches=False)
    net = Translator(len(source), len(target)).to(dev)
    for p in net.parameters():
        if p.dim() > 1:
            nn.init.xavier_uniform_(p)
    optimizer = torch.optim.Adam(net.parameters(), lr=1.0, betas=(0.9, 0.98), eps=1e-9)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda s: 256**-0.5 * min((s + 1) ** -0.5, (s + 1) * 4000**-1.5))
    model = AdaptiveDataParallel(net, optimizer, scheduler)
    record = Variables(last_loss=0.0, best=float("inf"))
    for epoch in remaining_epochs_until(18):
        model.train()
        for src, tgt in train:
            src, tgt = src.to(dev), tgt.to(dev)
            logits = model(src, tgt[:, :-1])
            loss = F.cross_entropy(logits.flatten(0, 1), tgt[:, 1:].flatten(), ignore_index=PAD, label_smoothing=0.1)
            optimizer.zero_grad()
            loss.backward()  # MISTAKE: weigh: a mean over this share's tokens, of which each replica has another number; model.weigh(loss, number of tokens) (or line with: loss = F.cross_entropy)
            optimizer.step()
            scheduler.step()
            record.last_loss = loss.item()  # MISTAKE: vars: the loss of one replica; Variables must hold the same value on all
        net.eval()
        total = Accumulator()
        with torch.no_grad():
            for src, tgt in valid:
                src, tgt = src.to(dev), tgt.to(dev)
                logits = net(src, tgt[:, :-1])
                total["nll"] += F.cross_entropy(logits.flatten(0, 1), tgt[:, 1:].flatten(), ignore_index=PAD, reduction="sum")
                total["tokens"] += (tgt[:, 1:] != PAD).sum()
        with total.synchronized():
            nll = total["nll"] / total["tokens"]
        record.best = min(record.best, nll)
        if rank() == 0:
            print(f"epoch {epoch}: perplexity {math.exp(nll):.2f}, best {math.exp(record.best):.2f}")


if __name__ == "__main__":
    main()
