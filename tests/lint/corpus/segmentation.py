"""Semantic segmentation, confusion matrix and weighted loss."""
import argparse

import torch
import torch.nn as nn
import torchvision
from torchvision.datasets import VOCSegmentation
from torchvision.transforms import functional as TF

from elasticrun import AdaptiveDataLoader, AdaptiveDataParallel, device, rank, remaining_epochs_until


class ConfusionMatrix:
    def __init__(self, n):
        self.n = n
        self.mat = torch.zeros(n, n, dtype=torch.long)

    def update(self, want, got):
        keep = (want >= 0) & (want < self.n)
        self.mat += torch.bincount(self.n * want[keep] + got[keep], minlength=self.n**2).reshape(self.n, self.n)  # ARGUABLE: marked where it is called

    def iou(self):
        h = self.mat.float()
        return (h.diag() / (h.sum(0) + h.sum(1) - h.diag())).nanmean().item()


def both(image, mask):
    image, mask = TF.resize(image, [256, 256]), TF.resize(mask, [256, 256], TF.InterpolationMode.NEAREST)
    return TF.to_tensor(image), TF.pil_to_tensor(mask).squeeze(0).long()


def evaluate(net, loader, dev, num_classes):
    net.eval()
    confmat = ConfusionMatrix(num_classes)
    with torch.no_grad():
        for image, target in loader:
            confmat.update(target.flatten(), net(image.to(dev))["out"].argmax(1).flatten().cpu())  # MISTAKE: sum: filled over a loop that may be continued, by one replica's samples and its padding (or line with: return confmat) (or line with: confmat = ConfusionMatrix)
    return confmat


def main(args):
    torch.manual_seed(0)
    dev = device()
    train_set = VOCSegmentation("data", image_set="train", transforms=both)
    val_set = VOCSegmentation("data", image_set="val", transforms=both)
    train = AdaptiveDataLoader(train_set, batch_size=args.batch_size, shuffle=True, drop_last=True, num_workers=4)
    val = AdaptiveDataLoader(val_set, batch_size=8)
    net = torchvision.models.segmentation.fcn_resnet50(weights=None, num_classes=21).to(dev)
    weight = torch.ones(21, device=dev)
    weight[0] = 0.2
    criterion = nn.CrossEntropyLoss(weight=weight, ignore_index=255)
    optimizer = torch.optim.SGD(net.parameters(), lr=args.lr, momentum=0.9)
    steps = len(train) * args.epochs
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda s: (1 - s / (steps + 1)) ** 0.9)
    model = AdaptiveDataParallel(net, optimizer, scheduler)
    best_iou = 0.0
    for epoch in remaining_epochs_until(args.epochs):
        model.train()
        for image, target in train:
            loss = criterion(model(image.to(dev))["out"], target.to(dev))
            optimizer.zero_grad()
            loss.backward()  # MISTAKE: weigh: divided by the weights of valid pixels of the share, so it depends on the cut; model.weigh(loss, weight of pixels) (or line with: loss = criterion) (or line with: criterion = nn.CrossEntropyLoss)
            optimizer.step()
            scheduler.step()
        iou = evaluate(net, val, dev, 21).iou()
        if iou > best_iou:
            best_iou = iou  # MISTAKE: lost: 0 after a restart (or line with: if iou > best_iou) (or line with: best_iou = 0.0)
            if rank() == 0:
                torch.save(net.state_dict(), "fcn_best.pth")
        if rank() == 0:
            print(f"epoch {epoch}: mean IoU {iou:.4f}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--lr", type=float, default=0.02)
    parser.add_argument("--epochs", type=int, default=30)
    main(parser.parse_args())
