"""Interactions of users and items, and triples for BPR."""
from typing import Dict, List

import numpy as np
import scipy.sparse as sp
import torch
from torch.utils.data import Dataset


def read_pairs(path: str) -> np.ndarray:
    pairs = []
    with open(path) as f:
        for line in f:
            user, *items = map(int, line.split())
            pairs.extend((user, item) for item in items)
    return np.array(pairs, dtype=np.int64)


class Interactions:
    def __init__(self, folder: str):
        self.train, self.test = read_pairs(f"{folder}/train.txt"), read_pairs(f"{folder}/test.txt")
        both = np.concatenate([self.train, self.test])
        self.num_users, self.num_items = both.max(0) + 1
        self.positives: List[np.ndarray] = self._group(self.train)
        self.held_out: List[np.ndarray] = self._group(self.test)

    def _group(self, pairs: np.ndarray) -> List[np.ndarray]:
        groups: Dict[int, list] = {u: [] for u in range(self.num_users)}
        for user, item in pairs:
            groups[int(user)].append(int(item))
        return [np.array(groups[u], dtype=np.int64) for u in range(self.num_users)]

    def graph(self) -> torch.Tensor:
        """The normalised adjacency of users and items."""
        size = self.num_users + self.num_items
        rows, cols = self.train[:, 0], self.train[:, 1] + self.num_users
        matrix = sp.coo_matrix((np.ones(2 * len(rows)), (np.r_[rows, cols], np.r_[cols, rows])), shape=(size, size))
        scale = np.power(np.maximum(np.asarray(matrix.sum(1)).ravel(), 1e-9), -0.5)
        matrix = (sp.diags(scale) @ matrix @ sp.diags(scale)).tocoo()
        return torch.sparse_coo_tensor(np.stack([matrix.row, matrix.col]), matrix.data.astype(np.float32), (size, size)).coalesce()


class BPRTriples(Dataset):
    """A user, an item of theirs and one that is not; drawn anew for each epoch."""

    def __init__(self, data: Interactions):
        self.data = data
        self.triples = np.zeros((len(data.train), 3), dtype=np.int64)

    def resample(self) -> None:
        users = np.random.randint(0, self.data.num_users, len(self.triples))  # MISTAKE: data: drawn in front of the loop from the global generator, which in a replay is not where it was, so the rest of the epoch has other samples (and each replica may have others); draw from (seed, epoch)
        for i, user in enumerate(users):
            positives = self.data.positives[user]
            negative = np.random.randint(0, self.data.num_items)  # ARGUABLE: the same draw, marked above
            while negative in positives:
                negative = np.random.randint(0, self.data.num_items)  # ARGUABLE: the same
            self.triples[i] = user, np.random.choice(positives) if len(positives) else 0, negative  # ARGUABLE: the same

    def __len__(self) -> int:
        return len(self.triples)

    def __getitem__(self, i: int) -> np.ndarray:
        return self.triples[i]


class Users(Dataset):
    """Users with something held out."""

    def __init__(self, data: Interactions):
        self.users = [u for u in range(data.num_users) if len(data.held_out[u])]

    def __len__(self) -> int:
        return len(self.users)

    def __getitem__(self, i: int) -> int:
        return self.users[i]
