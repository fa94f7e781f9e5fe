"""minGPT-like trainer with callbacks and a counter of its own."""
import time
from collections import defaultdict

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import Dataset

from elasticrun import AdaptiveDataLoader, AdaptiveDataParallel, device, rank


class Config:
    max_iters = 3000
    batch_size = 64
    learning_rate = 3e-4
    grad_norm_clip = 1.0
    seed = 3407

    def __init__(self, **kw):
        self.__dict__.update(kw)


class SortDataset(Dataset):
    """Sequences of digits and their sorted form."""

    def __init__(self, length=6, digits=3):
        self.length, self.digits = length, digits

    def __len__(self):
        return 10000

    def __getitem__(self, idx):
        gen = torch.Generator().manual_seed(idx)
        inp = torch.randint(self.digits, (self.length,), generator=gen)
        cat = torch.cat((inp, torch.sort(inp)[0]))
        x, y = cat[:-1].clone(), cat[1:].clone()
        y[: self.length - 1] = -1
        return x, y


class Trainer:
    def __init__(self, config, net, train_dataset):
        self.config = config
        self.device = device()
        self.net = net.to(self.device)
        self.optimizer = torch.optim.AdamW(net.parameters(), lr=config.learning_rate, betas=(0.9, 0.95))
        self.model = AdaptiveDataParallel(self.net, self.optimizer)
        self.loader = AdaptiveDataLoader(train_dataset, batch_size=config.batch_size, shuffle=True, num_workers=4)
        self.callbacks = defaultdict(list)
        self.iter_num = 0
        self.iter_time = time.time()

    def add_callback(self, event, callback):
        self.callbacks[event].append(callback)

    def trigger(self, event):
        for callback in self.callbacks[event]:
            callback(self)

    def run(self):
        self.model.train()
        for x, y in self.loader.batches(self.config.max_iters):
            x, y = x.to(self.device), y.to(self.device)
            logits = self.model(x)
            self.loss = F.cross_entropy(logits.flatten(0, 1), y.flatten(), ignore_index=-1)  # ARGUABLE: a mean over tokens, but each sample has the same number of them
            self.optimizer.zero_grad(set_to_none=True)
            self.loss.backward()
            nn.utils.clip_grad_norm_(self.net.parameters(), self.config.grad_norm_clip)
            self.optimizer.step()
            self.trigger("on_batch_end")
            self.iter_num += 1  # MISTAKE: lost: the number of iterations is 0 again after a restart, and the schedule with it (or line with: self.iter_num = 0)
            now = time.time()
            self.iter_dt = now - self.iter_time
            self.iter_time = now


class Block(nn.Module):
    def __init__(self, vocab=3, dim=48, length=11):
        super().__init__()
        self.tok, self.pos = nn.Embedding(vocab, dim), nn.Parameter(torch.zeros(length, dim))
        self.layer = nn.TransformerEncoderLayer(dim, 3, 4 * dim, 0.1, batch_first=True)
        self.head = nn.Linear(dim, vocab)

    def forward(self, x):
        mask = nn.Transformer.generate_square_subsequent_mask(x.size(1)).to(x.device)
        return self.head(self.layer(self.tok(x) + self.pos, src_mask=mask))


def batch_end_callback(trainer):
    if trainer.iter_num % 100 == 0 and rank() == 0:
        print(f"iter {trainer.iter_num}: loss {trainer.loss.item():.5f}")


def decay(trainer):
    if trainer.iter_num == 2000:
        for group in trainer.optimizer.param_groups:
            group["lr"] *= 0.1


def append_loss(trainer):
    with open("losses.txt", "a") as f:  # MISTAKE: everyrank: each replica appends its own loss; a LogFile writes a row once
        f.write(f"{trainer.iter_num} {trainer.loss.item()}\n")


if __name__ == "__main__":
    torch.manual_seed(Config.seed)
    trainer = Trainer(Config(), Block(), SortDataset())
    trainer.add_callback("on_batch_end", batch_end_callback)
    trainer.add_callback("on_batch_end", decay)
    trainer.add_callback("on_batch_end", append_loss)
    trainer.run()
