"""Node classification, full batch, counted in steps; ported."""
import argparse

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F

from elasticrun import AdaptiveDataParallel, Variables, device, rank, remaining_steps_until


def load(path):
    raw = np.genfromtxt(f"{path}/cora.content", dtype=np.dtype(str))
    names = sorted(set(raw[:, -1]))
    labels = np.array([names.index(n) for n in raw[:, -1]])
    where = {int(k): i for i, k in enumerate(raw[:, 0])}
    edges = np.genfromtxt(f"{path}/cora.cites", dtype=np.int64)
    src, dst = np.vectorize(where.get)(edges).T
    adj = torch.zeros(len(raw), len(raw))
    adj[src, dst] = adj[dst, src] = 1
    adj.fill_diagonal_(1)
    d = adj.sum(1).rsqrt()
    order = np.random.default_rng(42).permutation(len(raw))
    features = torch.tensor(raw[:, 1:-1].astype(np.float32))
    return d[:, None] * adj * d, features, torch.tensor(labels), order[:140], order[200:500], order[500:1500]


class GCN(nn.Module):
    def __init__(self, nfeat, nhid, nclass):
        super().__init__()
        self.w1, self.w2 = nn.Linear(nfeat, nhid), nn.Linear(nhid, nclass)

    def forward(self, x, adj):
        x = F.dropout(F.relu(adj @ self.w1(x)), 0.5, self.training)
        return adj @ self.w2(x)


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--data", default="cora")
    p.add_argument("--steps", type=int, default=200)
    p.add_argument("--patience", type=int, default=50)
    args = p.parse_args()
    torch.manual_seed(0)
    dev = device()
    adj, x, y, train, valid, test = load(args.data)
    adj, x, y = adj.to(dev), x.to(dev), y.to(dev)
    net = GCN(x.shape[1], 16, int(y.max()) + 1).to(dev)
    optimizer = torch.optim.Adam(net.parameters(), lr=0.01, weight_decay=5e-4)
    model = AdaptiveDataParallel(net, optimizer)
    state = Variables(best=0.0, best_step=-1, test=0.0)
    for step in remaining_steps_until(args.steps):
        if step - state.best_step > args.patience:
            continue
        net.train()
        loss = F.cross_entropy(model(x, adj)[train], y[train])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        net.eval()
        with torch.no_grad():
            hits = net(x, adj).argmax(1) == y
        accuracy = hits[valid].float().mean().item()
        if accuracy > state.best:
            state.best, state.best_step = accuracy, step
            state.test = hits[test].float().mean().item()
        if rank() == 0 and step % 10 == 0:
            print(f"{step}: loss {loss.item():.4f} valid {accuracy:.4f} best {state.best:.4f}")
    if rank() == 0:
        print(f"test accuracy {state.test:.4f} at step {state.best_step}")


main()
