"""Metric learning: embeddings of a gallery in each epoch's end, hard mining inside the batch."""
import argparse
import logging
import pathlib

import torch
import torch.nn as nn
import torch.nn.functional as F
from tensorboardX import SummaryWriter

import elasticrun
from elasticrun import AdaptiveDataLoader, AdaptiveDataParallel, Variables

logging.basicConfig(level=logging.INFO)
LOG = logging.getLogger(__file__)


def hard_triplets(e, y, margin):
    d = torch.cdist(e, e)
    same = y[:, None] == y[None]
    far = (d * same).amax(1)
    near = (d + 1e6 * same).amin(1)
    return F.relu(far - near + margin).mean()


def embed_all(net, loader, device):
    """The gallery's embeddings: every replica needs them all, so this is a plain loader."""
    net.eval()
    out = []
    with torch.no_grad():
        for i in range(0, len(loader), 256):
            x = torch.stack([loader[j][0] for j in range(i, min(i + 256, len(loader)))])
            out.append(F.normalize(net(x.to(device))).cpu())
    return torch.cat(out)


def recall_at_1(e, y):
    d = torch.cdist(e, e)
    d.fill_diagonal_(float("inf"))
    return (y[d.argmin(1)] == y).float().mean().item()


def get_parser():
    p = argparse.ArgumentParser()
    p.add_argument("--lr", type=float, default=1e-4)
    p.add_argument("--margin", type=float, default=0.2)
    p.add_argument("--epochs", type=int, default=60)
    p.add_argument("--logdir", type=pathlib.Path, default="logs")
    return p


def main(argv=None):
    args = get_parser().parse_args(argv)
    elasticrun.init(args.logdir / "elastic")
    torch.manual_seed(3)
    from products import gallery, train_set
    device = elasticrun.device()
    net = nn.Sequential(nn.Linear(512, 256), nn.ReLU(), nn.Linear(256, 128)).to(device)
    optim = torch.optim.Adam(net.parameters(), lr=args.lr)
    sched = torch.optim.lr_scheduler.MultiStepLR(optim, [30, 50])
    model = AdaptiveDataParallel(net, optim, sched)
    loader = AdaptiveDataLoader(train_set, batch_size=180, shuffle=True, drop_last=True)
    var = Variables(best=0.0, step=0)
    writer = SummaryWriter(str(args.logdir)) if elasticrun.rank() == 0 else None
    labels = torch.tensor([y for _, y in gallery])
    for epoch in elasticrun.remaining_epochs_until(args.epochs):
        net.train()
        for x, y in loader:
            e = F.normalize(model(x.to(device)))
            loss = hard_triplets(e, y.to(device), args.margin)
            optim.zero_grad()
            loss.backward()
            optim.step()
            var.step += 1
            if writer is not None and var.step % 20 == 0:
                writer.add_scalar("loss", loss.item(), var.step)
        recall = recall_at_1(embed_all(net, gallery, device), labels)
        sched.step()
        LOG.info("epoch %d recall@1 %.4f", epoch, recall)
        if writer is not None:
            writer.add_scalar("recall", recall, epoch)
        if recall > var.best:
            var.best = recall
            if elasticrun.rank() == 0:
                torch.save(net.state_dict(), args.logdir / "best.pth")


if __name__ == "__main__":
    main()
