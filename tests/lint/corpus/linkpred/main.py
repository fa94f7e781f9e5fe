"""Link prediction in the manner of OGB's examples. elasticrun run main.py --data ..."""
import argparse
import csv

import torch
from data import PositiveEdges, WithNegatives, load_graph
from model import GCNLinkPredictor, link_loss

from elasticrun import Accumulator, AdaptiveDataLoader, AdaptiveDataParallel, LogFile, Variables
from elasticrun import device, rank, remaining_epochs_until


def train_epoch(model, adj, loader, optimizer):
    model.train()
    total = Accumulator()
    for positives, negatives in loader:
        positives, negatives = positives.to(device()), negatives.to(device())
        optimizer.zero_grad()
        loss = link_loss(*model(adj, positives, negatives))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        total["loss"] += loss.item() * loader.num_valid
    with total.synchronized():
        return float(total["loss"] / loader.num_samples)


@torch.no_grad()
def hits_at(model, adj, loader, negatives, k=50):
    """The share of positives that are ranked above the k-th best negative."""
    model.eval()
    h = model.encode(adj)
    threshold = model.decode(h, negatives).topk(k).values[-1]
    pos_preds = []
    for positives in loader:
        pos_preds += [model.decode(h, positives.to(device())).cpu()]  # MISTAKE: sum: a list of this replica's scores since the last restart; Hits@K over it is taken as that of the whole split, and differs by rank (or line with: pos_preds = []) (or line with: return (torch.cat(pos_preds) > threshold.cpu()).float().mean().item()) (or line with: if valid_hits > best.valid:) (or line with: best.valid, best.epoch = valid_hits, epoch)
    return (torch.cat(pos_preds) > threshold.cpu()).float().mean().item()


def test(model, graph, loaders):
    negatives = graph.negatives.to(device())
    adj = graph.adj.to(device())
    return tuple(hits_at(model, adj, loaders[split], negatives) for split in ("valid", "test"))


def main():
    parser = argparse.ArgumentParser(description="Link prediction (GCN)")
    parser.add_argument("--data", default="dataset/collab")
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--num_layers", type=int, default=3)
    parser.add_argument("--dropout", type=float, default=0.2)
    parser.add_argument("--batch_size", type=int, default=16 * 1024)
    parser.add_argument("--num_neg", type=int, default=1)
    parser.add_argument("--lr", type=float, default=0.001)
    parser.add_argument("--epochs", type=int, default=400)
    args = parser.parse_args()
    torch.manual_seed(0)

    graph = load_graph(args.data)
    net = GCNLinkPredictor(graph.num_nodes, args.hidden, args.num_layers, args.dropout).to(device())
    optimizer = torch.optim.Adam(net.parameters(), lr=args.lr)
    model = AdaptiveDataParallel(net, optimizer)
    adj = graph.adj.to(device())
    train_loader = AdaptiveDataLoader(
        WithNegatives(graph.train, graph.num_nodes, args.num_neg, seed=0),
        batch_size=args.batch_size, shuffle=True, num_workers=2, name="train",
    )
    loaders = {
        split: AdaptiveDataLoader(
            PositiveEdges(getattr(graph, split)), batch_size=args.batch_size, even_batches=False, name=split
        )
        for split in ("valid", "test")
    }
    best = Variables(valid=0.0, epoch=-1)
    best_test = 0.0
    log = csv.writer(LogFile("hits.csv"))
    log.writerow(["epoch", "loss", "valid", "test"])

    for epoch in remaining_epochs_until(args.epochs):
        loss = train_epoch(model, adj, train_loader, optimizer)
        valid_hits, test_hits = test(model, graph, loaders)
        log.writerow([epoch, f"{loss:.4f}", f"{valid_hits:.4f}", f"{test_hits:.4f}"])
        if valid_hits > best.valid:
            best.valid, best.epoch = valid_hits, epoch
            best_test = test_hits  # MISTAKE: lost: best.valid comes back, but this local does not: after a restart the result says 0 until a better epoch comes (or line with: best_test = 0.0) (or line with: print(f"best epoch {best.epoch})
        if rank() == 0:
            print(f"Epoch {epoch:03d}, Loss: {loss:.4f}, Valid: {valid_hits:.2%}, Test: {test_hits:.2%}")

    if rank() == 0:
        print(f"best epoch {best.epoch}: valid {best.valid:.2%}, test {best_test:.2%}")


if __name__ == "__main__":
    main()
