"""Character LSTM whose state begins at zero in each window; ported."""
import argparse
import os

import torch
import torch.nn as nn
import torch.nn.functional as F

from elasticrun import Accumulator, AdaptiveDataLoader, AdaptiveDataParallel, device, rank, remaining_epochs_until


def read_text(path):
    with open(path, encoding="utf-8") as f:
        text = f.read()
    chars = sorted(set(text))
    index = {c: i for i, c in enumerate(chars)}
    return torch.tensor([index[c] for c in text]), chars


class Windows(torch.utils.data.Dataset):
    def __init__(self, ids, length):
        self.ids, self.length = ids, length

    def __len__(self):
        return (len(self.ids) - 1) // self.length

    def __getitem__(self, i):
        part = self.ids[i * self.length : (i + 1) * self.length + 1]
        return part[:-1], part[1:]


class CharRNN(nn.Module):
    def __init__(self, vocab, hidden=256):
        super().__init__()
        self.embed = nn.Embedding(vocab, 64)
        self.rnn = nn.LSTM(64, hidden, 2, batch_first=True, dropout=0.2)
        self.out = nn.Linear(hidden, vocab)

    def zero(self, n, dev):
        return torch.zeros(2, n, self.rnn.hidden_size, device=dev), torch.zeros(2, n, self.rnn.hidden_size, device=dev)

    def forward(self, x, hidden):
        h, hidden = self.rnn(self.embed(x), hidden)
        return self.out(h), hidden


@torch.no_grad()
def generate(net, chars, dev, n=200):
    net.eval()
    gen = torch.Generator(device="cpu").manual_seed(0)
    hidden = net.zero(1, dev)
    token = torch.zeros(1, 1, dtype=torch.long, device=dev)
    out = []
    for _ in range(n):
        logits, hidden = net(token, hidden)
        token = torch.multinomial(logits[0, -1].softmax(0).cpu(), 1, generator=gen).view(1, 1).to(dev)
        out.append(chars[token.item()])
    return "".join(out)


def main():
    p = argparse.ArgumentParser()
    p.add_argument("text")
    p.add_argument("--epochs", type=int, default=20)
    args = p.parse_args()
    torch.manual_seed(0)
    dev = device()
    ids, chars = read_text(args.text)
    cut = int(0.95 * len(ids))
    train = AdaptiveDataLoader(Windows(ids[:cut], 128), batch_size=64, shuffle=True)
    valid = AdaptiveDataLoader(Windows(ids[cut:], 128), batch_size=64, even_batches=False)
    net = CharRNN(len(chars)).to(dev)
    optimizer = torch.optim.Adam(net.parameters(), lr=2e-3)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.95)
    model = AdaptiveDataParallel(net, optimizer, scheduler)
    if rank() == 0:
        os.makedirs("text", exist_ok=True)
    for epoch in remaining_epochs_until(args.epochs):
        model.train()
        for x, y in train:
            hidden = net.zero(len(x), dev)
            logits, hidden = model(x.to(dev), hidden)
            loss = F.cross_entropy(logits.flatten(0, 1), y.to(dev).flatten())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        net.eval()
        total = Accumulator()
        with torch.no_grad():
            for x, y in valid:
                out, _ = net(x.to(dev), net.zero(len(x), dev))
                total["nll"] += F.cross_entropy(out.flatten(0, 1), y.to(dev).flatten(), reduction="sum")
                total["chars"] += y.numel()
        with total.synchronized():
            bits = total["nll"] / total["chars"] / 0.6931
        scheduler.step()
        if rank() == 0:
            print(f"epoch {epoch}: {bits:.3f} bits per character")
            with open(f"text/{epoch}.txt", "w") as f:
                f.write(generate(net, chars, dev))


main()
