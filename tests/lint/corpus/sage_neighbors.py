"""GraphSAGE with neighbour sampling for node classification (ogbn-products style arrays)."""
import argparse
import copy

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from elasticrun import Accumulator, AdaptiveDataLoader, AdaptiveDataParallel, device, rank, remaining_epochs_until


class Graph:
    def __init__(self, path):
        data = np.load(path)
        self.indptr, self.indices = data["indptr"], data["indices"]
        self.x = torch.from_numpy(data["feat"]).float()
        self.y = torch.from_numpy(data["label"]).long()
        self.split = {k: torch.from_numpy(data[k]) for k in ("train", "valid", "test")}

    def neighbors(self, node):
        return self.indices[self.indptr[node] : self.indptr[node + 1]]


class Sampler:
    """Collate function: turns a list of seed nodes into blocks for each layer."""

    def __init__(self, graph, fanouts, seed):
        self.graph, self.fanouts = graph, fanouts
        self.rng = np.random.default_rng(seed)  # MISTAKE: rng: a generator of its own begins again at a restart and is the same in all replicas and workers (or line with: self.rng.choice(found)

    def sample(self, nodes, fanout):
        out = np.empty((len(nodes), fanout), dtype=np.int64)
        for row, node in enumerate(nodes):
            found = self.graph.neighbors(node)
            out[row] = self.rng.choice(found, fanout) if len(found) else node
        return out

    def __call__(self, seeds):
        seeds = np.asarray([int(s) for s in seeds])
        first = self.sample(seeds, self.fanouts[0])
        second = self.sample(first.reshape(-1), self.fanouts[1])
        x = self.graph.x
        return (
            x[seeds],
            x[first.reshape(-1)].view(*first.shape, -1),
            x[second.reshape(-1)].view(*first.shape, self.fanouts[1], -1),
            self.graph.y[seeds],
        )


class SAGE(nn.Module):
    def __init__(self, d_in, hidden, classes):
        super().__init__()
        self.self1, self.neigh1 = nn.Linear(d_in, hidden), nn.Linear(d_in, hidden)
        self.self2, self.neigh2 = nn.Linear(hidden, classes), nn.Linear(hidden, classes)
        self.drop = nn.Dropout(0.5)

    def forward(self, x0, x1, x2):
        h0 = F.relu(self.self1(x0) + self.neigh1(x1.mean(1)))
        h1 = F.relu(self.self1(x1) + self.neigh1(x2.mean(2)))
        return self.self2(self.drop(h0)) + self.neigh2(self.drop(h1).mean(1))


def accuracy_of(model, loader):
    model.eval()
    total = Accumulator()
    with torch.no_grad():
        for *blocks, y in loader:
            hits = model(*blocks).argmax(1) == y
            total["hits"] += hits[: loader.num_valid].sum()
    with total.synchronized():
        return total["hits"] / loader.num_samples


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--graph", default="products.npz")
    p.add_argument("--epochs", type=int, default=100)
    p.add_argument("--patience", type=int, default=10)
    p.add_argument("--seed", type=int, default=1)
    args = p.parse_args()

    graph = Graph(args.graph)
    collate = Sampler(graph, [10, 5], args.seed)
    loaders = {
        name: AdaptiveDataLoader(
            nodes, batch_size=1024, shuffle=name == "train", collate_fn=collate, num_workers=8, device=device(), name=name
        )
        for name, nodes in graph.split.items()
    }
    net = SAGE(graph.x.size(1), 256, int(graph.y.max()) + 1).to(device())
    optimizer = torch.optim.Adam(net.parameters(), lr=3e-3)
    model = AdaptiveDataParallel(net, optimizer)

    best_val = 0.0
    bad_epochs = 0
    best_state = None
    for epoch in remaining_epochs_until(args.epochs):
        model.train()
        for *blocks, y in loaders["train"]:
            loss = F.cross_entropy(model(*blocks), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        val = accuracy_of(model, loaders["valid"])
        if rank() == 0:
            print(f"epoch {epoch:03d} valid {val:.4f}")
        if val > best_val:
            best_val = val  # MISTAKE: lost: the best value is 0 again after a restart (or line with: best_val = 0.0) (or line with: if val > best_val)
            best_state = copy.deepcopy(net.state_dict())  # MISTAKE: lost: the best weights are kept in memory only (or line with: best_state = None) (or line with: net.load_state_dict(best_state))
            bad_epochs = 0
        else:
            bad_epochs += 1  # MISTAKE: lost: patience counts from 0 again after a restart (or line with: bad_epochs = 0) (or line with: if bad_epochs >= args.patience)
            if bad_epochs >= args.patience:
                break

    net.load_state_dict(best_state)
    test = accuracy_of(model, loaders["test"])
    if rank() == 0:
        print(f"best valid {best_val:.4f}, test {test:.4f}")


if __name__ == "__main__":
    main()
