"""Segmentation of satellite tiles: the loss is weighed by valid pixels; ported."""
import json
from pathlib import Path

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import Dataset
from torchvision.io import read_image

from elasticrun import Accumulator, AdaptiveDataLoader, AdaptiveDataParallel, Variables, device, once, rank, remaining_epochs_until

CLASSES, VOID = 7, 255


class Tiles(Dataset):
    def __init__(self, root):
        self.images = sorted(Path(root).glob("*_sat.png"))

    def __len__(self):
        return len(self.images)

    def __getitem__(self, i):
        path = self.images[i]
        mask = read_image(str(path).replace("_sat", "_mask"))[0].long()
        return read_image(str(path)).float() / 255, mask


class UNet(nn.Module):
    def __init__(self, c=32):
        super().__init__()
        self.down = nn.Sequential(nn.Conv2d(3, c, 3, 2, 1), nn.ReLU(), nn.Conv2d(c, 2 * c, 3, 2, 1), nn.ReLU())
        self.up = nn.Sequential(nn.Upsample(scale_factor=4), nn.Conv2d(2 * c, c, 3, padding=1), nn.ReLU(), nn.Conv2d(c, CLASSES, 1))

    def forward(self, x):
        return self.up(self.down(x))


def evaluate(net, loader, dev):
    net.eval()
    total = Accumulator()
    with torch.no_grad():
        for image, mask in loader:
            pred = net(image.to(dev)).argmax(1).cpu()
            pred, mask = pred[: loader.num_valid], mask[: loader.num_valid]
            for c in range(CLASSES):
                total[f"and{c}"] += ((pred == c) & (mask == c)).sum()
                total[f"or{c}"] += (((pred == c) | (mask == c)) & (mask != VOID)).sum()
    with total.synchronized():
        return sum(total[f"and{c}"] / max(total[f"or{c}"], 1) for c in range(CLASSES)) / CLASSES


def main():
    torch.manual_seed(0)
    dev = device()
    train = AdaptiveDataLoader(Tiles("tiles/train"), batch_size=8, shuffle=True, num_workers=4, max_local_batch_size=2)
    valid = AdaptiveDataLoader(Tiles("tiles/valid"), batch_size=8, num_workers=4)
    net = UNet().to(dev)
    optimizer = torch.optim.AdamW(net.parameters(), 1e-3)
    model = AdaptiveDataParallel(net, optimizer)
    best = Variables(iou=0.0)
    if once("start") and rank() == 0:
        with open("starts.log", "a") as f:
            f.write("training begins\n")
    for epoch in remaining_epochs_until(50):
        model.train()
        for image, mask in train:
            mask = mask.to(dev)
            loss = F.cross_entropy(model(image.to(dev)), mask, ignore_index=VOID)
            optimizer.zero_grad()
            model.weigh(loss, (mask != VOID).sum()).backward()
            optimizer.step()
        iou = evaluate(net, valid, dev)
        improved = iou > best.iou
        best.iou = max(best.iou, iou)
        if rank() != 0:
            continue
        print(f"epoch {epoch}: IoU {iou:.4f}")
        if improved:
            torch.save(net.state_dict(), "tiles.pt")
            Path("tiles.json").write_text(json.dumps({"epoch": epoch, "iou": iou}))


main()
