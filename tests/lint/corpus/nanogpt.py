"""A small GPT on a memory-mapped token file, counted in iterations."""
import math
import os
import pickle
import time

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F

from elasticrun import AdaptiveDataParallel, device, rank, remaining_steps_until, world_size

out_dir = "out"
eval_interval = 250
eval_iters = 50
max_iters = 5000
warmup_iters = 100
batch_size = 64 // world_size()  # ARGUABLE: steps have no loader, so a share for each replica is meant; other windows at another number
block_size = 256
learning_rate, min_lr = 1e-3, 1e-4
os.makedirs(out_dir, exist_ok=True)
torch.manual_seed(1337 + rank())
dev = device()
data_dir = "data/shakespeare_char"
meta = pickle.load(open(os.path.join(data_dir, "meta.pkl"), "rb"))
rng = np.random.default_rng(1337 + rank())


def get_batch(split):
    data = np.memmap(os.path.join(data_dir, f"{split}.bin"), dtype=np.uint16, mode="r")
    ix = rng.integers(len(data) - block_size, size=batch_size)  # MISTAKE: rng: a generator of one's own begins anew after a restart, the same windows come again (or line with: rng = np.random.default_rng)
    x = torch.stack([torch.from_numpy(data[i : i + block_size].astype(np.int64)) for i in ix])
    y = torch.stack([torch.from_numpy(data[i + 1 : i + 1 + block_size].astype(np.int64)) for i in ix])
    return x.to(dev), y.to(dev)


class GPT(nn.Module):
    def __init__(self, vocab, dim=384, layers=6, heads=6):
        super().__init__()
        self.tok = nn.Embedding(vocab, dim)
        self.pos = nn.Parameter(torch.zeros(block_size, dim))
        block = nn.TransformerEncoderLayer(dim, heads, 4 * dim, 0.2, batch_first=True, norm_first=True)
        self.blocks = nn.TransformerEncoder(block, layers)
        self.head = nn.Linear(dim, vocab, bias=False)

    def forward(self, x, y):
        mask = nn.Transformer.generate_square_subsequent_mask(x.size(1)).to(x.device)
        logits = self.head(self.blocks(self.tok(x) + self.pos[: x.size(1)], mask=mask, is_causal=True))
        return logits, F.cross_entropy(logits.flatten(0, 1), y.flatten())


net = GPT(meta["vocab_size"]).to(dev)
optimizer = torch.optim.AdamW(net.parameters(), lr=learning_rate, betas=(0.9, 0.99))
model = AdaptiveDataParallel(net, optimizer)


@torch.no_grad()
def estimate_loss():
    out = {}
    model.eval()
    for split in ("train", "val"):
        losses = torch.zeros(eval_iters)
        for k in range(eval_iters):
            _, loss = net(*get_batch(split))
            losses[k] = loss.item()
        out[split] = losses.mean()
    model.train()
    return out


def get_lr(it):
    if it < warmup_iters:
        return learning_rate * (it + 1) / warmup_iters
    ratio = (it - warmup_iters) / (max_iters - warmup_iters)
    return min_lr + 0.5 * (1 + math.cos(math.pi * ratio)) * (learning_rate - min_lr)


best_val_loss = 1e9
t0 = time.time()
for iter_num in remaining_steps_until(max_iters):
    for group in optimizer.param_groups:
        group["lr"] = get_lr(iter_num)
    if iter_num % eval_interval == 0:
        losses = estimate_loss()
        if rank() == 0:
            print(f"step {iter_num}: train {losses['train']:.4f}, val {losses['val']:.4f}")
        if losses["val"] < best_val_loss:
            best_val_loss = losses["val"]  # MISTAKE: lost: after a restart a worse model overwrites the best one (or line with: if losses["val"] < best_val_loss)
            if rank() == 0:
                torch.save({"model": net.state_dict(), "iter_num": iter_num}, os.path.join(out_dir, "ckpt.pt"))
    x, y = get_batch("train")
    _, loss = model(x, y)
    optimizer.zero_grad(set_to_none=True)
    loss.backward()
    torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
    optimizer.step()
    if iter_num % 10 == 0 and rank() == 0:
        print(f"iter {iter_num}: loss {loss.item():.4f}, {time.time() - t0:.0f} s")
