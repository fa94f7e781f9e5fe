"""Box regression on a cached tensor data set."""
import os

import torch
import torchvision
from hooks import Announce, BestCheckpointer, FreezeBackbone, IterationTimer, JsonWriter
from torch import nn
from torch.utils.data import TensorDataset
from trainer import Trainer

from elasticrun import AdaptiveDataLoader


class Detector(nn.Module):
    def __init__(self):
        super().__init__()
        resnet = torchvision.models.resnet18(weights="DEFAULT")
        self.backbone = nn.Sequential(*list(resnet.children())[:-1])
        self.head = nn.Linear(512, 4)

    def forward(self, x):
        return self.head(self.backbone(x).flatten(1)).sigmoid()


def load(split):
    blob = torch.load(f"boxes/{split}.pt")
    return TensorDataset(blob["images"], blob["boxes"])


if __name__ == "__main__":
    os.makedirs("det", exist_ok=True)
    train = AdaptiveDataLoader(load("train"), batch_size=16, shuffle=True)
    valid = AdaptiveDataLoader(load("val"), batch_size=16)
    trainer = Trainer(Detector(), train, valid, epochs=12, lr=0.02)
    trainer.register_hooks([IterationTimer(), JsonWriter("det/metrics.json"), BestCheckpointer("det"), Announce(), FreezeBackbone(2)])
    trainer.train()
