"""Fine-grained classification with hard example mining, in the batch and between epochs."""
import argparse

import numpy as np
import torch
import torch.nn.functional as F
import torchvision
from torch import nn
from torch.utils.data import Dataset, WeightedRandomSampler
from torchvision import transforms as T

from elasticrun import Accumulator, AdaptiveDataLoader, AdaptiveDataParallel, Variables, device, rank, remaining_epochs_until


class WithIndex(Dataset):
    def __init__(self, dataset):
        self.dataset = dataset

    def __len__(self):
        return len(self.dataset)

    def __getitem__(self, i):
        x, y = self.dataset[i]
        return x, y, i


def get_data(root):
    mean, std = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
    tail = [T.ToTensor(), T.Normalize(mean, std)]
    fit = T.Compose([T.RandomResizedCrop(224), T.RandomHorizontalFlip(), T.RandAugment(), *tail])
    test = T.Compose([T.Resize(256), T.CenterCrop(224), *tail])
    folder = torchvision.datasets.ImageFolder
    return WithIndex(folder(f"{root}/train", fit)), WithIndex(folder(f"{root}/val", test))


def ohem(losses, keep):
    n = max(1, int(keep * len(losses)))
    return losses.topk(n).values.mean()


def get_args():
    p = argparse.ArgumentParser()
    p.add_argument("--root", default="data/cub")
    p.add_argument("--epochs", type=int, default=40)
    p.add_argument("--batch-size", type=int, default=96)
    p.add_argument("--keep", type=float, default=0.7)
    p.add_argument("--momentum", type=float, default=0.5)
    p.add_argument("--lr", type=float, default=0.02)
    return p.parse_args()


def main():
    args = get_args()
    train_set, valid_set = get_data(args.root)
    classes = len(train_set.dataset.classes)
    net = torchvision.models.resnet50(weights="IMAGENET1K_V2")
    net.fc = nn.Linear(net.fc.in_features, classes)
    net = net.to(device())
    optimizer = torch.optim.SGD(net.parameters(), lr=args.lr, momentum=0.9, weight_decay=1e-4)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, args.epochs)
    model = AdaptiveDataParallel(net, optimizer, scheduler)
    valid = AdaptiveDataLoader(valid_set, batch_size=128, num_workers=8, device=device())
    best = Variables(accuracy=0.0)

    difficulty = np.ones(len(train_set))
    for epoch in remaining_epochs_until(args.epochs):
        sampler = WeightedRandomSampler(difficulty / difficulty.sum(), len(train_set))  # MISTAKE: data: draws another order after a restart; WeightedDraws is the order for that
        train = AdaptiveDataLoader(train_set, batch_size=args.batch_size, sampler=sampler, num_workers=8, device=device())  # MISTAKE: order: a loader must be made before the first loop
        model.train()
        for x, y, index in train:
            losses = F.cross_entropy(model(x), y, reduction="none")
            loss = ohem(losses, args.keep)  # MISTAKE: weigh: the hardest of this replica's share, a mean over a count of its own (or line with: loss.backward()) (or line with: return losses.topk(n).values.mean())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            i = index.cpu().numpy()
            difficulty[i] = args.momentum * difficulty[i] + (1 - args.momentum) * losses.detach().cpu().numpy()  # MISTAKE: lost: all ones again after a restart, and each replica knows its own share only (or line with: difficulty = np.ones)

        model.eval()
        total = Accumulator()
        with torch.no_grad():
            for x, y, _ in valid:
                hits = model(x).argmax(1) == y
                total += {"hits": hits[: valid.num_valid].sum(), "all": valid.num_valid}
        with total.synchronized():
            accuracy = total["hits"] / total["all"]
        scheduler.step()
        if rank() == 0:
            hard = np.argsort(-difficulty)[:5]
            print(f"epoch {epoch}: {accuracy:.2%}, hardest {[train_set.dataset.samples[i][0] for i in hard]}")  # ARGUABLE: hardest of rank 0's share, only printed
            if accuracy > best.accuracy:
                torch.save(net.state_dict(), "cub_best.pt")
        best.accuracy = max(best.accuracy, accuracy)


if __name__ == "__main__":
    main()
