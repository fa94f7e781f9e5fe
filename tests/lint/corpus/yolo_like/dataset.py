"""Images with grids of boxes."""
import random

import torch
from torch.utils.data import Dataset
from torchvision.io import read_image


class Boxes(Dataset):
    def __init__(self, listing, mosaic):
        with open(listing) as f:
            lines = set(f.read().split())
        self.files = list(lines)  # MISTAKE: data: a list of a set of strings has another order in each process (or line with: lines = set)
        self.mosaic = mosaic

    def __len__(self):
        return len(self.files)

    def load(self, i):
        image = read_image(self.files[i]).float() / 255
        return image, torch.load(self.files[i] + ".grid.pt")

    def __getitem__(self, i):
        image, grid = self.load(i)
        if self.mosaic and random.random() < 0.5:
            other, other_grid = self.load(random.randrange(len(self)))
            half = image.shape[2] // 2
            image[..., half:], grid[..., grid.shape[-1] // 2 :] = other[..., half:], other_grid[..., grid.shape[-1] // 2 :]
        return image, grid


def collate(items):
    images, grids = zip(*items)
    return torch.stack(images), torch.stack(grids).float()
