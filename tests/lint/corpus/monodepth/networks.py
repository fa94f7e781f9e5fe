"""Depth from stereo pairs, and how an image is warped by it."""
import random
from pathlib import Path
from typing import Tuple

import torch
import torch.nn as nn
import torch.nn.functional as F
from PIL import Image
from torch.utils.data import Dataset
from torchvision import models
from torchvision.transforms.functional import to_tensor


class StereoPairs(Dataset):
    def __init__(self, root: str, split: str, height: int, width: int):
        self.root, self.size, self.train = Path(root), (width, height), split == "train"
        self.names = (self.root / f"{split}_files.txt").read_text().split()

    def __len__(self) -> int:
        return len(self.names)

    def __getitem__(self, i: int) -> Tuple[torch.Tensor, torch.Tensor]:
        left, right = (to_tensor(Image.open(self.root / side / self.names[i]).convert("RGB").resize(self.size)) for side in ("left", "right"))
        if self.train and random.random() > 0.5:
            left, right = right.flip(-1), left.flip(-1)
        return left, right


class DepthNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = nn.Sequential(*list(models.resnet18(weights="DEFAULT").children())[:-2])
        widths = [512, 256, 128, 64, 32, 16]
        self.decoder = nn.ModuleList(nn.Conv2d(a, b, 3, padding=1) for a, b in zip(widths, widths[1:]))
        self.disparity = nn.Conv2d(16, 1, 3, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.encoder(x)
        for layer in self.decoder:
            x = F.interpolate(F.elu(layer(x)), scale_factor=2)
        return 0.3 * self.disparity(x).sigmoid()


def warp(image: torch.Tensor, disparity: torch.Tensor) -> torch.Tensor:
    n, _, h, w = image.shape
    ys, xs = torch.meshgrid(torch.linspace(-1, 1, h), torch.linspace(-1, 1, w), indexing="ij")
    grid = torch.stack([xs, ys], -1).to(image).expand(n, h, w, 2).clone()
    grid[..., 0] -= 2 * disparity[:, 0]
    return F.grid_sample(image, grid, padding_mode="border", align_corners=True)


def smoothness(disparity: torch.Tensor, image: torch.Tensor) -> torch.Tensor:
    dx = (disparity[..., :-1] - disparity[..., 1:]).abs() * torch.exp(-(image[..., :-1] - image[..., 1:]).abs().mean(1, keepdim=True))
    dy = (disparity[..., :-1, :] - disparity[..., 1:, :]).abs() * torch.exp(-(image[..., :-1, :] - image[..., 1:, :]).abs().mean(1, keepdim=True))
    return dx.mean() + dy.mean()
