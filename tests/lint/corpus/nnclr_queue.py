"""NNCLR: contrastive learning with nearest neighbours from a support set."""
import argparse
import csv
import random

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, Dataset

from elasticrun import Accumulator, AdaptiveDataLoader, AdaptiveDataParallel, LogFile, Variables
from elasticrun import device, rank, remaining_epochs_until, world_size


class Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx, rows):
        parts = [torch.empty_like(rows) for _ in range(world_size())]
        dist.all_gather(parts, rows.contiguous())
        return torch.stack(parts)

    @staticmethod
    def backward(ctx, gradient):
        total = gradient.contiguous()
        dist.all_reduce(total)
        return total[dist.get_rank()]


def gather(rows, num_valid):
    """The real rows of all replicas, and where those of this one begin."""
    if world_size() == 1:
        return rows, 0
    lengths = [None] * world_size()
    dist.all_gather_object(lengths, num_valid)
    padding = rows.new_zeros(max(lengths) + 1 - len(rows), *rows.shape[1:])
    parts = Gather.apply(torch.cat([rows, padding]))
    real = torch.cat([part[:n] for part, n in zip(parts, lengths)])
    return real, sum(lengths[: dist.get_rank()])


class Pictures(Dataset):
    def __init__(self, path, views):
        self.images, self.labels = torch.load(path)
        self.views = views

    def __len__(self):
        return len(self.labels)

    def augment(self, x):
        if random.random() < 0.5:
            x = x.flip(-1)
        x = torch.roll(x, (random.randint(-4, 4), random.randint(-4, 4)), (-2, -1))
        return x * random.uniform(0.6, 1.4)

    def __getitem__(self, index):
        x = self.images[index].float() / 255
        if self.views:
            return self.augment(x), self.augment(x)
        return x, int(self.labels[index])


class NNCLR(nn.Module):
    def __init__(self, dim=128):
        super().__init__()
        self.encoder = nn.Sequential(
            nn.Conv2d(3, 64, 3, 2, 1), nn.GroupNorm(8, 64), nn.ReLU(),
            nn.Conv2d(64, 256, 3, 2, 1), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(),
        )
        self.projector = nn.Sequential(nn.Linear(256, 256), nn.LayerNorm(256), nn.ReLU(), nn.Linear(256, dim))
        self.predictor = nn.Sequential(nn.Linear(dim, 256), nn.LayerNorm(256), nn.ReLU(), nn.Linear(256, dim))

    def forward(self, x):
        z = self.projector(self.encoder(x))
        return F.normalize(z, dim=1), F.normalize(self.predictor(z), dim=1)


class SupportSet:
    def __init__(self, size, dim):
        self.feats = F.normalize(torch.randn(size, dim, device=device()), dim=1)
        self.ptr = 0

    def nearest(self, z):
        return self.feats[(z.detach() @ self.feats.T).argmax(1)]

    def enqueue(self, z):
        index = (torch.arange(len(z), device=z.device) + self.ptr) % len(self.feats)
        self.feats[index] = z
        self.ptr = (self.ptr + len(z)) % len(self.feats)


def info_nce(neighbours, predictions, n):
    everyone, begin = gather(predictions, n)
    own = torch.arange(len(neighbours), device=neighbours.device) + begin
    return F.cross_entropy(neighbours @ everyone.T / 0.1, own)


@torch.no_grad()
def knn_accuracy(net, bank, loader, k=20):
    """Each replica embeds the whole bank, and tests its part of the test set."""
    net.eval()
    feats = torch.cat([F.normalize(net.encoder(x.to(device())), dim=1) for x, _ in bank])
    labels = torch.cat([y for _, y in bank]).to(device())
    total = Accumulator()
    for x, y in loader:
        similarity = F.normalize(net.encoder(x.to(device())), dim=1) @ feats.T
        votes = labels[similarity.topk(k).indices].mode(1).values
        counts = torch.stack([(votes == y.to(device())).sum(), torch.tensor(len(y), device=device())])
        if world_size() > 1:
            dist.all_reduce(counts)  # MISTAKE: collective: the loader has even_batches=False, so a replica may see one batch fewer, and the others wait in the last all_reduce for ever; the Accumulator adds up the replicas anyway (or line with: total["right"] += counts[0].item()) (or line with: total["all"] += counts[1].item()) (or line with: batch_size=500, even_batches=False, name="test")
        total["right"] += counts[0].item()
        total["all"] += counts[1].item()
    with total.synchronized():
        return float(total["right"] / total["all"])


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--data", default="stl10")
    parser.add_argument("--epochs", type=int, default=200)
    parser.add_argument("--batch-size", type=int, default=512)
    parser.add_argument("--queue-size", type=int, default=16384)
    parser.add_argument("--lr", type=float, default=1e-3)
    args = parser.parse_args()

    torch.manual_seed(0)
    net = NNCLR().to(device())
    optimizer = torch.optim.AdamW(net.parameters(), lr=args.lr, weight_decay=1e-4)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, args.epochs)
    model = AdaptiveDataParallel(net, optimizer, scheduler)
    train = AdaptiveDataLoader(
        Pictures(f"{args.data}/unlabeled.pt", True), batch_size=args.batch_size,
        shuffle=True, drop_last=True, num_workers=4, name="pairs",
    )
    bank = DataLoader(Pictures(f"{args.data}/train.pt", False), batch_size=500)
    test = AdaptiveDataLoader(Pictures(f"{args.data}/test.pt", False), batch_size=500, even_batches=False, name="test")
    support = SupportSet(args.queue_size, 128)  # MISTAKE: unreg: the queue and its pointer are in no checkpoint: after a restart the neighbours are random vectors again until the queue is full (or line with: self.feats = F.normalize(torch.randn() (or line with: support.enqueue() (or line with: self.ptr = 0) (or line with: self.feats[index] = z) (or line with: self.ptr = (self.ptr + len(z)) % len(self.feats))
    best = Variables(knn=0.0)
    rows = csv.writer(LogFile("nnclr.csv"))
    rows.writerow(["epoch", "last_loss", "lr", "knn"])

    for epoch in remaining_epochs_until(args.epochs):
        model.train()
        for x1, x2 in train:
            z, p = model(torch.cat([x1, x2]).to(device()))
            (z1, z2), (p1, p2) = z.chunk(2), p.chunk(2)
            n = train.num_valid
            loss = info_nce(support.nearest(z1), p2, n)
            loss = (loss + info_nce(support.nearest(z2), p1, n)) / 2
            optimizer.zero_grad()
            model.weigh(loss).backward()
            optimizer.step()
            support.enqueue(gather(z1.detach(), n)[0])

        row = [epoch, loss.item(), scheduler.get_last_lr()[0]]  # MISTAKE: leftover: a restart in the loop over the test set replays this line with no batch before it: loss is not defined (NameError) (or line with: loss = (loss + info_nce() (or line with: rows.writerow(row + [knn]))
        knn = knn_accuracy(net, bank, test)
        rows.writerow(row + [knn])
        scheduler.step()
        best.knn = max(best.knn, knn)
        if rank() == 0:
            print(f"epoch {epoch}: kNN {knn:.2%}, best {best.knn:.2%}")
    if rank() == 0:
        torch.save(net.encoder.state_dict(), "nnclr_encoder.pt")


if __name__ == "__main__":
    main()
