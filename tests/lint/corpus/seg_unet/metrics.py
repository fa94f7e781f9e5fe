import torch
import torch.nn.functional as F

from elasticrun import Accumulator


def soft_dice_loss(logits, target, classes, eps=1e-5):
    """Dice over the whole batch, as in nnU-Net's batch_dice."""
    p = logits.softmax(1)
    y = F.one_hot(target, classes).permute(0, 3, 1, 2).float()
    dims = (0, 2, 3)
    inter = (p * y).sum(dims)
    total = p.sum(dims) + y.sum(dims)
    return 1 - ((2 * inter + eps) / (total + eps))[1:].mean()  # ARGUABLE: labelled in train.py, where the loss is made


class Dice:
    """Mean dice of the foreground classes over all pixels of a data set."""

    def __init__(self, classes):
        self.classes = classes
        self.sums = Accumulator()

    def update(self, prediction, target):
        for c in range(1, self.classes):
            p, y = prediction == c, target == c
            self.sums[f"inter{c}"] += (p & y).sum()
            self.sums[f"total{c}"] += p.sum() + y.sum()

    def compute(self):
        with self.sums.synchronized():
            return {c: 2 * self.sums[f"inter{c}"] / max(1, self.sums[f"total{c}"]) for c in range(1, self.classes)}


def mean(scores):
    values = torch.tensor([float(v) for v in scores.values()])
    return values.mean().item()
