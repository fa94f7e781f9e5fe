"""PointNet for classification on ModelNet40, with decayed momenta."""
import argparse
import glob
import logging
import os
from typing import Tuple

import h5py
import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import Dataset

from elasticrun import Accumulator, AdaptiveDataLoader, AdaptiveDataParallel, Variables, device, rank, remaining_epochs_until

logger = logging.getLogger("Model")


def random_point_dropout(points: np.ndarray, max_dropout_ratio: float = 0.875) -> np.ndarray:
    ratio = np.random.random() * max_dropout_ratio
    drop = np.random.random(len(points)) <= ratio
    points = points.copy()
    points[drop] = points[0]
    return points


def random_scale_and_shift(points: np.ndarray) -> np.ndarray:
    return points * np.random.uniform(0.8, 1.25) + np.random.uniform(-0.1, 0.1, (1, 3))


class ModelNet40(Dataset):
    def __init__(self, root: str, split: str, num_points: int = 1024):
        self.augment, self.num_points = split == "train", num_points
        points, labels = [], []
        for path in sorted(glob.glob(os.path.join(root, f"ply_data_{split}*.h5"))):
            with h5py.File(path, "r") as f:
                points.append(f["data"][:].astype(np.float32))
                labels.append(f["label"][:].astype(np.int64))
        self.points, self.labels = np.concatenate(points), np.concatenate(labels)[:, 0]

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, i: int) -> Tuple[torch.Tensor, int]:
        points = self.points[i, : self.num_points]
        if self.augment:
            points = random_scale_and_shift(random_point_dropout(points))
            np.random.shuffle(points)
        return torch.from_numpy(points.astype(np.float32)).T, int(self.labels[i])


class PointNet(nn.Module):
    def __init__(self, classes: int = 40):
        super().__init__()
        self.features = nn.Sequential(nn.Conv1d(3, 64, 1), nn.BatchNorm1d(64), nn.ReLU(), nn.Conv1d(64, 128, 1), nn.BatchNorm1d(128), nn.ReLU(), nn.Conv1d(128, 1024, 1), nn.BatchNorm1d(1024))
        self.head = nn.Sequential(nn.Linear(1024, 512), nn.BatchNorm1d(512), nn.ReLU(), nn.Dropout(0.4), nn.Linear(512, classes))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.features(x).max(2).values)


def set_bn_momentum(net: nn.Module, momentum: float) -> None:
    for module in net.modules():
        if isinstance(module, nn.BatchNorm1d):
            module.momentum = momentum


@torch.no_grad()
def test(net: nn.Module, loader: AdaptiveDataLoader, dev: torch.device, num_class: int = 40) -> Tuple[float, float]:
    net.eval()
    total = Accumulator()
    class_acc = np.zeros((num_class, 2))
    for points, target in loader:
        pred = net(points.to(dev)).argmax(1).cpu()
        for cat in np.unique(target.numpy()):
            where = target == cat
            class_acc[cat, 0] += int((pred[where] == cat).sum())  # MISTAKE: sum: hits of each class on this replica only, and only since the restart; an Accumulator (or line with: class_acc = np.zeros) (or line with: class_acc[cat, 1]) (or line with: mean_class = float)
            class_acc[cat, 1] += int(where.sum())
        total["hits"] += (pred == target).sum()  # MISTAKE: pad: a padding sample of a short last batch is counted at 2+ replicas; slice to num_valid
        total["n"] += loader.num_valid
    with total.synchronized():
        instance = total["hits"] / total["n"]
    seen = class_acc[:, 1] > 0
    mean_class = float(np.mean(class_acc[seen, 0] / class_acc[seen, 1]))
    return instance, mean_class


def main() -> None:
    parser = argparse.ArgumentParser("training")
    parser.add_argument("--root", default="data/modelnet40_ply_hdf5_2048")
    parser.add_argument("--epoch", type=int, default=200)
    parser.add_argument("--batch-size", type=int, default=24)
    parser.add_argument("--learning-rate", type=float, default=1e-3)
    parser.add_argument("--lr-decay", type=float, default=0.7)
    parser.add_argument("--step-size", type=int, default=20)
    args = parser.parse_args()
    logging.basicConfig(level=logging.INFO if rank() == 0 else logging.WARNING)
    torch.manual_seed(0)
    np.random.seed(0)
    dev = device()
    train_loader = AdaptiveDataLoader(ModelNet40(args.root, "train"), batch_size=args.batch_size, shuffle=True, num_workers=8, drop_last=True)
    test_loader = AdaptiveDataLoader(ModelNet40(args.root, "test"), batch_size=48)
    classifier = PointNet().to(dev)
    optimizer = torch.optim.Adam(classifier.parameters(), lr=args.learning_rate, weight_decay=1e-4)
    model = AdaptiveDataParallel(classifier, optimizer)
    best = Variables(instance=0.0, mean_class=0.0)
    lr = args.learning_rate
    for epoch in remaining_epochs_until(args.epoch):
        momentum = max(0.01, 0.1 * 0.5 ** (epoch // args.step_size))
        set_bn_momentum(classifier, momentum)
        model.train()
        for points, target in train_loader:
            loss = F.cross_entropy(model(points.to(dev)), target.to(dev), label_smoothing=0.2)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        instance, mean_class = test(classifier, test_loader, dev)
        if (epoch + 1) % args.step_size == 0:
            lr = max(lr * args.lr_decay, 1e-5)  # MISTAKE: lost: the local rate is the first one again after a restart, and is put into the optimizer at the next step (or line with: lr = args.learning_rate) (or line with: group["lr"] = lr)
            for group in optimizer.param_groups:
                group["lr"] = lr
        logger.info("Epoch %d: test instance accuracy %f, class accuracy %f", epoch + 1, instance, mean_class)  # ARGUABLE: marked where it is summed
        best.mean_class = max(best.mean_class, mean_class)  # ARGUABLE: the replica's own, since the counts are; marked where they are summed
        if instance >= best.instance:
            best.instance = instance
            if rank() == 0:
                torch.save({"epoch": epoch, "model": classifier.state_dict()}, "best_model.pth")


if __name__ == "__main__":
    main()
