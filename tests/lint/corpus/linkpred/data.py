"""Edges of a citation graph, and a dataset that adds negatives to them."""
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch.utils.data import Dataset


@dataclass
class Graph:
    num_nodes: int
    adj: torch.Tensor
    train: torch.Tensor
    valid: torch.Tensor
    test: torch.Tensor
    negatives: torch.Tensor


def normalized(edges, num_nodes):
    both = torch.cat([edges, edges.flip(1)]).T
    loops = torch.arange(num_nodes).repeat(2, 1)
    index = torch.cat([both, loops], dim=1)
    degree = torch.bincount(index[0], minlength=num_nodes).float().rsqrt()
    values = degree[index[0]] * degree[index[1]]
    return torch.sparse_coo_tensor(index, values, (num_nodes, num_nodes)).coalesce()


def load_graph(path, seed=12345):
    edges = torch.from_numpy(np.load(Path(path) / "edges.npy")).long()
    num_nodes = int(edges.max()) + 1
    order = torch.randperm(len(edges), generator=torch.Generator().manual_seed(seed))
    edges = edges[order]
    n = len(edges) // 10
    test, valid, train = edges[:n], edges[n : 2 * n], edges[2 * n :]
    fixed = torch.Generator().manual_seed(seed + 1)
    negatives = torch.randint(num_nodes, (10 * n, 2), generator=fixed)
    return Graph(num_nodes, normalized(train, num_nodes), train, valid, test, negatives)


class PositiveEdges(Dataset):
    def __init__(self, edges):
        self.edges = edges

    def __len__(self):
        return len(self.edges)

    def __getitem__(self, index):
        return self.edges[index]


class WithNegatives(PositiveEdges):
    """Each edge comes with `num_neg` corrupted ones."""

    def __init__(self, edges, num_nodes, num_neg, seed):
        super().__init__(edges)
        self.num_nodes, self.num_neg = num_nodes, num_neg
        self.generator = np.random.default_rng(seed)  # MISTAKE: rng: not seeded by elasticrun nor saved: after a restart (and in each worker of each loop) the same negatives are drawn from its start again (or line with: tails = self.generator.integers(self.num_nodes, size=self.num_neg))

    def __getitem__(self, index):
        edge = self.edges[index]
        tails = self.generator.integers(self.num_nodes, size=self.num_neg)
        negatives = torch.stack([edge[0].expand(self.num_neg), torch.from_numpy(tails)], dim=1)
        return edge, negatives
