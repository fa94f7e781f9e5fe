"""TransE and DistMult on FB15k-237 with filtered ranking."""
import argparse
from collections import defaultdict
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

from elasticrun import AdaptiveDataLoader, AdaptiveDataParallel, Variables, device, rank, remaining_epochs_until


def read_triples(folder):
    splits, entities, relations = {}, set(), set()
    for name in ("train", "valid", "test"):
        rows = [line.split("\t") for line in (Path(folder) / f"{name}.txt").read_text().splitlines()]
        splits[name] = rows
        for h, r, t in rows:
            entities.update((h, t))
            relations.add(r)
    ent2id = {e: i for i, e in enumerate(entities)}  # MISTAKE: data: the order of a set of strings is another one in each process (or line with: splits, entities, relations = {}, set(), set())
    rel2id = {r: i for i, r in enumerate(sorted(relations))}
    arrays = {k: torch.tensor([[ent2id[h], rel2id[r], ent2id[t]] for h, r, t in v]) for k, v in splits.items()}
    return arrays, ent2id, rel2id


class KGE(nn.Module):
    def __init__(self, n_ent, n_rel, dim, score="transe"):
        super().__init__()
        self.ent, self.rel, self.kind = nn.Embedding(n_ent, dim), nn.Embedding(n_rel, dim), score
        bound = 6 / dim**0.5
        nn.init.uniform_(self.ent.weight, -bound, bound)
        nn.init.uniform_(self.rel.weight, -bound, bound)

    def forward(self, h, r, t):
        h, r, t = self.ent(h), self.rel(r), self.ent(t)
        if self.kind == "transe":
            return -(h + r - t).norm(p=1, dim=-1)
        return (h * r * t).sum(-1)


class RankMeter:
    def __init__(self):
        self.ranks = []

    def add(self, ranks):
        self.ranks.extend(ranks.tolist())  # MISTAKE: sum: the ranks of this replica's share only, lost by a restart (or line with: self.ranks = []) (or line with: meter.add(position[:) (or line with: ranks = np.asarray(self.ranks) (or line with: meter = RankMeter())

    def summary(self):
        ranks = np.asarray(self.ranks, dtype=float)
        return {"mrr": (1 / ranks).mean(), "hits@10": (ranks <= 10).mean(), "hits@1": (ranks <= 1).mean()}


def corrupt(h, t, n_ent, k):
    fake = torch.randint(n_ent, (len(h), k), device=h.device)
    head = torch.rand(len(h), k, device=h.device) < 0.5
    return torch.where(head, fake, h[:, None]), torch.where(head, t[:, None], fake)


@torch.no_grad()
def rank_tails(net, loader, known, n_ent):
    net.eval()
    meter = RankMeter()
    every = torch.arange(n_ent, device=device())
    for (triples,) in loader:
        h, r, t = triples.unbind(1)
        scores = net(h[:, None], r[:, None], every[None])
        for row, (a, b, c) in enumerate(triples.tolist()):
            others = [e for e in known[a, b] if e != c]
            scores[row, others] = float("-inf")
        position = 1 + (scores > scores.gather(1, t[:, None])).sum(1)
        meter.add(position[: loader.num_valid])
    return meter.summary()


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--data", default="FB15k-237")
    p.add_argument("--score", default="transe", choices=["transe", "distmult"])
    p.add_argument("--dim", type=int, default=200)
    p.add_argument("--epochs", type=int, default=500)
    p.add_argument("--batch-size", type=int, default=1024)
    p.add_argument("--negatives", type=int, default=32)
    p.add_argument("--margin", type=float, default=9.0)
    p.add_argument("--lr", type=float, default=0.01)
    args = p.parse_args()

    triples, ent2id, rel2id = read_triples(args.data)
    known = defaultdict(list)
    for h, r, t in torch.cat(list(triples.values())).tolist():
        known[h, r].append(t)
    train = AdaptiveDataLoader(TensorDataset(triples["train"].to(device())), batch_size=args.batch_size, shuffle=True)
    valid = AdaptiveDataLoader(TensorDataset(triples["valid"].to(device())), batch_size=64)

    net = KGE(len(ent2id), len(rel2id), args.dim, args.score).to(device())
    optimizer = torch.optim.Adagrad(net.parameters(), lr=args.lr)
    model = AdaptiveDataParallel(net, optimizer)
    best = Variables(mrr=0.0, epoch=-1)

    for epoch in remaining_epochs_until(args.epochs):
        net.ent.weight.data = F.normalize(net.ent.weight.data, dim=1)  # MISTAKE: zoneP: a restart in the loop does it again to weights of its middle, and does not see changes through data
        if epoch == args.epochs // 2:
            for group in optimizer.param_groups:
                group["lr"] /= 10
        model.train()
        for (batch,) in train:
            h, r, t = batch.unbind(1)
            fake_h, fake_t = corrupt(h, t, len(ent2id), args.negatives)
            heads, tails = torch.cat([h[:, None], fake_h], 1), torch.cat([t[:, None], fake_t], 1)
            scores = model(heads, r[:, None].expand_as(heads), tails)
            loss = F.relu(args.margin - scores[:, :1] + scores[:, 1:]).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        if epoch % 10 == 9:
            result = rank_tails(net, valid, known, len(ent2id))
            if result["mrr"] > best.mrr:  # ARGUABLE: follows from the share's ranks
                best.mrr, best.epoch = result["mrr"], epoch  # MISTAKE: vars: each replica has the MRR of its own share (or line with: result = rank_tails)
                if rank() == 0:
                    np.save("entities.npy", net.ent.weight.detach().cpu().numpy())
            if rank() == 0:
                print(epoch, {k: round(v, 4) for k, v in result.items()}, f"best {best.mrr:.4f}")


if __name__ == "__main__":
    main()
