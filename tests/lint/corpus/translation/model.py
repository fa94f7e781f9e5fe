"""A transformer for translation."""
import math

import torch
import torch.nn as nn
from vocab import PAD


class Translator(nn.Module):
    def __init__(self, source, target, dim=256):
        super().__init__()
        self.scale = math.sqrt(dim)
        self.source, self.target = nn.Embedding(source, dim), nn.Embedding(target, dim)
        self.register_buffer("positions", self.table(512, dim), persistent=False)
        self.body = nn.Transformer(dim, 4, 3, 3, 1024, batch_first=True)
        self.out = nn.Linear(dim, target)

    @staticmethod
    def table(n, dim):
        angle = torch.arange(n)[:, None] / 10000 ** (torch.arange(0, dim, 2) / dim)
        return torch.stack([angle.sin(), angle.cos()], -1).flatten(1)

    def forward(self, src, tgt):
        mask = nn.Transformer.generate_square_subsequent_mask(tgt.size(1)).to(tgt.device)
        s = self.source(src) * self.scale + self.positions[: src.size(1)]
        t = self.target(tgt) * self.scale + self.positions[: tgt.size(1)]
        return self.out(self.body(s, t, tgt_mask=mask, src_key_padding_mask=src == PAD, tgt_key_padding_mask=tgt == PAD))
