"""GraphSAGE with sampled neighbours on a large graph of products."""
import argparse
import random
from typing import Dict, List, Sequence, Tuple

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import Dataset

from elasticrun import Accumulator, AdaptiveDataLoader, AdaptiveDataParallel, Variables, device, rank, remaining_epochs_until


class Graph:
    def __init__(self, path: str):
        data = np.load(path)
        self.indptr, self.indices = data["indptr"], data["indices"]
        self.features = torch.from_numpy(data["features"])
        self.labels = torch.from_numpy(data["labels"])
        self._memo: Dict[int, np.ndarray] = {}

    def neighbours(self, node: int) -> np.ndarray:
        if node not in self._memo:
            self._memo[node] = self.indices[self.indptr[node] : self.indptr[node + 1]]
        return self._memo[node]


class Seeds(Dataset):
    def __init__(self, nodes: torch.Tensor):
        self.nodes = nodes.tolist()

    def __len__(self) -> int:
        return len(self.nodes)

    def __getitem__(self, i: int) -> int:
        return self.nodes[i]


class NeighbourSampler:
    """Collates seeds to the features of a tree of sampled neighbours."""

    def __init__(self, graph: Graph, fanouts: Sequence[int]):
        self.graph, self.fanouts = graph, fanouts

    def __call__(self, seeds: List[int]) -> Tuple[List[torch.Tensor], torch.Tensor]:
        layers = [list(seeds)]
        for fanout in self.fanouts:
            sampled = []
            for node in layers[-1]:
                candidates = self.graph.neighbours(node)
                if len(candidates) == 0:
                    sampled.extend([node] * fanout)
                else:
                    sampled.extend(random.choices(candidates.tolist(), k=fanout))
            layers.append(sampled)
        features = [self.graph.features[torch.tensor(nodes)] for nodes in layers]
        return features, self.graph.labels[torch.tensor(layers[0])]


class SAGE(nn.Module):
    def __init__(self, inputs: int, hidden: int, classes: int, fanouts: Sequence[int]):
        super().__init__()
        self.fanouts = fanouts
        sizes = [inputs] + [hidden] * (len(fanouts) - 1) + [classes]
        self.layers = nn.ModuleList(nn.Linear(2 * a, b) for a, b in zip(sizes, sizes[1:]))

    def forward(self, features: List[torch.Tensor]) -> torch.Tensor:
        hidden = list(features)
        for depth, layer in enumerate(self.layers):
            following = []
            for level in range(len(hidden) - 1):
                mean = hidden[level + 1].view(len(hidden[level]), self.fanouts[level], -1).mean(1)
                out = layer(torch.cat([hidden[level], mean], 1))
                if depth + 1 < len(self.layers):
                    out = F.dropout(F.relu(out), 0.5, self.training)
                following.append(out)
            hidden = following
        return hidden[0]


@torch.no_grad()
def accuracy(net: SAGE, loader: AdaptiveDataLoader, dev: torch.device) -> float:
    net.eval()
    total = Accumulator()
    for features, labels in loader:
        out = net([f.to(dev) for f in features])
        total["hits"] += (out.argmax(1).cpu() == labels)[: loader.num_valid].sum()
        total["n"] += loader.num_valid
    with total.synchronized():
        return total["hits"] / total["n"]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--graph", default="products.npz")
    parser.add_argument("--epochs", type=int, default=50)
    parser.add_argument("--patience", type=int, default=8)
    parser.add_argument("--fanouts", type=int, nargs="+", default=[15, 10])
    args = parser.parse_args()
    random.seed(1)
    torch.manual_seed(1)
    dev = device()
    graph = Graph(args.graph)
    order = torch.randperm(len(graph.labels), generator=torch.Generator().manual_seed(12))
    bounds = [int(0.6 * len(order)), int(0.8 * len(order))]
    parts = order[: bounds[0]], order[bounds[0] : bounds[1]], order[bounds[1] :]
    collate = NeighbourSampler(graph, args.fanouts)
    train, valid, test = [AdaptiveDataLoader(Seeds(part), batch_size=1024, shuffle=k == 0, collate_fn=collate, num_workers=4, name=name) for k, (part, name) in enumerate(zip(parts, ["train", "valid", "test"]))]
    net = SAGE(graph.features.shape[1], 256, int(graph.labels.max()) + 1, args.fanouts).to(dev)
    optimizer = torch.optim.Adam(net.parameters(), lr=3e-3)
    model = AdaptiveDataParallel(net, optimizer)
    seen = Variables(best=0.0, waited=0)
    for epoch in remaining_epochs_until(args.epochs):
        model.train()
        for features, labels in train:
            loss = F.cross_entropy(model([f.to(dev) for f in features]), labels.to(dev))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        value = accuracy(net, valid, dev)
        seen.waited = 0 if value > seen.best else seen.waited + 1
        seen.best = max(seen.best, value)
        if rank() == 0:
            print(f"epoch {epoch:02d} valid {value:.4f} best {seen.best:.4f}")
        if seen.waited >= args.patience:
            break  # ARGUABLE: a restart after this break might go on with the next epoch
    final = accuracy(net, test, dev)
    if rank() == 0:
        print(f"test {final:.4f}")


if __name__ == "__main__":
    main()
