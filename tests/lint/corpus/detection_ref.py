"""Fine-tunes a Faster R-CNN on Penn-Fudan, after torchvision's detection references."""
import argparse
import datetime
import json
import math
import os
import sys
import time
from collections import defaultdict, deque

import numpy as np
import torch
import torchvision
from PIL import Image
from torch.utils.data import Dataset, Subset
from torchvision.models.detection import fasterrcnn_resnet50_fpn
from torchvision.ops import box_iou
from torchvision.transforms.functional import to_tensor

from elasticrun import AdaptiveDataLoader, AdaptiveDataParallel, device, rank, remaining_epochs_until, world_size


class SmoothedValue:
    """Tracks a series of values and gives the median of a window."""

    def __init__(self, window_size: int = 20):
        self.deque = deque(maxlen=window_size)

    def update(self, value: float) -> None:
        self.deque.append(value)  # ARGUABLE: printed only

    @property
    def median(self) -> float:
        return float(np.median(list(self.deque))) if self.deque else float("nan")


class MetricLogger:
    def __init__(self, delimiter: str = "  "):
        self.meters = defaultdict(SmoothedValue)
        self.delimiter = delimiter

    def update(self, **kwargs) -> None:
        for key, value in kwargs.items():
            self.meters[key].update(float(value))  # ARGUABLE: printed only

    def __str__(self) -> str:
        return self.delimiter.join(f"{name}: {meter.median:.4f}" for name, meter in self.meters.items())


class PennFudan(Dataset):
    def __init__(self, root: str):
        self.root = root
        self.images = sorted(os.listdir(os.path.join(root, "PNGImages")))
        self.masks = sorted(os.listdir(os.path.join(root, "PedMasks")))

    def __getitem__(self, index: int):
        image = Image.open(os.path.join(self.root, "PNGImages", self.images[index])).convert("RGB")
        mask = np.array(Image.open(os.path.join(self.root, "PedMasks", self.masks[index])))
        boxes = []
        for value in np.unique(mask)[1:]:
            ys, xs = np.where(mask == value)
            boxes.append([xs.min(), ys.min(), xs.max() + 1, ys.max() + 1])
        target = {"boxes": torch.tensor(boxes, dtype=torch.float32), "labels": torch.ones(len(boxes), dtype=torch.int64), "image_id": index}
        return to_tensor(image), target

    def __len__(self) -> int:
        return len(self.images)


def collate(batch):
    return tuple(zip(*batch))


def train_one_epoch(model, optimizer, loader, dev, epoch: int, print_freq: int) -> None:
    model.train()
    metric_logger = MetricLogger()
    warmup = None
    if epoch == 0:
        iterations = min(1000, len(loader) - 1)
        warmup = torch.optim.lr_scheduler.LinearLR(optimizer, start_factor=1e-3, total_iters=iterations)  # MISTAKE: unreg: the warm-up begins at its first iteration again after a restart in epoch 0, and multiplies the saved rate once more (or line with: warmup.step())
    for images, targets in loader:
        images = [image.to(dev) for image in images]
        targets = [{k: v.to(dev) if torch.is_tensor(v) else v for k, v in t.items()} for t in targets]
        loss_dict = model(images, targets)
        losses = sum(loss for loss in loss_dict.values())  # ARGUABLE: parts of it are means over sampled anchors of the share
        if not math.isfinite(losses.item()):  # ARGUABLE: decided by one replica's loss, as is meant
            print(f"Loss is {losses.item()}, stopping training")
            sys.exit(1)  # ARGUABLE: one replica ends by its own loss, which ends the job, as is meant
        optimizer.zero_grad()
        losses.backward()  # ARGUABLE: parts of it are means over sampled anchors of the share
        optimizer.step()
        if warmup is not None:
            warmup.step()
        metric_logger.update(loss=losses.item(), lr=optimizer.param_groups[0]["lr"])
        if loader.batch_index % print_freq == 0 and rank() == 0:
            print(f"Epoch: [{epoch}] [{loader.batch_index}/{len(loader)}] {metric_logger}")


@torch.inference_mode()
def evaluate(net, loader, dev, iou_threshold: float = 0.5):
    net.eval()
    results = []
    for images, targets in loader:
        outputs = net([image.to(dev) for image in images])
        for target, output in zip(targets, outputs):
            if len(output["boxes"]) == 0:
                matched = 0
            else:
                iou = box_iou(target["boxes"], output["boxes"].cpu())
                matched = int((iou.max(1).values > iou_threshold).sum())
            results.append({"image_id": target["image_id"], "found": matched, "of": len(target["boxes"])})  # MISTAKE: sum: results of one replica's images, and only of those since the restart (or line with: results = []) (or line with: found = sum(r["found"]) (or line with: return found)
    found = sum(r["found"] for r in results)
    return found / max(1, sum(r["of"] for r in results)), results


def get_args_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description="PyTorch Detection Training")
    parser.add_argument("--data-path", default="PennFudanPed")
    parser.add_argument("--epochs", default=26, type=int)
    parser.add_argument("--batch-size", default=8, type=int)
    parser.add_argument("--lr", default=0.02, type=float)
    parser.add_argument("--lr-steps", default=[16, 22], nargs="+", type=int)
    parser.add_argument("--print-freq", default=20, type=int)
    parser.add_argument("--output-dir", default="out")
    return parser


def main(args: argparse.Namespace) -> None:
    os.makedirs(args.output_dir, exist_ok=True)
    torch.manual_seed(0)
    dev = device()
    dataset = PennFudan(args.data_path)
    indices = torch.randperm(len(dataset)).tolist()
    train = AdaptiveDataLoader(Subset(dataset, indices[:-50]), batch_size=args.batch_size, shuffle=True, num_workers=4, collate_fn=collate)
    test = AdaptiveDataLoader(Subset(dataset, indices[-50:]), batch_size=8, even_batches=False, collate_fn=collate)
    net = fasterrcnn_resnet50_fpn(weights=torchvision.models.detection.FasterRCNN_ResNet50_FPN_Weights.DEFAULT).to(dev)
    params = [p for p in net.parameters() if p.requires_grad]
    optimizer = torch.optim.SGD(params, lr=args.lr * world_size() / 8, momentum=0.9, weight_decay=1e-4)  # MISTAKE: world: the batch is global, so the learning rate must not follow the number of replicas
    lr_scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, milestones=args.lr_steps, gamma=0.1)
    model = AdaptiveDataParallel(net, optimizer, lr_scheduler)
    start_time = time.time()
    for epoch in remaining_epochs_until(args.epochs):
        train_one_epoch(model, optimizer, train, dev, epoch, args.print_freq)
        recall, results = evaluate(net, test, dev)
        lr_scheduler.step()
        if rank() == 0:
            print(f"epoch {epoch}: recall {recall:.3f}")  # ARGUABLE: marked where it is summed
            with open(os.path.join(args.output_dir, f"results_{epoch}.json"), "w") as f:
                json.dump(results, f)  # ARGUABLE: marked where it is filled
    total_time = str(datetime.timedelta(seconds=int(time.time() - start_time)))
    if rank() == 0:
        print(f"Training time {total_time}")  # ARGUABLE: of this start alone, but printed only


if __name__ == "__main__":
    main(get_args_parser().parse_args())
