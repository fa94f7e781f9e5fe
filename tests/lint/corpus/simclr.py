"""SimCLR on unlabelled images."""
import argparse
import uuid

import torch
import torch.nn as nn
import torch.nn.functional as F
import torchvision
from torch.utils.tensorboard import SummaryWriter
from torchvision import transforms as T

from elasticrun import AdaptiveDataLoader, AdaptiveDataParallel, device, rank, remaining_epochs_until


class Views:
    def __init__(self, transform, n=2):
        self.transform, self.n = transform, n

    def __call__(self, image):
        return torch.stack([self.transform(image) for _ in range(self.n)])


class SimCLR(nn.Module):
    def __init__(self, dim=128):
        super().__init__()
        self.backbone = torchvision.models.resnet18(num_classes=512)
        self.head = nn.Sequential(nn.ReLU(), nn.Linear(512, dim))

    def forward(self, x):
        return F.normalize(self.head(self.backbone(x)), dim=1)


def nt_xent(z, temperature):
    n = len(z) // 2
    sim = z @ z.T / temperature
    sim.fill_diagonal_(-1e9)
    target = torch.cat([torch.arange(n) + n, torch.arange(n)]).to(z.device)
    return F.cross_entropy(sim, target)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=100)
    parser.add_argument("--batch-size", type=int, default=512)
    parser.add_argument("--temperature", type=float, default=0.07)
    args = parser.parse_args()
    torch.manual_seed(0)
    dev = device()
    run_name = f"simclr-{uuid.uuid4().hex[:8]}"  # MISTAKE: name: another name after each restart, the curves are scattered over folders (or line with: writer = SummaryWriter)
    writer = SummaryWriter(f"runs/{run_name}") if rank() == 0 else None
    t = T.Compose([T.RandomResizedCrop(96), T.RandomHorizontalFlip(), T.RandomGrayscale(0.2), T.ToTensor()])
    data = torchvision.datasets.STL10("data", split="unlabeled", transform=Views(t))
    loader = AdaptiveDataLoader(data, batch_size=args.batch_size, shuffle=True, drop_last=True, num_workers=8)
    net = SimCLR().to(dev)
    optimizer = torch.optim.Adam(net.parameters(), 3e-4, weight_decay=1e-4)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, len(loader) * args.epochs)
    model = AdaptiveDataParallel(net, optimizer, scheduler)
    n_iter = 0
    for epoch in remaining_epochs_until(args.epochs):
        for views, _ in loader:
            views = views.to(dev)
            z = model(torch.cat([views[:, 0], views[:, 1]]))
            loss = nt_xent(z, args.temperature)  # MISTAKE: weigh: negatives are those of this replica's share only, so the loss depends on how the batch is cut; gather and use model.weigh (or line with: loss.backward()) (or line with: return F.cross_entropy(sim, target))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            scheduler.step()
            if writer and n_iter % 50 == 0:
                writer.add_scalar("loss", loss.item(), global_step=n_iter)
            n_iter += 1  # MISTAKE: lost: the step of the curves begins at 0 after a restart (or line with: n_iter = 0)
        if rank() == 0:
            torch.save(net.state_dict(), "simclr_last.pt")


if __name__ == "__main__":
    main()
