"""Ratings as pairs with drawn negatives."""
import numpy as np
import pandas as pd
import torch
from torch.utils.data import Dataset


def load_ratings(path):
    frame = pd.read_csv(path, sep="\t", names=["user", "item", "rating", "time"])
    users = {u: i for i, u in enumerate(set(frame["user"].astype(str)))}  # MISTAKE: data: strings in a set have another order in each process, so users get other rows of the embedding
    items = {m: i for i, m in enumerate(sorted(frame["item"].unique()))}
    pairs = np.stack([frame["user"].astype(str).map(users), frame["item"].map(items)], 1)
    return pairs, len(users), len(items)


class Negatives(Dataset):
    """Each positive with ratio negatives, drawn anew by ng_sample."""

    def __init__(self, pairs, num_items, ratio=4):
        self.pairs, self.num_items, self.ratio = pairs, num_items, ratio
        self.known = {tuple(p) for p in pairs.tolist()}
        self.rng = np.random.default_rng(0)
        self.samples = None

    def ng_sample(self):
        users = np.repeat(self.pairs[:, 0], self.ratio)
        items = self.rng.integers(self.num_items, size=len(users))  # MISTAKE: rng: drawn in front of each epoch from a generator that begins anew with a start (or line with: self.rng = np.random.default_rng)
        fake = np.stack([users, items], 1)
        labels = np.array([float(tuple(p) in self.known) for p in fake.tolist()])
        x = np.concatenate([self.pairs, fake])
        self.samples = torch.from_numpy(x), torch.from_numpy(np.concatenate([np.ones(len(self.pairs)), labels])).float()

    def __len__(self):
        return len(self.pairs) * (1 + self.ratio)

    def __getitem__(self, i):
        return self.samples[0][i], self.samples[1][i]
