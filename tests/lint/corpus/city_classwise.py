"""Semantic segmentation with class weights and class-wise IoU."""
import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.amp import GradScaler, autocast
from torch.utils.data import Dataset

import elasticrun
from elasticrun import Accumulator, AdaptiveDataLoader, AdaptiveDataParallel, LogFile, Variables
from elasticrun import atomic_save, device, once, rank, register, remaining_epochs_until

IGNORE = 255


@dataclass
class Config:
    root: str = "data/cityscapes_tensors"
    out: str = "runs/deeplab"
    classes: tuple = ("road", "sidewalk", "building", "wall", "fence", "pole", "light", "sign")
    crop: int = 256
    batch_size: int = 16
    max_local: int = 4
    epochs: int = 80
    lr: float = 0.01
    power: float = 0.9


class Streets(Dataset):
    def __init__(self, root, split, crop=None):
        self.images = sorted(Path(root, split).glob("*_image.npy"))
        self.crop = crop

    def __len__(self):
        return len(self.images)

    def __getitem__(self, index):
        path = self.images[index]
        image = torch.from_numpy(np.load(path)).float() / 255
        label = torch.from_numpy(np.load(str(path).replace("_image", "_label"))).long()
        if self.crop:
            top = int(torch.randint(image.shape[1] - self.crop + 1, ()))
            left = int(torch.randint(image.shape[2] - self.crop + 1, ()))
            window = np.s_[..., top : top + self.crop, left : left + self.crop]
            image, label = image[window], label[window]
        return image, label


class SmallDeepLab(nn.Module):
    def __init__(self, num_classes, width=64):
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, width, 3, 2, 1), nn.GroupNorm(8, width), nn.ReLU())
        self.aspp = nn.ModuleList(nn.Conv2d(width, width, 3, padding=r, dilation=r) for r in (1, 6, 12))
        self.head = nn.Sequential(nn.ReLU(), nn.Conv2d(3 * width, num_classes, 1))

    def forward(self, x):
        h = self.stem(x)
        h = self.head(torch.cat([conv(h) for conv in self.aspp], dim=1))
        return F.interpolate(h, x.shape[-2:], mode="bilinear", align_corners=False)


class ConfusionMatrix:
    def __init__(self, num_classes):
        self.n = num_classes
        self.counts = Accumulator(name="confusion")

    def add(self, label, prediction):
        known = label != IGNORE
        cells = self.n * label[known] + prediction[known]
        for cell, count in enumerate(torch.bincount(cells, minlength=self.n**2).tolist()):
            if count:
                self.counts[cell] += count

    def compute(self):
        with self.counts.synchronized():
            matrix = np.array([float(self.counts[cell]) for cell in range(self.n**2)])
            self.counts.clear()
        matrix = matrix.reshape(self.n, self.n)
        hits = matrix.diagonal()
        iou = hits / np.maximum(matrix.sum(0) + matrix.sum(1) - hits, 1)
        return iou.tolist(), float(hits.sum() / matrix.sum())


class Trainer:
    def __init__(self, cfg):
        self.cfg = cfg
        n = len(cfg.classes)
        self.train_loader = AdaptiveDataLoader(
            Streets(cfg.root, "train", cfg.crop), batch_size=cfg.batch_size, max_local_batch_size=cfg.max_local,
            shuffle=True, drop_last=True, num_workers=4, name="train",
        )
        self.val_loader = AdaptiveDataLoader(Streets(cfg.root, "val"), batch_size=4, even_batches=False, name="val")
        self.weights = self.class_weights(Streets(cfg.root, "train"), n).to(device())
        net = SmallDeepLab(n).to(device())
        self.optimizer = torch.optim.SGD(net.parameters(), lr=cfg.lr, momentum=0.9, weight_decay=1e-4)
        total = cfg.epochs * len(self.train_loader)
        self.scheduler = torch.optim.lr_scheduler.PolynomialLR(self.optimizer, total, cfg.power)
        self.model = AdaptiveDataParallel(net, self.optimizer, self.scheduler)
        self.scaler = GradScaler(device().type)
        register(scaler=self.scaler)
        self.confusion = ConfusionMatrix(n)
        self.best = Variables(miou=0.0, epoch=-1, per_class=[0.0] * n)
        self.log = LogFile(os.path.join(cfg.out, "val.jsonl"))

    @staticmethod
    def class_weights(dataset, n):
        frequency = torch.zeros(n)
        for index in range(min(200, len(dataset))):
            label = dataset[index][1]
            frequency += torch.bincount(label[label != IGNORE], minlength=n).float()
        return 1.0 / torch.log(1.02 + frequency / frequency.sum())

    def loss(self, logits, label):
        known = label != IGNORE
        count = self.weights[label[known]].sum()
        total = F.cross_entropy(logits, label, self.weights, ignore_index=IGNORE, reduction="sum")
        return total / count.clamp(min=1e-6), count

    def train_epoch(self):
        self.model.train()
        for image, label in self.train_loader:
            image, label = image.to(device()), label.to(device())
            self.optimizer.zero_grad()
            with autocast(device().type, dtype=torch.float16, enabled=device().type == "cuda"):
                loss, count = self.loss(self.model(image), label)
            self.scaler.scale(self.model.weigh(loss, count=count)).backward()
            self.scaler.unscale_(self.optimizer)
            nn.utils.clip_grad_norm_(self.model.parameters(), 5.0)
            self.scaler.step(self.optimizer)
            self.scaler.update()
            self.scheduler.step()

    @torch.no_grad()
    def validate(self):
        self.model.eval()
        for image, label in self.val_loader:
            prediction = self.model(image.to(device())).argmax(1).cpu()
            self.confusion.add(label, prediction)
        return self.confusion.compute()

    def fit(self):
        cfg = self.cfg
        for epoch in remaining_epochs_until(cfg.epochs):
            self.train_epoch()
            iou, accuracy = self.validate()
            miou = sum(iou) / len(iou)
            table = dict(zip(cfg.classes, (round(v, 4) for v in iou)))
            self.log.write(json.dumps({"epoch": epoch, "miou": miou, "accuracy": accuracy, **table}) + "\n")
            if miou > self.best.miou:
                self.best.miou, self.best.epoch, self.best.per_class = miou, epoch, iou
                if rank() == 0:
                    atomic_save(self.model.state_dict(), os.path.join(cfg.out, "best.pt"))
            if rank() == 0:
                print(f"[{epoch:3d}] mIoU {miou:.4f} (best {self.best.miou:.4f} in {self.best.epoch})")


if __name__ == "__main__":
    elasticrun.init()
    torch.manual_seed(3)
    config = Config()
    os.makedirs(config.out, exist_ok=True)
    if once("config") and rank() == 0:
        Path(config.out, "config.json").write_text(json.dumps(asdict(config), indent=1))
    trainer = Trainer(config)
    trainer.fit()
    if rank() == 0:
        print(dict(zip(config.classes, trainer.best.per_class)))
