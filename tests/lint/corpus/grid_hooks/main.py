"""A one-stage detector on a grid, trained with hooks.  elasticrun run main.py --data data/grid"""
import argparse
import os
import time

import torch
import torch.nn as nn
import torch.nn.functional as F
from engine import SimpleTrainer
from hooks import BestCheckpointer, EvalHook, IterationTimer, JSONWriter
from torch.utils.data import Dataset

from elasticrun import AdaptiveDataLoader


class GridBoxes(Dataset):
    """Per sample: image, objectness grid, class grid, box grid."""

    def __init__(self, root, split):
        self.items = torch.load(os.path.join(root, f"{split}.pt"))
        self.augment = split == "train"

    def __len__(self):
        return len(self.items)

    def __getitem__(self, index):
        image, obj, cls, box = self.items[index]
        if self.augment and torch.rand(()) < 0.1:
            image = image + 0.02 * torch.randn_like(image)
        main_class = cls.flatten()[obj.flatten().argmax()]
        return image, {"obj": obj, "cls": cls, "box": box, "main_class": main_class}


class GridDetector(nn.Module):
    def __init__(self, num_classes, width=64):
        super().__init__()
        self.backbone = nn.Sequential(
            nn.Conv2d(3, width, 3, 2, 1), nn.GroupNorm(8, width), nn.ReLU(),
            nn.Conv2d(width, 2 * width, 3, 2, 1), nn.GroupNorm(8, 2 * width), nn.ReLU(),
            nn.Conv2d(2 * width, 2 * width, 3, 2, 1), nn.ReLU(),
        )
        self.obj = nn.Conv2d(2 * width, 1, 1)
        self.cls = nn.Conv2d(2 * width, num_classes, 1)
        self.box = nn.Conv2d(2 * width, 4, 1)

    def predict(self, images):
        h = self.backbone(images)
        return self.obj(h)[:, 0], self.cls(h), self.box(h)

    def forward(self, images, targets):
        obj, cls, box = self.predict(images)
        positive = targets["obj"] > 0.5
        loss_obj = F.binary_cross_entropy_with_logits(obj, targets["obj"].float())
        cls_map = F.cross_entropy(cls, targets["cls"], reduction="none")
        loss_cls = (cls_map * positive).mean()
        distance = F.smooth_l1_loss(box, targets["box"], reduction="none").sum(1)
        loss_box = 5.0 * (distance * positive).mean()
        return {"loss_obj": loss_obj, "loss_cls": loss_cls, "loss_box": loss_box}


def setup():
    parser = argparse.ArgumentParser()
    parser.add_argument("--data", required=True)
    parser.add_argument("--num-classes", type=int, default=20)
    parser.add_argument("--ims-per-batch", type=int, default=16)
    parser.add_argument("--max-epoch", type=int, default=24)
    parser.add_argument("--base-lr", type=float, default=0.02)
    parser.add_argument("--output", default="output")
    args = parser.parse_args()
    args.run = os.path.join(args.output, time.strftime("%Y%m%d-%H%M%S"))  # MISTAKE: name: each start makes a folder of another name (even each rank may), so the log begins anew elsewhere and the older records stay behind (or line with: JSONWriter(os.path.join(args.run, "metrics.json"))) (or line with: os.makedirs(args.run, exist_ok=True))
    os.makedirs(args.run, exist_ok=True)
    return args


def main():
    args = setup()
    torch.manual_seed(0)
    train_loader = AdaptiveDataLoader(
        GridBoxes(args.data, "train"), batch_size=args.ims_per_batch, shuffle=True, num_workers=4, name="train"
    )
    val_loader = AdaptiveDataLoader(
        GridBoxes(args.data, "val"), batch_size=args.ims_per_batch, even_batches=False, name="val"
    )
    net = GridDetector(args.num_classes)
    optimizer = torch.optim.SGD(net.parameters(), lr=args.base_lr, momentum=0.9, weight_decay=1e-4)
    scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, milestones=[16, 22], gamma=0.1)
    trainer = SimpleTrainer(net, optimizer, scheduler, train_loader)
    evaluation = EvalHook(val_loader)
    trainer.register_hooks([
        IterationTimer(), JSONWriter(os.path.join(args.run, "metrics.json")),
        evaluation, BestCheckpointer(evaluation, args.output),
    ])
    trainer.train(args.max_epoch)


if __name__ == "__main__":
    main()
